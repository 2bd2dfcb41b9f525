"""Rewrites a graph so that fusion finds larger regions: flat batched products, copies of cheap producers."""
