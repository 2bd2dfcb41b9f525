"""The graph that passes read and edit, and its way from and to TensorFlow's."""
