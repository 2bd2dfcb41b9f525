"""Mutated graphs, optimised by the thousand."""
