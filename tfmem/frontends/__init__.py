"""What `optimize` takes and gives back: one module for each kind of object."""
