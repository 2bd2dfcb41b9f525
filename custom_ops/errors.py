"""The root of all errors and warnings that tfmem raises, and the errors of this layer."""

from __future__ import annotations

import inspect
import warnings

_NOT_THE_USERS = frozenset({"custom_ops", "graph_passes", "tfmem", "tensorflow", "keras", "tf_keras", "contextlib"})


class TfmemError(Exception):
    """Anything that tfmem reports to its user."""

    ag_pass_through = True  # raised while a tf.function is traced, it stays what it is (TensorFlow's AutoGraph asks)


class TfmemWarning(UserWarning):
    """What the user should know without asking for a report."""


def warn(message: str) -> None:
    """Show a `TfmemWarning` at the innermost line that is neither tfmem's nor TensorFlow's nor Keras's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, TfmemWarning, stacklevel=level if frame is not None else 2)


class OpLibraryError(TfmemError, ImportError):
    """There is no usable op library for the TensorFlow that runs, or no extension module, or a call of one failed."""


class CellError(TfmemError, ValueError):
    """A recurrent cell is malformed, or asks for something that its reader cannot do."""


class ProgramError(TfmemError, ValueError):
    """A program over tensors is malformed, or tensors do not fit it."""


class KernelError(TfmemError, RuntimeError):
    """A GPU kernel could not be generated, compiled, loaded or run."""


class RegionError(TfmemError, ValueError):
    """A region of a graph is malformed, or tensors do not fit it."""


class DynamicError(TfmemError, ValueError):
    """A dynamic net is malformed: an expression, a kind of node, or a batch of graphs; the message says which."""


class GradientError(TfmemError, LookupError):
    """TensorFlow asks for the gradient of an op that has none."""
