"""Several GPUs under a budget: Keras's networks under MirroredStrategy, with tfmem and without."""
