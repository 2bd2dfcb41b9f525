"""Nets whose graph changes with every input (VPPS): programs of one node, their gradients, and what the op reads."""
