"""CUDA source compiled, cached, tuned and launched."""
