"""Takes graphs out of TensorFlow's objects and puts edited ones back, without policy.

Each module says which of TensorFlow's internals it relies on.
"""
