"""A traced function whose results wait for nothing but what they are computed from.

`tf.function` lets each result wait for all that its trace does besides, by a control edge from the last assignment.
Where the result is a GPU's and the assignment a CPU's, TensorFlow sends something empty to the GPU for it, behind all
that the GPU has been told to do: so the call would return when the kernel has ended, and not when it was launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.python.eager import record

from tfmem.capture.captured import op_name
from tfmem.capture.concrete_function import (
    ConcreteFunction,
    RestoredFunction,
    call_traced,
    capture_concrete,
    restore_concrete,
)


def with_early_results(cf: ConcreteFunction) -> RestoredFunction:
    """The same function; what it does besides is over, too, when a call of it has returned. See `call_unrecorded`."""
    captured = capture_concrete(cf)
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    results = set(map(op_name, captured.fetches))
    for node in graph_def.node:
        if node.name in results and node.op == "Identity":
            node.input[:] = [name for name in node.input if not name.startswith("^")]
    # What the results waited for: TensorFlow would place it, though nobody reads it, and send what it waits for there.
    read = {name.lstrip("^") for node in graph_def.node for name in node.input}.union(captured.control_fetches)
    kept = [node for node in graph_def.node if node.op != "NoOp" or node.name in read]
    graph_def = GraphDef(versions=graph_def.versions, node=kept, library=graph_def.library)
    return restore_concrete(cf, captured, graph_def)


def call_unrecorded(cf: RestoredFunction, tensors: Sequence[tf.Tensor]) -> Any:
    """What an eager call returns; no tape knows of it."""
    with record.stop_recording():
        return call_traced(cf, tuple(tensors), {})
