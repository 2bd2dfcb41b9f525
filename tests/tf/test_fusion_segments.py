"""Sums of segments, which gradients of gathers are: a loop of a kernel on a GPU, TensorFlow's kernel on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.expr import reference
from graph_passes.analysis.device_support import CUDA, on_a_cpu, within
from graph_passes.analysis.op_pattern import NodePattern, OpPattern, patterns_of
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.program_writer import LoweringError
from graph_passes.lower.segment_sums import MOST_TOGETHER
from graph_passes.refusals import Reason
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import close, optimized

raw = tf.raw_ops
# Results, and the ids: among them as many results as numbers, one result, ids of two dimensions.
FORMS = [(5, (7,)), (7, (7,)), (1, (7,)), (4, (3, 5)), (9, (1,)), (3, (33,))]


def given(
    ids: tuple[int, ...], segments: int, dtype: str = "float32", inner: tuple[int, ...] = (6,)
) -> tuple[Any, Any]:
    """Small integers, whose sums are exact in any order; ids, negative ones among them, which count nowhere."""
    rng = np.random.default_rng(len(ids))
    data = rng.integers(-3, 4, (*ids, *inner)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    return data, rng.integers(-1, segments, ids)


def summed(segments: int) -> Any:
    return lambda data, ids: raw.UnsortedSegmentSum(data=data, segment_ids=ids, num_segments=segments)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize(("segments", "ids"), FORMS)
def test_the_rule(segments: int, ids: tuple[int, ...], dtype: str) -> None:
    for inner in ((6,), (), (2, 3)):
        lowered = Lowered(summed(segments), *given(ids, segments, dtype, inner))
        np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])


def test_what_is_not_counted_is_not_a_number() -> None:
    """NaN and infinity stay in their segments; an id past the last one counts nowhere, as on a GPU."""
    data = np.array([[np.nan, 1], [np.inf, 2], [3, -np.inf], [4, 5]], np.float32)
    lowered = Lowered(summed(3), data, np.array([2, 0, -5, 1]))
    np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])
    beyond = [data, np.array([2, 0, 3, 1])]
    program = lowered.kernel.program
    tensors = [next(t for t in beyond if str(t.dtype) == tensor.dtype) for tensor in program.tensors]
    np.testing.assert_array_equal(reference.run(program, tensors)[0], [[np.inf, 2], [4, 5], [np.nan, 1]])


def found(segments: int, ids: int | None, columns: int | None) -> tuple[NodePattern, NodePattern]:
    """The op_pattern of a sum of segments on a CPU and on a GPU."""
    specs = [tf.TensorSpec([ids, columns]), tf.TensorSpec([ids], tf.int32)]
    graph = from_tf_graph(tf.function(summed(segments)).get_concrete_function(*specs).graph)
    known = patterns_of(graph)
    return on_a_cpu(graph, known)["UnsortedSegmentSum"], within(CUDA, graph, known)["UnsortedSegmentSum"]


def test_where_it_is_computed() -> None:
    """On a GPU in a kernel, if few numbers are looked at; on a CPU TensorFlow's kernel refuses ids that are none."""
    on_cpu, on_gpu = found(1024, 128, 64)
    assert (on_cpu.pattern, on_gpu.pattern) == (OpPattern.CALL, OpPattern.REDUCTION)
    assert "an id that is no segment's" in str(on_cpu.reason)
    assert 1 << 16 << 13 << 8 <= MOST_TOGETHER < 1 << 17 << 13 << 8
    assert [found(1 << 16, 1 << 13, 1 << 8)[1].pattern, found(1 << 17, 1 << 13, 1 << 8)[1].pattern] == [
        OpPattern.REDUCTION,
        OpPattern.OPAQUE,
    ]
    assert found(1 << 16, None, 1 << 8)[1].pattern is OpPattern.REDUCTION  # a batch of any size
    unknown = found(16, 8, None)[1]
    assert unknown.pattern is OpPattern.OPAQUE
    assert unknown.reason == Reason.SIZED_BY_DATA(because=Reason.SEGMENTS_UNKNOWN(), op="UnsortedSegmentSum")


def test_a_large_sum_that_is_read_in_another_shape_is_another_kernel() -> None:
    """There no first dimension is an axis, so that each result would look at all ids alone."""

    def step(data: Any, ids: Any) -> Any:
        return tf.reshape(summed(1 << 13)(data, ids), [1 << 7, 1 << 6, 4]) * 2

    data, ids = given((1 << 10,), 1 << 13, inner=(4,))
    with pytest.raises(LoweringError, match="read in another shape") as raised:
        Lowered(step, data, ids)
    assert raised.value.refusal.reason is Reason.SEGMENTS_PLACE
    small = Lowered(lambda data, ids: tf.reshape(summed(8)(data, ids), [2, 4, 6]) * 2, *given((7,), 8))
    np.testing.assert_array_equal(small.run()[0], small.expected()[0])


def test_what_is_added_up_is_computed_before() -> None:
    """Not once more for each segment, but for a little arithmetic; what reads the sums may be in their kernel."""
    data, ids = given((7,), 5, "float32", (6,))
    lowered = Lowered(lambda data, ids: tf.exp(summed(5)(tf.reshape(data, [7, 6]) * data + 1, ids + 1 - 1)), data, ids)
    np.testing.assert_allclose(lowered.run()[0], lowered.expected()[0], 1e-6)
    for dear in (tf.exp, lambda x: x * tf.reduce_sum(x, 1, keepdims=True), lambda x: x * x + x * 2 - x * 3):
        with pytest.raises(LoweringError, match=r":0' would be recomputed for each segment"):
            Lowered(lambda data, ids, dear=dear: summed(5)(dear(data), ids), data, ids)


def test_a_step_on_a_cpu_refuses_what_tensorflow_refuses() -> None:
    def function(x: Any, data: Any, ids: Any) -> Any:
        total = tf.math.unsorted_segment_sum(tf.tanh(data) * 2, ids, 4)
        return tf.nn.softmax(x + total), tf.exp(total)

    plain, step = tf.function(function), optimized(tf.function(function))
    rng = np.random.default_rng(0)
    x, data = (tf.constant(rng.normal(size=(rows, 6)).astype(np.float32)) for rows in (4, 9))
    for ids in ([0, 1, 1, -1, 3, 2, 2, 0, 3], [3] * 9):
        close(step(x, data, tf.constant(ids)), plain(x, data, tf.constant(ids)))
    assert tfmem.report(step).regions
    with pytest.raises(tf.errors.InvalidArgumentError, match="is out of range"):
        step(x, data, tf.constant([4] * 9))
