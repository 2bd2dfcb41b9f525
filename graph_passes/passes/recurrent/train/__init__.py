"""Recurrences together with their gradients."""
