"""Replaces recurrent layers by `TfmemRecurrent`: `plan_recurrent` (plan.py) decides, with what the folders find."""
