"""Takes graphs out of TensorFlow's objects and puts edited ones back: one file per kind of object,
no policy.
"""
