"""Replaces the recurrences of a function and compares it with what it was: what the tests of the matcher share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tfmem
from custom_ops.load import load
from graph_passes.passes.recurrent.match import RECURRENT_OP, RecurrentPlan
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.devices import find_target
from tfmem.kernels.replace_recurrent import replace_recurrent

KERAS = [keras, tf_keras]
LOOPS = ("While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall", "LoopCond")
UNITS, INPUTS, TIME, BATCH = 4, 3, 7, 5
SEQUENCE = tf.TensorSpec([None, None, INPUTS], tf.float32)
MASK = tf.TensorSpec([None, None], tf.bool)


def data(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype("float32")


X = data(BATCH, TIME, INPUTS)
W, R = data(INPUTS, UNITS, seed=1, scale=0.5), data(UNITS, UNITS, seed=2, scale=0.5)
STEPS = X.transpose(1, 0, 2)
LENGTHS = np.arange(TIME)[None] < np.array([7, 3, 1, 0, 5])[:, None]


def with_layers_replaced(function: Callable[..., Any], *specs: Any) -> tuple[Any, Any, RecurrentPlan, list[str]]:
    """The trace, the replaced function, what was done, and the op types that run."""
    trace = tf.function(autograph=False)(lambda *inputs: function(*inputs)).get_concrete_function(*specs)  # noqa: PLW0108
    captured, plan = replace_recurrent(capture_concrete(trace), find_target("", load()), tfmem.Options())
    ops = [node.op for node in captured.graph_def.node]
    return trace, restore_concrete(trace, captured, captured.graph_def), plan, ops


def check(
    function: Callable[..., Any],
    specs: Sequence[Any],
    values: Sequence[Any],
    launches: int = 1,
    tolerance: float = 1e-5,
) -> RecurrentPlan:
    """All loops are replaced, for so many launches, and compute the same."""
    trace, replaced, plan, ops = with_layers_replaced(function, *specs)
    assert not plan.unmatched, str(plan)
    assert ops.count(RECURRENT_OP) == launches, str(plan)
    assert not set(ops) & set(LOOPS)
    compare(trace, replaced, values, tolerance)
    return plan


def compare(trace: Any, replaced: Any, values: Sequence[Any], tolerance: float = 1e-5) -> None:
    before = [variable.numpy() for variable in trace.graph.variables]
    arguments = [tf.constant(value) for value in values]
    expected = tf.nest.flatten(trace(*arguments))
    written = [variable.numpy() for variable in trace.graph.variables]
    for variable, value in zip(trace.graph.variables, before, strict=True):
        variable.assign(value)
    found = tf.nest.flatten(replaced(*arguments))
    for new, old in zip(found, expected, strict=True):
        assert new.dtype == old.dtype
        numbers = [tf.cast(each, tf.float64).numpy() for each in (new, old)]
        np.testing.assert_allclose(*numbers, rtol=tolerance, atol=tolerance)
    for variable, value in zip(trace.graph.variables, written, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=tolerance, atol=tolerance)


def randomised(layer: Any, shape: Sequence[int | None] = (None, None, INPUTS)) -> Any:
    """`layer`, built, with weights that are no special case (biases and gains of 0 and 1 are)."""
    layer.build(tuple(shape))
    for seed, weight in enumerate(layer.weights):
        if "float" in str(weight.dtype) and tuple(weight.shape):
            weight.assign(data(*weight.shape, seed=seed, scale=0.5))
    return layer


def plain(x: Any, h: Any) -> Any:
    return tf.tanh(x @ W + h @ R)
