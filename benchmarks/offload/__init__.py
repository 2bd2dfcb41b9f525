"""The offload benchmark, its cases and tables."""
