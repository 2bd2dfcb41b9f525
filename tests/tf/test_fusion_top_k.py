"""The largest numbers of short rows within kernels on a GPU: TensorFlow's, and its positions where some are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.analysis.device_support import CUDA, on_a_cpu, within
from graph_passes.analysis.op_pattern import OpPattern, patterns_of
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.ranks import MOST
from graph_passes.refusals import Reason
from tests.tf.fusion_lowering import Lowered

SHAPES = [((4, 7), 3), ((9,), 9), ((2, 3, 33), 1), ((5, 1), 1), ((3, 128), 5)]


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    """Integers, so that many are equal."""
    return np.random.default_rng(0).integers(-4, 4, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_numbers_and_positions(shape: tuple[int, ...], k: int, dtype: str) -> None:
    lowered = Lowered(lambda x: tf.math.top_k(x, k), numbers(shape, dtype))
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_infinity_and_zeros() -> None:
    """-0.0 and 0.0 are equal, and stay what they are."""
    x = np.array([[0.0, -0.0, np.inf, -np.inf, 1], [-0.0, 0.0, -1, np.inf, np.inf]], np.float32)
    (values, places), (expected, theirs) = (each(Lowered(lambda x: tf.math.top_k(x, 5), x)) for each in (RUN, EXPECTED))
    np.testing.assert_array_equal(places, theirs)
    np.testing.assert_array_equal(values.view(np.int32), expected.view(np.int32))


RUN, EXPECTED = Lowered.run, Lowered.expected


def test_what_is_no_number_comes_first() -> None:
    """TensorFlow's kernels say nothing of it, and differ from each other."""
    x = np.array([[1, np.nan, 3, np.nan, np.inf]], np.float32)
    values, places = Lowered(lambda x: tf.math.top_k(x, 4), x).run()
    np.testing.assert_array_equal(places, [[1, 3, 4, 2]])
    np.testing.assert_array_equal(values, [[np.nan, np.nan, np.inf, 3]])


@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_the_gradient(shape: tuple[int, ...], k: int) -> None:
    """A sum at the places that the forward op found, as TensorFlow computes it; close to that of float64."""
    count, rows = shape[-1], int(np.prod(shape[:-1]))

    def gradient(x: Any) -> Any:
        values, places = tf.math.top_k(tf.reshape(x, [rows, count]), k)
        places += np.arange(rows, dtype=np.int32)[:, None] * count
        made = tf.scatter_nd(tf.reshape(places, [-1, 1]), tf.reshape(values * 2, [-1]), tf.constant([rows * count]))
        return tf.reshape(made, shape)

    def by_tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = tf.math.top_k(x, k).values ** 2
        return tape.gradient(made, x)

    x = np.random.default_rng(1).normal(size=shape)
    (found,) = Lowered(gradient, x.astype(np.float32)).run()
    np.testing.assert_array_equal(found != 0, by_tape(tf.constant(x)) != 0)
    np.testing.assert_allclose(found, by_tape(tf.constant(x)), 1e-5, 1e-6)


def test_where_it_is_computed() -> None:
    def patterns(count: int) -> tuple[Any, Any]:
        specs = tf.TensorSpec([8, count])
        graph = from_tf_graph(tf.function(lambda x: tf.math.top_k(x, 2).values).get_concrete_function(specs).graph)
        known = patterns_of(graph)
        return on_a_cpu(graph, known)["TopKV2"], within(CUDA, graph, known)["TopKV2"]

    on_cpu, on_gpu = patterns(64)
    assert (on_cpu.pattern, on_gpu.pattern) == (OpPattern.CALL, OpPattern.REDUCTION)
    assert on_cpu.reason.reason is Reason.RANKED_ON_CPU
    assert patterns(MOST + 1)[1].reason.reason is Reason.RANKED
