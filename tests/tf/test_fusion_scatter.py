"""Updates of rows of variables, and sums at places that a tensor says: kernels on a GPU, TensorFlow's on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.device_support import CUDA, on_a_cpu, within
from graph_passes.analysis.op_pattern import OpPattern, patterns_of
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.segment_sums import MOST_HELD
from graph_passes.refusals import Reason
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import optimized

raw = tf.raw_ops
SHAPES = [((5, 3), (7,)), ((33,), (9,)), ((4, 2, 3), (2, 5)), ((1, 6), (3,))]


def rows(shape: tuple[int, ...], ids: tuple[int, ...], dtype: str = "float32") -> tuple[Any, Any, Any]:
    """What a variable holds, rows, and their places, some of them twice; small integers, whose sums are exact."""
    rng = np.random.default_rng(len(ids))
    kind = tf.as_dtype(dtype).as_numpy_dtype
    held, given = (rng.integers(-9, 9, each).astype(kind) for each in (shape, (*ids, *shape[1:])))
    return held, given, rng.integers(0, shape[0], ids)


def step(op: str, variable: tf.Variable) -> Any:
    def run(ids: Any, given: Any) -> Any:
        getattr(raw, op)(resource=variable.handle, indices=ids, updates=given)

    return run


@pytest.mark.parametrize("op", ["ResourceScatterAdd", "ResourceScatterSub"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64"])
@pytest.mark.parametrize(("shape", "ids"), SHAPES)
def test_a_sum_for_each_row(shape: tuple[int, ...], ids: tuple[int, ...], dtype: str, op: str) -> None:
    held, given, places = rows(shape, ids, dtype)
    variable = tf.Variable(held)
    lowered = Lowered(step(op, variable), places, given, variables=[variable])
    np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_the_last_row_stays(dtype: str) -> None:
    """TensorFlow's kernel says nothing of places that are given twice; here the last one counts."""
    held, given, _ = rows((6, 3), (4,), dtype)
    variable = tf.Variable(held)
    lowered = Lowered(step("ResourceScatterUpdate", variable), np.array([3, 0, 5, 1]), given, variables=[variable])
    np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])
    twice = Lowered(step("ResourceScatterUpdate", variable), np.array([3, 0, 3, 1]), given, variables=[variable])
    expected = variable.numpy()
    expected[[0, 1, 3]] = given[[1, 3, 2]]
    np.testing.assert_array_equal(twice.run()[0], expected)


@pytest.mark.parametrize("op", ["ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"])
def test_other_rows_stay_to_the_bit(op: str) -> None:
    """-0.0 and NaN among them; what is no number reaches its own row alone."""
    held = np.array([[-0.0, 1], [np.nan, 2], [np.inf, -0.0], [4, 5], [6, 7]], np.float32)
    given = np.array([[np.nan, 1], [np.inf, -np.inf], [-0.0, 0.0]], np.float32)
    variable = tf.Variable(held)
    lowered = Lowered(step(op, variable), np.array([3, 2, 4]), given, variables=[variable])
    (found,), (expected,) = lowered.run(), lowered.expected()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[:2], np.signbit(expected)[:2])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize(
    ("shape", "ids"), [((9,), (5, 1)), ((7, 4), (5, 1)), ((3, 5, 2), (4, 2, 1)), ((3, 5, 2), (11, 2)), ((4, 3), (6, 2))]
)
def test_sums_at_places_of_one_and_of_several_numbers(shape: tuple[int, ...], ids: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    places = np.stack([rng.integers(0, size, ids[:-1]) for size in shape[: ids[-1]]], -1)
    data = rng.integers(-9, 9, (*ids[:-1], *shape[ids[-1] :])).astype(dtype)
    lowered = Lowered(lambda places, data: tf.scatter_nd(places, data, tf.constant(shape, places.dtype)), places, data)
    np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])


def pattern(shape: tuple[int, ...], updates: tuple[int, ...]) -> tuple[Any, Any]:
    """On a CPU and on a GPU."""
    variable = tf.Variable(tf.zeros(shape))
    specs = [tf.TensorSpec([4], tf.int32), tf.TensorSpec(updates)]
    graph = from_tf_graph(tf.function(step("ResourceScatterAdd", variable)).get_concrete_function(*specs).graph)
    known = patterns_of(graph)
    return on_a_cpu(graph, known)["ResourceScatterAdd"], within(CUDA, graph, known)["ResourceScatterAdd"]


def test_where_it_is_computed() -> None:
    """A kernel reads and writes all of a variable; on a CPU TensorFlow's kernel refuses places that are none."""
    on_cpu, on_gpu = pattern((1000, 16), (4, 16))
    assert (on_cpu.pattern, on_gpu.pattern) == (OpPattern.OPAQUE, OpPattern.UPDATE)
    assert pattern((MOST_HELD // 16 + 1, 16), (4, 16))[1].reason.reason is Reason.SCATTERED
    assert pattern((1000, 16), ())[1].pattern is OpPattern.OPAQUE  # one number for all rows


def test_a_step_on_a_cpu_trains_embeddings_as_without() -> None:
    """IndexedSlices update sparsely; a step refuses what TensorFlow refuses."""

    def made() -> tuple[tf.Variable, Any]:
        table = tf.Variable(np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32))

        @tf.function
        def run(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids)) ** 2)
            slices = tape.gradient(loss, table)
            table.scatter_sub(tf.IndexedSlices(0.1 * slices.values, slices.indices))
            return loss

        return table, run

    (plain_table, plain), (table, run) = made(), made()
    run = optimized(run)
    for seed in range(4):
        ids = tf.constant(np.random.default_rng(seed).integers(0, 30, 12))
        np.testing.assert_allclose(run(ids), plain(ids), 1e-5)
    np.testing.assert_allclose(table, plain_table, 1e-5, 1e-6)
    assert tfmem.report(run).regions
