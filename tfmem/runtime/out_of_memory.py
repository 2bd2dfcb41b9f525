"""Which errors of a step mean that memory ran out.

The type of an error does not show this: cuDNN's callers report a lack of workspace as UnknownError, NotFoundError or
InternalError, and so does TensorFlow what a Python function raised, or a file that is missing; and a Python function's
MemoryError is a ResourceExhaustedError.
"""

from __future__ import annotations

import tensorflow as tf

SUSPECTS = (tf.errors.ResourceExhaustedError, tf.errors.UnknownError, tf.errors.NotFoundError, tf.errors.InternalError)

# What TensorFlow, CUDA's libraries and the MemOps say, in lower case.
_SAID = (
    "oom when allocating",  # op_kernel.cc
    "failed to allocate",  # CUDNN failed to allocate the scratch space ...; allocators; XLA
    "out of memory",
    "out_of_memory",  # CUDA_ERROR_...
    "alloc_failed",  # CUDNN_STATUS_..., CUBLAS_STATUS_...
    "no algorithm worked",  # each that was tried failed, for lack of workspace
    "no-scratch fallback runner",  # and the algorithm that was chosen needs some
    "failed to get convolution algorithm",
    "host memory is exhausted",  # what moves has to go somewhere: pinned_pool.cc, spill_file.cc
    "host budget: ",
    "spill budget: ",
    "' is full: '",
)
_OF_PYTHON = "Traceback (most recent call last)"


def lacks_memory(error: Exception) -> bool:
    """Whether a step that failed with `error` might have run if it had moved more, or less.

    An error of a user's Python function does not count, whatever its text: a second run would call it twice.
    """
    message = str(error)
    if not isinstance(error, SUSPECTS) or _OF_PYTHON in message:
        return False
    message = message.lower()
    return any(said in message for said in _SAID)
