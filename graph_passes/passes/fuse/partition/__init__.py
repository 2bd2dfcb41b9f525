"""Chooses which ops share a kernel and which kernels share an op (FusionStitching, sections 4 and 5)."""
