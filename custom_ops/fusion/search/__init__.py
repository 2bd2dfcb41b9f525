"""Chooses among the plans of a kernel: search space, cost model, measurements."""
