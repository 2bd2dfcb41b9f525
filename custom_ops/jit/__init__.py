"""From CUDA source to something that runs."""
