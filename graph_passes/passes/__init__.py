"""The eight passes, a folder each: `plan.py` decides, `apply.py` turns the plan into rewrites."""
