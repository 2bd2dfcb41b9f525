"""Runs of a step without visible effects: on copies of its variables, with separate random streams.

Relies on `ConcreteFunction.captured_inputs`: a call passes the handles of a function's variables; and on
the data that TensorFlow keeps of a handle's variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.python.ops import handle_data_util

from graph_passes.graph.ops import is_update
from tfmem.capture.captured import BODIES, HARMLESS, READERS, every_node, is_stateful

_HANDLES = (tf.resource, tf.variant)
_OWN = frozenset({"TfmemFusion", "TfmemRecurrent", "TfmemMatMul", "StatelessWhile"})  # stateful in name alone
_LEAST_LEFT = 0.5  # of the memory that is free: copies take no more


class NotCopiedError(Exception):
    """A run on copies would have visible effects, or is impossible; the message says why."""


def noticed(graph_def: GraphDef) -> str:
    """Why a run on copies would have visible effects; "" if it has none."""
    known = READERS | HARMLESS | BODIES.keys() | _OWN
    for node in every_node(graph_def):
        if is_stateful(node.op) and node.op not in known and not is_update(node.op):
            return f"'{node.name}' ({node.op}) has effects that copies of variables do not contain"
        if node.op.startswith(("AnonymousIterator", "IteratorV2", "HashTable", "MutableHashTable", "LookupTable")):
            return f"'{node.name}' ({node.op}) is not a variable, so it cannot be copied"
    return ""


class Run(Protocol):
    """A function that can run on copies.

    Attributes:
        captured_inputs: tensors, the handles of variables among them.
        run_flat: runs it on its arguments and these.
    """

    @property
    def captured_inputs(self) -> Sequence[tf.Tensor]: ...

    @property
    def run_flat(self) -> Callable[[list[tf.Tensor]], Any]: ...


class Copies:
    """Copies of the variables of a step, and calls on them."""

    def __init__(self, function: Any, arguments: Sequence[tf.Tensor], free: int, like: Copies | None = None) -> None:
        """
        Args:
            function: a `ConcreteFunction`; the variables that it captured are copied, those of an optimizer, too.
            arguments: its flat arguments, without captures.
            free: bytes of the device's memory that are not in use.
            like: other copies, with whose values these begin; by default those of the variables.

        Raises:
            NotCopiedError: there is too little memory, or something else than a variable is reached through a handle.
            tf.errors.FailedPreconditionError: a variable has no value.
        """
        if any(tensor.dtype in _HANDLES for tensor in arguments):
            raise NotCopiedError("an argument of the step is a resource handle")
        self._arguments = list(arguments)
        handles = {id(tensor): tensor for tensor in function.captured_inputs if tensor.dtype in _HANDLES}
        held = {key: _held(handle) for key, handle in handles.items()}
        needed = sum((shape.num_elements() or 0) * dtype.size for dtype, shape in held.values())
        if needed > _LEAST_LEFT * free:
            raise NotCopiedError(f"copies of its variables would take {needed:,} bytes, of {free:,} that are free")
        values = handles if like is None else {key: like.handles[key] for key in handles}
        self._variables = {key: _copied(values[key], *held[key]) for key in handles}

    @property
    def handles(self) -> dict[int, tf.Tensor]:
        """The handles of the copies, by what they are copies of."""
        return {key: variable.handle for key, variable in self._variables.items()}

    def values(self) -> list[tf.Tensor]:
        """What the copies hold."""
        return [variable.read_value() for variable in self._variables.values()]

    def change(self, made: Callable[[tf.Tensor, int], tf.Tensor]) -> None:
        """Put what `made` makes of them in place of all values and arguments; it is also given a number of each."""
        for number, variable in enumerate(self._variables.values()):
            variable.assign(made(variable.read_value(), number))
        count = len(self._variables)
        self._arguments = [made(value, count + number) for number, value in enumerate(self._arguments)]

    def run(self, function: Run) -> Any:
        """Call what runs the step; waits for its results, and returns them."""
        copies = self._variables
        captured = [copies[id(t)].handle if id(t) in copies else t for t in function.captured_inputs]
        results = function.run_flat([*self._arguments, *captured])
        tf.test.experimental.sync_devices()
        return results


def _held(handle: tf.Tensor) -> tuple[tf.DType, tf.TensorShape]:
    """Dtype and shape of the variable behind a handle."""
    data = handle_data_util.get_handle_data(handle) if handle.dtype == tf.resource else None
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        raise NotCopiedError("it uses a resource that is not a variable")
    held = data.shape_and_type[0]
    return tf.as_dtype(held.dtype), tf.TensorShape(held.shape)


def _copied(handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Variable:
    with tf.device(handle.device):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        return tf.Variable(value, trainable=False, shape=shape, dtype=dtype)
