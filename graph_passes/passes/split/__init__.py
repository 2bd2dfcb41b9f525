"""Runs parts of a step on pieces of the batch, one piece after the other."""
