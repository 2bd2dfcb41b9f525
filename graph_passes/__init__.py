"""Passes over TensorFlow graphs: pure Python that plans and edits, and runs nothing."""
