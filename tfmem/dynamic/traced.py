"""Node kinds from TensorFlow's ops: the graph of a function over one node, read as expressions.

A value of a node is a vector. Where TensorFlow has a tensor of several dimensions, the vector has its numbers row by
row, so what TensorFlow reshapes stays the same vector. Every op is read by the shapes of its tensors (`reader.py`, and
`op_reader.py` and `composed_ops.py` for single ops).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from custom_ops.errors import DynamicError
from tfmem.dynamic.composed_ops import ComposedOpReader
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.kinds import Result
from tfmem.dynamic.recorder import Argument, Recorder


def call_traced(
    name: str,
    function: Callable[..., Any],
    recorder: Recorder,
    states: Sequence[tuple[Expression, ...]],
    arguments: Sequence[Argument],
) -> Result:
    """The result of `function` for the children's states and the arguments, as expressions of `recorder`.

    Raises:
        DynamicError: the function uses an op that nodes do not support, or uses one on more than vectors. The error
            names the op, and the line of the user's code.
    """
    vectors = [vector for state in states for vector in state]
    specs = [tf.TensorSpec([vector.width], recorder.dtype) for vector in vectors] + [
        tf.TensorSpec([], tf.int32) for _ in arguments
    ]
    returned: list[Any] = []

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        rest = list(tensors[: len(vectors)])
        given = []
        for state in states:
            own, rest = tuple(rest[: len(state)]), rest[len(state) :]
            given.append(own[0] if len(own) == 1 else own)
        found = function(tuple(given), *tensors[len(vectors) :])
        result = found if isinstance(found, Result) else Result(state=found)
        returned.append((_count(result.state), result.loss is not None, _count(result.outputs)))
        return [*_listed(result.state), *([] if result.loss is None else [result.loss]), *_listed(result.outputs)]

    traced = tf.function(flat, autograph=True).get_concrete_function(*specs)
    reader = ComposedOpReader(name, recorder)
    inputs = traced.inputs[: len(specs)]
    for tensor, value in zip(inputs, [*vectors, *arguments], strict=True):
        reader.known[tensor.ref()] = value
    for tensor, external in zip(traced.inputs[len(specs) :], traced.captured_inputs, strict=True):
        reader.captured[tensor.ref()] = external
    for op in traced.graph.get_operations():
        reader.check_effects(op)
    count, has_loss, outputs = returned[-1]
    if len(traced.outputs) != count + has_loss + outputs:
        raise DynamicError(f"kind '{name}' returns a value that is no vector; expected vectors, or tuples of vectors")
    for position, tensor in enumerate(traced.outputs):
        if sum(size != 1 for size in tensor.shape) > 1:
            what = "loss" if has_loss and position == count else "state" if position < count else "output"
            raise reader.error(
                tensor.op, f"its shape as {what} is {tensor.shape}; expected a vector, as tf.reshape(..., [-1]) gives"
            )
    found = [reader.expression(tensor) for tensor in traced.outputs]
    loss = found[count] if has_loss else None
    return Result(tuple(found[:count]), loss, tuple(found[count + has_loss :]))


def _listed(vectors: Any) -> list[Any]:
    return list(vectors) if isinstance(vectors, tuple | list) else [vectors]


def _count(vectors: Any) -> int:
    return len(_listed(vectors))
