"""Whether a replica of a distribution strategy runs, and what to say where it cannot be optimised by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from graph_passes.errors import ReplicasError


def other_replicas() -> str:
    """What is said of a step that one of several replicas is building; "" if there is but one."""
    if tf.distribute.in_cross_replica_context():
        return ""
    count = int(tf.distribute.get_strategy().num_replicas_in_sync)
    return f"it is built under {_strategy()} with {count} replicas" if count > 1 else ""


@contextmanager
def merges_told() -> Iterator[None]:
    """Around what traces: says what to do where a replica cannot meet others while a function of it is traced.

    Raises:
        ReplicasError: so it is. TensorFlow calls this a `merge_call`; an optimizer makes one in a single replica, too.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" in str(error) and tf.distribute.has_strategy():
            raise ReplicasError(_INNER.format(_strategy())) from error
        raise


def _strategy() -> str:
    return type(tf.distribute.get_strategy()).__name__


_INNER = (
    "under {} replicas meet within what `strategy.run` calls, so that cannot be an optimised function; optimise the "
    "function around it: tfmem.optimize(tf.function(lambda batch: strategy.run(step, args=(batch,)))), where `step` is "
    "the function itself"
)
