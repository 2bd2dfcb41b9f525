"""Writes a planned kernel as CUDA text."""
