"""Elementwise ops as one table, and programs of them. Knows no graphs, no devices and no recurrence."""
