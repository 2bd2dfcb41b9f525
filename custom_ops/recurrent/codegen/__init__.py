"""CUDA source from a cell and a configuration; it only instantiates kernels/*.cuh."""
