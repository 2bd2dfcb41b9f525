"""Finds recurrences in a graph: loops in one form, unrolled ones rolled up."""
