"""Inputs of TfmemFusion and of stitched functions out of the ordinary: where they lie, and shapes that change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.fusion.region import Region, TensorType
from tests.tf.fusion_calls import run_region
from tests.tf.fusion_variables import ADD, kernel

ANY = TensorType("float32", (None,))
TWICE = Region(1, (), (ANY, ANY), (kernel(ADD, (0, 0), (1,)),), (1,))


@pytest.mark.parametrize("offset", [1, 3, 5, 17])
@pytest.mark.parametrize("count", [1, 7, 64, 1001])
def test_numbers_that_lie_at_no_multiple_of_a_vector(offset: int, count: int) -> None:
    """A slice along the first dimension shares memory with what it is of, where TensorFlow finds that aligned; a view
    that NumPy made does so wherever it begins."""
    numbers = np.random.default_rng(offset).normal(size=count + offset).astype(np.float32)
    raw = np.zeros(4 * count + offset, np.uint8)
    raw[offset:] = np.frombuffer(numbers[:count].tobytes(), np.uint8)
    unaligned = np.frombuffer(raw.data, np.float32, count, offset)
    for given in (tf.constant(numbers)[offset:], tf.split(tf.constant(numbers), [offset, count])[1], unaligned):
        (found,) = run_region(TWICE, [given], [])
        np.testing.assert_array_equal(found, 2 * np.asarray(given))


def test_shapes_that_are_relaxed_after_tracing() -> None:
    v = tf.Variable(np.float32([[1.0, 2.0], [3.0, 4.0]]))

    @tf.function(reduce_retracing=True)
    def step(x: Any) -> Any:
        return tf.nn.softmax(tf.tanh(x @ v) * 2.0 + 1.0)

    stitched = tfmem.optimize(step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    for rows in (3, 1, 4, 0, 5, 3):
        x = np.random.default_rng(rows).normal(size=(rows, 2)).astype(np.float32)
        np.testing.assert_allclose(stitched(x), step(x), rtol=1e-6)


@pytest.mark.parametrize("count", [24, 80])
def test_tensors_each_of_which_has_a_size_of_its_own(count: int) -> None:
    """Each unknown size is an axis: a program has 64 at most, and more tensors take more programs."""

    @tf.function(input_signature=[tf.TensorSpec([None, 5])] * count)
    def step(*tensors: Any) -> Any:
        return [tf.tanh(x * 2.0) + 1.0 for x in tensors]

    stitched = tfmem.optimize(step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    given = [tf.random.stateless_normal([rows % 7 + 1, 5], [rows, 0]) for rows in range(count)]
    for found, expected in zip(stitched(*given), step(*given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    (region,) = tfmem.report(stitched).regions
    kernels = [len(each.ops) for each in region.steps if each.kind == "kernel"]
    assert sum(kernels) == 3 * count
    assert (len(kernels) == 1) == (count <= 64)


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_two_of_whose_sizes_nobody_knows(count: int) -> None:
    """What a kernel gives passes through a separate Identity, which is no view: nothing would tell its shape."""

    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])] * count)
    def step(*tensors: Any) -> Any:
        return [tf.sin(x) * 2.0 + x for x in tensors]

    stitched = tfmem.optimize(step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    given = [tf.random.stateless_normal([rows + 1, 2 * rows + 1, 4], [rows, 0]) for rows in range(count)]
    for found, expected in zip(stitched(*given), step(*given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    (region,) = tfmem.report(stitched).regions
    assert sum(len([op for _, op in each.ops if op != "Identity"]) for each in region.steps) == 3 * count
