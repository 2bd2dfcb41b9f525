"""Replaces large float32 products by three TF32 products each, where that is faster."""
