"""The eight passes, a folder each: `plan.py` decides, `apply.py` edits the graph as the plan says."""
