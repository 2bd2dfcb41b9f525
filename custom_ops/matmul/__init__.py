"""TfmemMatMul: float32 products on tensor cores."""
