"""Reads ops of TensorFlow: one element of a result, in elements of the inputs."""
