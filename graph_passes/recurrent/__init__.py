"""Replaces recurrent layers by `TfmemRecurrent`: `inference.plan_source` decides, with `plan.py` for layers that have a
gradient; `apply.py` edits."""
