"""Replaces recurrent layers by `TfmemRecurrent`: `plan.py` finds and decides, `apply.py` edits."""
