"""A traced function whose results wait for their inputs alone.

`tf.function` makes each result wait for all side effects of its trace, by a control edge from the last assignment. If
the result is on a GPU and the assignment on a CPU, TensorFlow sends an empty tensor to the GPU, behind all work that is
enqueued there. So the call would return when the kernel ends, and not when it is launched.
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
    """`cf` with results that wait for no side effect. A call still returns after all effects; see `call_unrecorded`."""
    captured = capture_concrete(cf)
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    results = set(map(op_name, captured.fetches))
    for node in graph_def.node:
        if node.name in results and node.op == "Identity":
            node.input[:] = [name for name in node.input if not name.startswith("^")]
    # Drop the no-op that results waited for: TensorFlow would place it, though no op reads it, and copy its inputs.
    read = {name.lstrip("^") for node in graph_def.node for name in node.input}.union(captured.control_fetches)
    kept = [node for node in graph_def.node if node.op != "NoOp" or node.name in read]
    graph_def = GraphDef(versions=graph_def.versions, node=kept, library=graph_def.library)
    return restore_concrete(cf, captured, graph_def)


def call_unrecorded(cf: RestoredFunction, tensors: Sequence[tf.Tensor]) -> Any:
    """What an eager call returns; no tape records the call."""
    with record.stop_recording():
        return call_traced(cf, tuple(tensors), {})
