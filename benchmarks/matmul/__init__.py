"""Float32 products on tensor cores."""
