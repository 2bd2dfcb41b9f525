"""Batch norms with a ReLU on a CPU, which Grappler joins into an op that cannot be imported with 3 channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.core.framework.graph_pb2 import GraphDef

import tfmem
from tests.tf.optimized_runs import in_a_process
from tfmem.capture import batch_norms
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler

EPSILON = 1e-3


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def training(channels: int) -> tuple[Any, Any]:
    scale, offset = tf.Variable(values(channels, seed=1)), tf.Variable(values(channels, seed=2))

    def step(x):
        with tf.GradientTape() as tape:
            for _ in range(2):
                x, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
                x = tf.nn.relu(x)
            loss = tf.reduce_sum(x**2)
        return loss, *tape.gradient(loss, [scale, offset])

    return step, tf.constant(values(4, 5, 5, channels))


def test_only_what_can_be_imported_stays_joined():
    for channels in (3, 4, 6, 8):
        step, x = training(channels)
        captured = capture_concrete(tf.function(step).get_concrete_function(x))
        ops = [node.op for node in run_grappler(captured, device="CPU").graph_def.node]
        apart = ops.count(batch_norms.NORM), ops.count("Relu")
        assert ops.count(batch_norms.JOINED) + apart[0] == 2
        if channels % 4:
            assert apart == (2, 2)
        elif batch_norms.JOINED in ops:  # where oneDNN is on
            assert apart == (0, 0)


def _under_a_budget(channels: int) -> None:
    step, x = training(channels)
    expected = tf.function(step)(x)
    for how in ({"memory_budget": "1GiB"}, {"passes": ("fusion",), "fusion": tfmem.FusionOptions(tune="off")}):
        made = tfmem.optimize(tf.function(step), cache_directory="", progress=False, **how)
        for _ in range(3):
            for a, b in zip(made(x), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [3, 6])
def test_a_step_runs_under_a_budget_and_fused(channels):
    in_a_process(_under_a_budget, channels)


def test_tf_keras_trains_under_a_budget():
    losses = []
    for optimized in (False, True):
        tf_keras.utils.set_random_seed(1)
        layers = tf_keras.layers
        model = tf_keras.Sequential(
            [layers.Input((8, 8, 3)), layers.Conv2D(6, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        )
        model.add(layers.GlobalAveragePooling2D())
        model.compile("sgd", "mse")
        if optimized:
            tfmem.optimize(model, memory_budget="1GiB", cache_directory="", progress=False)
        history = model.fit(values(16, 8, 8, 3), values(16, 6), batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def joined(side: bool, activation: bytes, body: bool) -> GraphDef:
    """A graph in which a batch norm is joined, with what is read behind it; in a function, if `body`."""

    @tf.function
    def function(x, scale, offset, other):
        y, *more = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=[], variance=[], epsilon=EPSILON, is_training=True, name="norm"
        )
        return tf.identity(y, "first"), tf.identity(more[0], "mean"), other

    shapes = ([2, 3, 3, 3], [3], [3], [2, 3, 3, 3])
    concrete = function.get_concrete_function(*(tf.TensorSpec(shape, tf.float32) for shape in shapes))
    graph_def = concrete.graph.as_graph_def()
    if body:
        definition = concrete.function_def
        graph_def = GraphDef()
        graph_def.library.function.add().CopyFrom(definition)
    nodes = graph_def.library.function[0].node_def if body else graph_def.node
    (node,) = (node for node in nodes if node.op == batch_norms.NORM)
    node.op = batch_norms.JOINED
    node.attr["activation_mode"].s = activation
    node.attr["num_side_inputs"].i = int(side)
    if side:
        node.input.insert(batch_norms.INPUTS, "other")
    return graph_def


@pytest.mark.parametrize("activation", [b"Relu", b"Identity"])
@pytest.mark.parametrize("side", [False, True])
def test_it_computes_the_same(side, activation):
    given = values(2, 3, 3, 3), values(3, seed=1), values(3, seed=2), values(2, 3, 3, 3, seed=3)
    found = batch_norms.apart(joined(side, activation, body=False))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        first, mean = tf.graph_util.import_graph_def(found, return_elements=["first:0", "mean:0"], name="")
        names = ("x:0", "scale:0", "offset:0", "other:0")
        y, of_channels = session.run([first, mean], dict(zip(names, given, strict=True)))
    x, scale, offset, other = (each.astype(np.float64) for each in given)
    expected = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + EPSILON) * scale + offset + other * side
    np.testing.assert_allclose(y, np.maximum(expected, 0) if activation == b"Relu" else expected, atol=1e-5)
    np.testing.assert_allclose(of_channels, x.mean((0, 1, 2)), atol=1e-6)


def test_bodies_of_functions_read_the_last_op():
    (function,) = batch_norms.apart(joined(True, b"Relu", body=True)).library.function
    inputs = {node.name: list(node.input) for node in function.node_def}
    assert inputs["norm/tfmem_addv2"] == ["norm:y:0", "other"]
    assert inputs["norm/tfmem_relu"] == ["norm/tfmem_addv2:z:0"]
    assert inputs["first"] == ["norm/tfmem_relu:activations:0"]
    assert inputs["mean"] == ["norm:batch_mean:0"]
