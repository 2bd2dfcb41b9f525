"""From a description of a kernel to its CUDA source."""
