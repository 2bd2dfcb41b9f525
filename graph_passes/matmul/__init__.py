"""Products of float32 matrices that run on tensor cores, as accurate as float32's own."""
