"""Whatever goes wrong inside the fusion pass, values are TensorFlow's, the user is told, and others are stitched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.graph import rewrite
from graph_passes.lower.program_writer import LoweringError
from graph_passes.passes.fuse import apply
from graph_passes.passes.fuse import plan as stitching
from graph_passes.passes.prepare import apply as prepare_apply
from graph_passes.passes.prepare import plan as prepare
from tests.tf.optimized_runs import in_a_process
from tests.tf.stitched_steps import BY_MODEL, PASSES, batch, close, optimized, require_stitched
from tfmem.capture import captured_source
from tfmem.steps import fuser as fusers
from tfmem.steps import on_copies


class InjectedError(Exception):
    """No error that anybody expects."""


def failing(original: Any, calls: range, error: type[Exception] = InjectedError) -> Callable[..., Any]:
    """`original`, which fails in some of its calls."""
    count = iter(range(1_000_000))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(count) in calls:
            raise error("on purpose")
        return original(*arguments, **options)

    return function


def two_regions() -> Any:
    """A function of what lies before a random op, and what lies behind it; each draws its numbers from the start."""

    @tf.function
    def step(x: Any) -> Any:
        scale = tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)
        with tf.control_dependencies([scale]):
            noise = tf.random.normal([32, 12], seed=1)
        return scale + tf.reduce_sum(tf.sigmoid(noise) * x - 1.0)

    return step


ALL = range(1_000_000)


@pytest.mark.parametrize(
    ("module", "name", "calls", "regions"),
    [
        (prepare, "flat_products", ALL, 2),
        (prepare_apply, "recompute_rewrites", ALL, 2),
        (stitching, "lower_region", range(1), 1),
        (stitching, "lower_region", ALL, 0),
        (stitching, "to_text", range(1, 2), 1),
        (stitching, "partition_graph", ALL, 0),
        (apply, "_rewrite", ALL, 0),
        (rewrite, "apply_rewrites", range(2), 1),  # of all, and of the first
        (fusers, "stitched", ALL, 0),
        (fusers, "key_of", ALL, 0),
    ],
)
def test_a_fault_costs_as_little_as_can_be(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: range, regions: int
) -> None:
    monkeypatch.setattr(module, name, failing(getattr(module, name), calls))
    plain = two_regions()
    step = optimized(two_regions())
    x, _ = batch()
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(step(x), plain(x))
    report = tfmem.report(step)
    assert "InjectedError: on purpose" in "".join(report.notes)
    ran = 0 if report.fusion == "left unchanged: stitching failed" else len(report.regions)
    assert ran == regions
    assert (report.decision == "stitched") == (regions > 0)
    assert report.fusion.startswith("left unchanged: ") == (regions == 0)


def test_a_region_that_cannot_be_written_stays_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    original = stitching.lower_region
    monkeypatch.setattr(stitching, "lower_region", failing(original, range(1), LoweringError))
    plain = two_regions()
    step = optimized(two_regions())
    x, _ = batch()
    close(step(x), plain(x))
    report = require_stitched(step, "Sigmoid")
    assert tfmem.explain(step, "Tanh") == "'Tanh' is in no region: on purpose."
    assert not report.notes


@pytest.mark.parametrize("name", ["Copies", "flat_arguments"])
def test_a_fault_while_timing_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(on_copies, name, failing(getattr(on_copies, name), ALL))
    plain = two_regions()
    step = optimized(two_regions(), fusion=tfmem.FusionOptions(tune="full"))
    x, _ = batch()
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(step(x), plain(x))
    assert tfmem.report(step).fusion.startswith("left unchanged: timing failed")
    close(step(x), plain(x))


def test_a_step_that_fails_while_it_is_timed_fails_as_before() -> None:
    @tf.function
    def step(x: Any) -> Any:
        largest = tf.reduce_max(tf.abs(x) * 2.0 + 1.0)
        with tf.control_dependencies([tf.debugging.Assert(largest < 0.0, [largest])]):
            return tf.reduce_sum(tf.sigmoid(x) - 1.0)

    x, _ = batch()
    fused = optimized(step, fusion=tfmem.FusionOptions(tune="full"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        fused(x)


def test_shapes_that_tensorflow_relaxes() -> None:
    """The second batch size makes a trace of an open one, whose plan differs from that of the first."""

    @tf.function(reduce_retracing=True)
    def step(x: Any) -> Any:
        return tf.nn.softmax(tf.tanh(x * 2.0 + 1.0) - tf.reduce_mean(x, 0))

    fused = optimized(step)
    for rows in (32, 7, 1, 100, 32, 0):
        x, _ = batch(rows=rows)
        close(fused(x), step(x))
    require_stitched(fused, "Softmax")


def test_more_positions_than_32_bits_count() -> None:
    """A table of 2^31 elements and more, of which only what is reduced is ever in memory: 8.6 GB, as TensorFlow has
    it."""
    side = 46_400

    @tf.function
    def step(x: Any, y: Any) -> Any:
        table = tf.maximum(x[:, None] * 2.0, y[None, :] - 1.0)
        return tf.reduce_max(table, 1), tf.reduce_max(table)

    random = np.random.default_rng(0)
    x, y = (random.normal(size=side).astype(np.float32) for _ in range(2))
    x[-1] = 50.0  # reached last
    fused = optimized(step)
    rows, largest = fused(tf.constant(x), tf.constant(y))
    (region,) = require_stitched(fused, "Maximum", "Max").regions
    assert region.count("kernel") == 1, "the table would be in memory"
    np.testing.assert_array_equal(rows, np.maximum(2 * x, y.max() - 1))
    assert largest == 100.0


@pytest.mark.parametrize("activation", [tf.nn.relu, tf.nn.relu6, tf.nn.elu, tf.tanh, tf.nn.gelu])
@pytest.mark.parametrize("beside", [False, True])
def test_what_grappler_fuses_into_products_and_convolutions(activation: Any, beside: bool) -> None:
    """Not all of it has a kernel that a region can call: a residual sum, for one."""
    kernel = tf.Variable(0.3 * tf.random.stateless_normal([3, 3, 4, 4], [1, 2]))
    weights, bias = tf.Variable(0.3 * tf.random.stateless_normal([4, 4], [3, 4])), tf.Variable(tf.ones([4]))

    @tf.function
    def step(images: Any) -> Any:
        x = images * 2.0 - 1.0
        convolved = tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias)
        y = activation(convolved + x if beside else convolved)
        flat = tf.reshape(y, [-1, 4])
        multiplied = tf.nn.bias_add(flat @ weights, bias)
        z = activation(multiplied + flat if beside else multiplied)
        return tf.reduce_sum(tf.sigmoid(z) * flat - 1.0, 1)

    images = tf.random.stateless_normal([2, 8, 8, 4], [5, 6])
    fused = optimized(step)
    close(fused(images), step(images))
    require_stitched(fused)


def depthwise(x: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.relu6(tf.nn.bias_add(tf.nn.depthwise_conv2d(x, kernel[..., :1], [1] * 4, "SAME"), bias))


def in_three_dimensions(x: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv3d(x[:, None], kernel[None], [1] * 5, "SAME"), bias))


@pytest.mark.parametrize("layer", [depthwise, in_three_dimensions])
def test_other_convolutions_that_grappler_fuses(layer: Any) -> None:
    kernel, bias = tf.Variable(0.3 * tf.random.stateless_normal([3, 3, 4, 4], [1, 2])), tf.Variable(tf.ones([4]))

    @tf.function
    def step(images: Any) -> Any:
        y = layer(images * 2.0 - 1.0, kernel, bias)
        return tf.reduce_sum(tf.exp(-y * y) + 0.5 * y, -1)

    images = tf.random.stateless_normal([2, 8, 8, 4], [5, 6])
    fused = optimized(step)
    close(fused(images), step(images))
    require_stitched(fused)


def on_two_devices() -> list[Any]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.device("CPU:1"):
        there = tf.Variable(tf.ones([12]))

    @tf.function
    def step(x: Any) -> Any:
        with tf.device("CPU:0"):
            here = tf.nn.softmax(tf.tanh(x) * 2.0 + 1.0)
        with tf.device("CPU:1"):
            there.assign_sub(0.1 * tf.reduce_sum(tf.sigmoid(here) * x - 1.0, 0))
            return tf.reduce_sum(tf.exp(here) * 0.5 + there, 1)

    x, _ = batch()
    expected = [step(x).numpy() for _ in range(2)]
    there.assign(tf.ones([12]))
    fused = optimized(step)
    found = [fused(x).numpy() for _ in range(2)]
    report = require_stitched(fused, "Softmax", "AssignSubVariableOp")
    function: Any = fused.get_concrete_function(x)
    devices = {op.device[-5:] for op in function.graph.get_operations() if op.type == "TfmemFusion"}
    return [expected, found, [region.name for region in report.regions], sorted(devices)]


def test_regions_on_two_devices() -> None:
    expected, found, regions, devices = in_a_process(on_two_devices)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(regions) == 2
    assert devices == ["CPU:0", "CPU:1"]


@pytest.mark.parametrize("shape", [(0, 12), (4, 0), (0, 0)])
def test_batches_without_numbers(shape: tuple[int, int]) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def step(x: tf.Tensor) -> Any:
        scaled = tf.tanh(x * 2.0 + 1.0) - 0.5
        return scaled, tf.reduce_sum(scaled, 0), tf.reduce_max(scaled, 1), tf.reduce_mean(scaled)

    fused = optimized(step)
    for x in (batch()[0], tf.zeros(shape), batch(rows=3)[0]):
        close(fused(x), step(x))
    require_stitched(fused, "Tanh", "Sum")


def test_a_stitched_function_in_a_loop_and_in_what_xla_compiles() -> None:
    @tf.function
    def step(x: Any) -> Any:
        return tf.sigmoid(tf.tanh(x * 2.0 + 1.0) - 0.5) * x

    fused = optimized(step)
    x, _ = batch()
    fused(x)
    require_stitched(fused, "Tanh")

    def repeated(function: Callable[[Any], Any]) -> Any:
        return tf.function(lambda x: tf.while_loop(lambda n, _: n < 5, lambda n, y: (n + 1, function(y)), (0, x))[1])

    close(repeated(fused)(x), repeated(step)(x))
    compiled = tf.function(lambda x: fused(x) + 1.0, jit_compile=True)
    close(compiled(x), step(x) + 1.0)


def test_threads_share_a_loop_that_is_stitched() -> None:
    total = tf.Variable(tf.zeros([12]))

    @tf.function
    def step(x: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            total.assign_add(tf.ones_like(value))
            return count + 1, tf.tanh(value * 2.0 + 1.0) - 0.5

        return tf.while_loop(lambda count, _: count < 10, body, (0, x))[1]

    fused = optimized(step)
    x = batch()[0][0]
    expected = step(x)
    fused(x)
    require_stitched(fused, "AssignAddVariableOp", "Tanh")
    total.assign(tf.zeros([12]))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(fused(x) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        close(result, expected)
    close(total, tf.fill([12], 800.0))


def run_saved(path: str, x: Any) -> Any:
    tfmem.load_ops()
    return tf.saved_model.load(path)(tf.constant(x)).numpy()


def test_a_saved_model_in_another_process(tmp_path: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = tf.Variable(tf.random.stateless_normal([12, 12], [1, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 12])])
        def __call__(self, x: tf.Tensor) -> Any:
            def body(count: Any, value: Any) -> Any:
                return count + 1, tf.nn.softmax(tf.tanh(value @ self.weights) * 2.0 - 1.0) + tf.reduce_mean(value, 0)

            return tf.while_loop(lambda count, _: count < 4, body, (0, x))[1]

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "plain"))
    how: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}
    path = tfmem.optimize(str(tmp_path / "plain"), output=str(tmp_path / "stitched"), **how)
    require_stitched(path, "Tanh")
    for rows in (32, 5):
        x, _ = batch(rows=rows)
        close(in_a_process(run_saved, path, x.numpy()), model(x))


def test_a_fault_in_a_body_leaves_that_body(monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function
    def step(x: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            return count + 1, tf.tanh(value * 2.0 + 1.0) - tf.reduce_mean(value, 0)

        last = tf.while_loop(lambda count, _: count < 5, body, (0, x))[1]
        return tf.reduce_sum(tf.sigmoid(last) * x - 1.0)

    monkeypatch.setattr(captured_source, "with_function", failing(captured_source.with_function, ALL))
    fused = optimized(step)
    x, _ = batch()
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(fused(x), step(x))
    require_stitched(fused, "Sigmoid")
    monkeypatch.undo()
    monkeypatch.setattr(captured_source, "bodies", failing(captured_source.bodies, ALL))
    fused = optimized(step)
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(fused(x), step(x))
    require_stitched(fused, "Sigmoid")
