"""Stitches the memory-intensive ops of a step into few kernels: finds regions, plans, and rewrites the graph."""
