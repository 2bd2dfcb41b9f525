"""Tensors out and back, and the counters once all is still: what the tests of the MemOps share."""

from __future__ import annotations

import time

import tensorflow as tf

from custom_ops.load import Counters, Library
from tests import memops

MIB = 1 << 20


def round_trip(library: Library, tensor: tf.Tensor, **attributes: object) -> tf.Tensor:
    """Out, released, and back: in this order."""
    handle = memops.offload(library, tensor, **attributes)
    released = memops.release(library, tensor, handle)
    # In a graph an Operation; within a tf.function, automatic control dependencies would do.
    with tf.control_dependencies([] if released is None else [released]):
        fetched = memops.prefetch(library, handle, tensor.dtype, tensor.shape)
    return memops.await_(library, fetched, handle)


def settled(library: Library) -> Counters:
    """The counters, once the I/O threads have let go of the last step."""
    for _ in range(200):
        counters = library.counters()
        if counters.live_tickets == 0 and counters.spill_bytes_in_use == 0:
            break
        time.sleep(0.01)
    return counters
