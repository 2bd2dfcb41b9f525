"""Regions of a graph that run as one op."""
