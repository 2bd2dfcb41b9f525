"""Functions that define their gradient, such as `tf.nn.silu`: read where that gradient is the usual one."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from custom_ops.errors import DynamicError

_POINTS = 3  # at which both gradients are compared
_TOLERANCE = 1e-4
_OF_BFLOAT16 = 0.05


def require_usual_gradient(op: Any) -> None:
    """Compare the gradient that a function declares with the derivative of what it computes, at random points.

    Args:
        op: an IdentityN, the end of a function under `tf.custom_gradient`: its results, then its arguments.

    Raises:
        DynamicError: they differ, or cannot be compared.
    """
    try:
        same = _is_derivative(op)
    except Exception as error:
        raise DynamicError(
            "tfmem cannot compare its custom gradient with the usual one; write it without tf.custom_gradient"
        ) from error
    if not same:
        raise DynamicError(
            "its custom gradient is not the derivative of what it computes; write it without tf.custom_gradient"
        )


def _is_derivative(op: Any) -> bool:
    declared = ops.gradient_registry.lookup(op.get_attr("_gradient_op_type").decode())
    results, arguments = _parts(op)
    with op.graph.as_default():
        given = [
            tf.compat.v1.placeholder_with_default(tf.ones(each.shape, each.dtype), each.shape) for each in op.outputs
        ]
        own = declared(op, *given)[-len(arguments) :]
        usual = tf.compat.v1.gradients(results, arguments, given[: len(results)])
    pairs = [
        tuple(tf.zeros_like(argument) if each is None else each for each in pair)
        for *pair, argument in zip(own, usual, arguments, strict=True)
        if pair != [None, None]
    ]
    tolerance = _OF_BFLOAT16 if any(each.dtype == tf.bfloat16 for each in arguments) else _TOLERANCE
    free = [each for each in arguments if tf.get_static_value(each) is None]
    with tf.compat.v1.Session(graph=op.graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})) as session:
        for seed in range(_POINTS):
            draw = np.random.default_rng(seed).normal
            feeds = {each.name: draw(size=each.shape.as_list()).astype(each.dtype.as_numpy_dtype) for each in free}
            for found, expected in session.run(pairs, feeds):
                ours, theirs = (np.asarray(each, np.float64) for each in (found, expected))
                if not np.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
                    return False
    return True


def _parts(op: Any) -> tuple[list[Any], list[Any]]:
    """The results of the function, and its arguments: the inputs behind the last one that depends on another."""
    inputs = list(op.inputs)
    names = {tensor.op.name for tensor in inputs}
    last = max((number for number, tensor in enumerate(inputs) if _reaches(tensor.op, names)), default=0)
    return inputs[: last + 1], inputs[last + 1 :]


def _reaches(op: Any, names: set[str]) -> bool:
    """Whether an op depends on another one of `names`."""
    waiting, seen = [tensor.op for tensor in op.inputs], set[str]()
    while waiting:
        current = waiting.pop()
        if current.name in names and current.name != op.name:
            return True
        if current.name not in seen:
            seen.add(current.name)
            waiting += [tensor.op for tensor in current.inputs]
    return False
