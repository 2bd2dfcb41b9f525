"""A hundred ways in which users write recurrences: which ones tfmem replaces, in inference and in training."""
