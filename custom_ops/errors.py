"""The root of all errors that tfmem raises, and those of this layer."""


class TfmemError(Exception):
    """Anything that tfmem reports to its user."""

    ag_pass_through = True  # raised while a tf.function is traced, it stays what it is (TensorFlow's AutoGraph asks)


class OpLibraryError(TfmemError, ImportError):
    """There is no usable op library for the TensorFlow that runs, or one of its calls failed."""


class CellError(TfmemError, ValueError):
    """A recurrent cell is malformed, or asks for something that its reader cannot do."""


class KernelError(TfmemError, RuntimeError):
    """A GPU kernel could not be generated, compiled, loaded or run."""
