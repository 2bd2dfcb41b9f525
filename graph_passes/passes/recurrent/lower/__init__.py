"""From a recurrence to its `Match`: the cell, what runs outside, who reads its results."""
