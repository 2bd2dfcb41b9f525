"""AutoVM: moves activations that wait for their gradient op out of device memory, and back in time."""
