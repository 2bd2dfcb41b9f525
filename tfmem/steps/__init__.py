"""The life of an optimised training step; `phases.py` has it as a table."""
