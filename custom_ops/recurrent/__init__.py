"""What recurrence adds to the GPU's common parts in `custom_ops.jit`, and TfmemRecurrent in TensorFlow."""
