"""Random numbers of graphs that XLA runs: TensorFlow's to the bit, or XLA does not run them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.xla_draws import differs_in, has_floats
from tfmem.capture.xla_function import XlaFunction, xla_function


def with_xla(function: Any, *arguments: Any) -> XlaFunction:
    concrete = function.get_concrete_function(*arguments)
    return xla_function(concrete, capture_concrete(concrete), arguments, concrete)


def bits(tensor: Any) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
def test_floats_are_tensorflows(dtype: Any) -> None:
    @tf.function
    def drawn(seed: Any) -> Any:
        inside = tf.cond(
            seed[0] > 0, lambda: tf.random.stateless_uniform([7], seed, dtype=dtype), lambda: tf.zeros(7, dtype)
        )
        return [
            tf.random.stateless_uniform(shape, seed, dtype=dtype) for shape in ([], [1], [5, 7], [3, 64, 33])
        ], inside

    for seed in ([1, 2], [-(2**40), 7]):
        given = tf.constant(seed, tf.int64)
        function = with_xla(drawn, given)
        for found, expected in zip(tf.nest.flatten(function(given)), tf.nest.flatten(drawn(given)), strict=True):
            assert bits(found) == bits(expected)


def test_integers_and_dropout_of_keras_are_tensorflows() -> None:
    layer, x = keras.layers.Dropout(0.4, seed=3), tf.ones([8, 33])
    layer(x, training=True)
    state = layer.seed_generator.state

    @tf.function
    def drawn(x: Any) -> Any:
        state.assign([5, 0])
        seed = tf.cast(state.value, tf.int64)
        whole = tf.random.stateless_uniform([9], seed, maxval=100, dtype=tf.int32)
        return layer(x, training=True), layer(x, training=True), whole, tf.identity(state.value)

    found = with_xla(drawn, x)(x)
    for one, other in zip(found, drawn(x), strict=True):
        assert bits(one) == bits(other)


def test_what_would_draw_others_is_refused() -> None:
    seed = tf.constant([1, 2])
    cases = {
        "RandomUniform": lambda: tf.random.uniform([3], seed=1),
        "RandomStandardNormal": lambda: tf.random.normal([3]),
        "StatelessRandomNormalV2": lambda: tf.random.stateless_normal([3], seed),
        "StatelessTruncatedNormalV2": lambda: tf.random.stateless_truncated_normal([3], seed),
        "StatelessRandomUniform": lambda: tf.raw_ops.StatelessRandomUniform(shape=[3], seed=seed),
        "RandomShuffle": lambda: tf.random.shuffle(tf.range(3)),
        "CheckNumerics": lambda: tf.debugging.check_numerics(tf.ones([3]), "no"),
    }
    for op, make in cases.items():
        graph_def = tf.function(make).get_concrete_function().graph.as_graph_def()
        assert f"({op})" in differs_in(graph_def), op
        assert not has_floats(graph_def)
    uniform = tf.function(lambda: tf.random.stateless_uniform([3], seed)).get_concrete_function().graph.as_graph_def()
    assert not differs_in(uniform)
    assert has_floats(uniform)


def test_other_shapes_tapes_and_graphs_run_otherwise() -> None:
    variable = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x: Any) -> Any:
        variable.assign_add(1.0)
        return x * variable

    known = tf.ones([3])
    function = with_xla(step, known)
    assert b"_XlaMustCompile" in function.function_def.SerializeToString()
    np.testing.assert_array_equal(function(known), [3.0] * 3)
    function.otherwise = None  # type: ignore[assignment]
    np.testing.assert_array_equal(function(known), [4.0] * 3)
    function.otherwise = step.get_concrete_function()
    np.testing.assert_array_equal(function(tf.ones([2])), [5.0] * 2)
    np.testing.assert_array_equal(tf.function(lambda: function(known))(), [6.0] * 3)
    with tf.GradientTape() as tape:
        result = function(known)
    np.testing.assert_array_equal(tape.gradient(result, variable), 3.0)
