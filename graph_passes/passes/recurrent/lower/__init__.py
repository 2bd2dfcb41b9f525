"""From a recurrence to its `Match`: the cell, what runs outside, and the readers of its results."""
