"""From a cell and a configuration to CUDA source, which only instantiates kernels/*.cuh."""
