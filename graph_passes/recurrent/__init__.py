"""Swaps recurrent layers for `TfmemRecurrent`: `plan.py` finds and decides, `apply.py` edits."""
