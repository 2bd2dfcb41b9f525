"""Calls of optimised functions: which trace they go to, and that it is looked up once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tfmem.capture.concrete_function import call_key, call_traced
from tfmem.frontends import function as optimized


def key(*args: Any, **kwargs: Any) -> Any:
    return call_key(args, kwargs)


def test_a_key_is_dtypes_and_shapes() -> None:
    a, b = tf.zeros([2, 3]), tf.ones([2, 3])
    assert key(a, b) == key(b, a)
    assert hash(key(a, b)) == hash(key(b, a))
    assert len({key(a), key(a, b), key(tf.zeros([3, 2])), key(tf.zeros([2, 3], tf.int32)), key()}) == 5


@pytest.mark.parametrize(
    "argument", [1, np.zeros(2), (tf.zeros(2),), tf.Variable(1.0), tf.Variable(1.0).handle, tf.ragged.constant([[1]])]
)
def test_what_else_a_trace_depends_on_has_no_key(argument: Any) -> None:
    assert key(tf.zeros(2), argument) is None
    assert key(x=tf.zeros(2)) is None


def test_the_context_counts() -> None:
    x = tf.zeros(2)
    outside = key(x)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert key(x) != outside
    assert key(x) == outside


@pytest.mark.parametrize("relaxed", [False, True])
def test_each_call_goes_to_its_trace(relaxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    trace = optimized.OptimizedFunction.trace
    monkeypatch.setattr(
        optimized.OptimizedFunction, "trace", lambda *args, **kwargs: asked.append(args) or trace(*args, **kwargs)
    )
    traced: list[Any] = []

    @tf.function(reduce_retracing=relaxed)
    def run(x: Any, y: Any) -> Any:
        traced.append(x.shape)
        return {"sum": x + y, "last": [x[-1]]}

    function = tfmem.optimize(run)
    for _ in range(2):
        for size in (2, 3, 4, 2):
            x = tf.range(size, dtype=tf.float32)
            found = function(x, x)
            np.testing.assert_array_equal(found["sum"], 2 * x)
            assert found["last"][0] == size - 1
    assert len(asked) == 3
    assert len(traced) == (2 if relaxed else 3)
    np.testing.assert_array_equal(function(np.ones(2, np.float32), y=tf.ones(2))["sum"], [2, 2])
    assert len(asked) == 4


def test_known_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "MOST_KNOWN", 2)
    function = tfmem.optimize(tf.function(lambda x: x + 1, reduce_retracing=True))
    for size in range(1, 9):
        assert function(tf.zeros(size)).shape == (size,)
        assert len(function._known) <= 2


def test_variables_are_made_by_the_first_call_alone() -> None:
    made: list[Any] = []

    @tf.function
    def run(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(2.0))
        return made[0] * x

    function = tfmem.optimize(run)
    assert [function(tf.constant(3.0)).numpy() for _ in range(3)] == [6, 6, 6]
    assert len(made) == 1


def test_gradients_flow_through_a_trace_that_is_called_directly() -> None:
    trace = tf.function(lambda x, scale: scale * x**2).get_concrete_function(tf.TensorSpec([]), 3.0)
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call_traced(trace, (x,), {})
    assert tape.gradient(y, x) == 12
