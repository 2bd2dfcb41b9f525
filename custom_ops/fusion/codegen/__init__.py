"""CUDA kernels for fusion patterns: FusionStitching (arXiv 1911.11576), section 5."""
