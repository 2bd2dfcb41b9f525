"""What else a step does does not change: errors, assertions, prints, random numbers, what runs before what."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.report import STITCHED
from tests.tf.optimized_runs import in_a_process
from tests.tf.stitched_steps import CLASSES, Softmax, batch, close, optimized, require_stitched, run


def test_an_assertion_holds_back_what_waits_for_it() -> None:
    total = tf.Variable(tf.zeros([12]))

    @tf.function
    def step(x: Any) -> Any:
        largest = tf.reduce_max(tf.abs(x) * 2.0 + 1.0)
        with tf.control_dependencies([tf.debugging.Assert(largest < 50.0, [largest])]):
            total.assign_add(tf.reduce_mean(tf.tanh(x) * 2.0 + 1.0, 0))
            return tf.reduce_sum(tf.sigmoid(x) - 1.0)

    fused = optimized(step)
    x, _ = batch()
    close(fused(x), step(x))
    require_stitched(fused, "AssignAddVariableOp", "Sigmoid")
    before = total.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        fused(x * 1e5)
    np.testing.assert_array_equal(total.numpy(), before)
    close(fused(x), step(x))


def test_variables_that_are_only_read_are_read_by_the_region() -> None:
    """Though what ends the function waits for each of them, and a result for that."""
    weights = [tf.Variable(np.eye(12, dtype=np.float32) * (place + 1)) for place in range(3)]

    @tf.function
    def step(x: Any) -> Any:
        for weight in weights:
            x = tf.tanh(tf.nn.relu(x @ weight) * 0.5) + 1.0
        return x, tf.reduce_sum(x)

    fused = optimized(step)
    x, _ = batch()
    for place in range(3):
        close(fused(x), step(x))
        weights[place].assign(weights[place] * 0.5)
    require_stitched(fused, "ReadVariableOp", "MatMul", "Tanh")
    assert sum(region.count("read") for region in tfmem.report(fused).regions) == 3


def test_a_python_function_is_called_as_often_as_before() -> None:
    seen: list[Any] = []

    def note(value: Any) -> None:
        seen.append(float(value))

    model = Softmax(lambda logits: tf.py_function(note, [tf.reduce_mean(tf.exp(logits) * 2.0)], []))
    step = optimized(model.step)
    run(step)
    plain_seen = list(seen)
    seen.clear()
    plain = Softmax(lambda logits: tf.py_function(note, [tf.reduce_mean(tf.exp(logits) * 2.0)], []))
    run(plain.step)
    assert len(seen) == len(plain_seen) == 5
    close(plain_seen, seen)
    require_stitched(step, "MatMul", "Exp")


def test_an_error_of_a_python_function_comes_through() -> None:
    def fail(value: Any) -> Any:
        raise ValueError("on purpose")

    @tf.function
    def step(x: Any) -> Any:
        y = tf.exp(x) * 2.0 + 1.0
        z = tf.py_function(fail, [y], tf.float32)
        z.set_shape(x.shape)
        return tf.reduce_sum(tf.tanh(z) * x + 1.0)

    fused = optimized(step)
    with pytest.raises(tf.errors.InvalidArgumentError, match="on purpose"):
        fused(tf.ones([3]))


CHECKED: dict[str, Any] = {
    "Unpack": lambda x: tf.exp(sum(tf.unstack(x * 2 + 1, 2))),
    "EnsureShape": lambda x: tf.ensure_shape(tf.exp(x) * 2, [2, 4]) * 3 + 1,
    "Squeeze": lambda x: tf.squeeze(tf.exp(x[1:]) * 2, [0]) * 3 + 1,
}


@pytest.mark.parametrize("op", CHECKED)
def test_a_size_that_an_op_refuses_is_refused(op: str) -> None:
    function = tf.function(CHECKED[op], input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    stitched = tfmem.optimize(function, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"))
    good, bad = (tf.random.stateless_normal([rows, 4], [1, 2]) for rows in (2, 5))
    np.testing.assert_allclose(stitched(good), function(good), rtol=1e-5)
    require_stitched(stitched)
    for call in (function, stitched):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(bad)


def test_a_label_that_is_no_class_is_refused() -> None:
    @tf.function
    def function(x: Any, labels: Any) -> Any:
        logits = tf.nn.relu(x * 2 + 1) * tf.exp(-tf.abs(x))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits) * 2 + 1

    x = tf.random.stateless_normal([64, 10], [1, 2])
    stitched = tfmem.optimize(function, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"))
    np.testing.assert_allclose(stitched(x, tf.range(64) % 10), function(x, tf.range(64) % 10), rtol=1e-5)
    require_stitched(stitched, "SparseSoftmaxCrossEntropyWithLogits")
    for call in (function, stitched):
        with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
            call(x, tf.range(64) % 11)


def test_pooling_at_random_stays_outside() -> None:
    """Its kernel gives more of what says where it pools than its shape function has."""
    image = tf.random.stateless_uniform([1, 12, 12, 2], [1, 2])

    def step(image: Any) -> Any:
        pooled, rows, _ = tf.raw_ops.FractionalMaxPool(
            value=tf.tanh(image) * 2.0, pooling_ratio=[1.0, 1.44, 1.44, 1.0], deterministic=True, seed=3, seed2=4
        )
        return tf.sin(pooled) * pooled, rows

    stitched, plain = optimized(tf.function(step)), tf.function(step)
    found, expected = ([tf.nest.flatten(call(image)) for _ in range(2)] for call in (stitched, plain))
    close(tf.nest.flatten(found), tf.nest.flatten(expected))
    require_stitched(stitched, "Sin")


def test_ops_whose_kernels_are_asynchronous_stay_outside() -> None:
    """Crops, and the gradients of the image and of the boxes."""
    image, boxes = (
        tf.random.stateless_uniform([2, 9, 7, 3], [1, 2]),
        tf.constant([[0.1, 0.2, 0.8, 0.9], [0.0, 0.1, 1.0, 0.7]]),
    )

    def step(image: Any, boxes: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((image, boxes))
            crops = tf.image.crop_and_resize(tf.tanh(image) * 2.0, tf.sigmoid(boxes) + 0.1, [0, 1], [4, 5])
            loss = tf.reduce_sum(tf.sin(crops) * crops)
        return loss, tape.gradient(loss, (image, boxes))

    stitched = optimized(tf.function(step))
    close(tf.nest.flatten(stitched(image, boxes)), tf.nest.flatten(tf.function(step)(image, boxes)))
    names = [op.name for op in tf.function(step).get_concrete_function(image, boxes).graph.get_operations()]
    crops = [name for name in names if "CropAndResize" in name.rpartition("/")[2]]
    assert len(crops) == 3
    assert all("is asynchronous" in tfmem.explain(stitched, name) for name in crops)
    require_stitched(stitched, "Sin", "Cos")


@pytest.mark.parametrize("tune", ["off", "fast"])
def test_random_streams_are_untouched(tune: Any) -> None:
    def made() -> Any:
        tf.random.set_seed(7)
        scale = tf.Variable(1.0)

        @tf.function
        def step(x: Any) -> Any:
            noise = tf.random.normal([32, 12]) + tf.random.uniform([32, 12], seed=3)
            scale.assign_add(tf.reduce_mean(tf.tanh(noise) * x))
            return tf.reduce_sum(tf.exp(noise * 0.1) * scale)

        return step

    x, _ = batch()
    expected = run(made(), 8, x)
    step = optimized(made(), fusion=tfmem.FusionOptions(tune=tune))
    found = [step(x)]
    for known in step._steps.values():  # the fast choice waits for its thread here
        known[()].wait()
    found += run(step, 7, x)
    close(found, expected)
    assert tfmem.report(step).regions
    assert tfmem.report(step).decision == STITCHED or tune == "fast"


def test_a_variable_that_is_assigned_or_restored_between_steps(tmp_path: Path) -> None:
    plain, model = Softmax(), Softmax()
    step = optimized(model.step)
    for each, own in ((plain.step, plain), (step, model)):
        run(each, 2)
        path = tf.train.Checkpoint(v=own.variables).write(str(tmp_path / "kept"))
        run(each, 2)
        own.variables[1].assign(tf.ones([CLASSES]))
        run(each, 1)
        tf.train.Checkpoint(v=own.variables).read(path)
    close(run(step), run(plain.step))
    held = model.variables[0].read_value()  # shares memory with the variable until that is written
    copy = held.numpy().copy()
    run(step, 1)
    np.testing.assert_array_equal(held.numpy(), copy)


def test_other_shapes_are_other_traces_and_open_ones_are_one() -> None:
    plain, model = Softmax(), Softmax()
    signature = [tf.TensorSpec([None, 12]), tf.TensorSpec([None, 5])]
    for how in ({}, {"input_signature": signature}, {"reduce_retracing": True}):
        step = optimized(tf.function(model.run, **how))
        other = tf.function(plain.run, **how)
        for rows in (32, 7, 1, 32, 64):
            close(step(*batch(rows=rows)), other(*batch(rows=rows)))
        require_stitched(step, "MatMul")


def test_two_threads_train_at_the_same_time() -> None:
    """Updates of a step are one: however steps interleave, none is lost."""
    total = tf.Variable(tf.zeros([1000]))

    @tf.function
    def step(x: Any) -> Any:
        total.assign_add(tf.ones([1000]) + tf.maximum(x, 0.0) * 0.0)
        return tf.reduce_sum(tf.exp(x) * 2.0)

    fused = optimized(step)
    x = tf.zeros([1000])
    fused(x)
    require_stitched(fused, "AssignAddVariableOp")
    total.assign(tf.zeros([1000]))
    threads = [threading.Thread(target=lambda: [fused(x) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(total.numpy(), np.full(1000, 800.0, np.float32))


def test_what_xla_compiles_is_left_to_it() -> None:
    model = Softmax()
    step = optimized(tf.function(model.run, jit_compile=True))
    run(step)
    report = tfmem.report(step)
    assert not report.regions
    assert report.fusion == "left to XLA, which the function asks for"


def distributed() -> tuple[str, float, float]:
    """What the report of a function of a strategy says, and its result beside the plain one's."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = tf.Variable(tf.ones([12]))

    @tf.function
    def step(x: Any) -> Any:
        each = strategy.run(lambda x: tf.reduce_sum(tf.tanh(x * weights) * 2.0 + 1.0), [x])
        return strategy.reduce("SUM", each, axis=None)

    fused = optimized(step)
    x, _ = batch()
    found, expected = float(fused(x)), float(step(x))
    return tfmem.report(fused).fusion, found, expected


def test_what_runs_under_a_distribution_strategy_is_fused_without_timing() -> None:
    why, found, expected = in_a_process(distributed)
    assert "stitched on all replicas" in why
    assert found == pytest.approx(expected, rel=1e-5)
