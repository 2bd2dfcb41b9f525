"""Recurrent layers on a GPU before and after they are replaced, both against the same layer in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework import config as tf_config

import tfmem
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from graph_passes.passes.recurrent.match import RECURRENT_OP
from tfmem.kernels import recurrent as kernels

INPUTS, STEPS, BATCH = 24, 40, 6
LAYERS: dict[str, Callable[[Any, int], Any]] = {
    "lstm": lambda library, units: library.LSTM(units, return_sequences=True),
    "gru": lambda library, units: library.GRU(units, return_sequences=True),
    "gru, reset before": lambda library, units: library.GRU(units, return_sequences=True, reset_after=False),
    "simple": lambda library, units: library.SimpleRNN(units, return_sequences=True),
    "recurrent dropout's loop": lambda library, units: library.LSTM(
        units, return_sequences=True, recurrent_dropout=0.2
    ),
    "bidirectional": lambda library, units: library.Bidirectional(library.LSTM(units, return_sequences=True)),
    "backwards": lambda library, units: library.GRU(units, return_sequences=True, go_backwards=True),
    "last step": lambda library, units: library.LSTM(units),
}
ON_CUDNN = {"lstm", "gru", "bidirectional", "backwards", "last step"}
FORWARD, LOSS = 1e-5, 5e-6  # relative to the largest number
CHANGED = 5e-4  # of what training changed, which is a thousandth of the weights
IN_TF32 = 2e-3

pytestmark = pytest.mark.usefixtures("float32_products")


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def network(library: Any, name: str, units: int, dtype: str, masked: bool = False) -> Any:
    library.utils.set_random_seed(5)
    set_precision(library, dtype)
    try:
        layers = library.layers
        masking = [layers.Masking()] if masked else []
        made = [layers.Input((None, INPUTS)), *masking, LAYERS[name](layers, units), layers.Dense(3)]
        return library.Sequential(made)
    finally:
        set_precision(library, "float32")


def set_precision(library: Any, dtype: str) -> None:
    """Sets the precision of inputs and of layers: Keras reads the first only until it has made a policy of it."""
    library.backend.set_floatx(dtype)
    if library is tf_keras:
        library.mixed_precision.set_global_policy(dtype)
    else:
        library.config.set_dtype_policy(dtype)


def batch(masked: bool = False, seed: int = 0, rows: int = BATCH) -> Any:
    x = numbers(rows, STEPS, INPUTS, seed=seed)
    if masked:
        for row in range(BATCH):
            x[row, STEPS - 5 * row :] = 0  # the first row is whole
    return x


def distance(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(found, np.float64) - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


def without_cudnn(model: Any) -> Any:
    """Float64 runs the loop of plain ops, in whatever order of gates."""
    for layer in model.layers:
        for inner in (layer, getattr(layer, "forward_layer", None), getattr(layer, "backward_layer", None)):
            if hasattr(inner, "use_cudnn"):
                inner.use_cudnn = False
    return model


def inference(library: Any, name: str, units: int) -> tuple[Any, Any]:
    """A function for sequences of any number and length, and the same layers in float64."""
    model = network(library, name, units, "float32")
    truth = without_cudnn(network(library, name, units, "float64"))
    truth.set_weights(model.get_weights())

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def run(x: Any) -> Any:
        return model(x, training=False)

    return run, truth


@pytest.mark.parametrize("units", [33, 64, 256])
@pytest.mark.parametrize("name", LAYERS)
def test_inference(name: str, units: int) -> None:
    run, truth = inference(keras, name, units)
    x = batch()
    wanted = truth(x, training=False)
    optimized = tfmem.optimize(run, passes=("recurrent", "offload"))
    single = tf.constant(x, tf.float32)
    assert distance(run(single), wanted) < FORWARD
    assert distance(optimized(single), wanted) < FORWARD
    report = tfmem.report(optimized)
    assert report.replaced, str(report)
    assert ("CudnnRNNV3" in report.replaced[0]) == (name in ON_CUDNN), str(report)
    assert "precision highest" in report.replaced[0]
    assert "memory was not planned" in report.notes[0]  # the batch is open, and no budget was given


@pytest.mark.usefixtures("tf32_products")
@pytest.mark.parametrize("name", LAYERS)
def test_inference_in_tf32(name: str) -> None:
    run, truth = inference(keras, name, 64)
    x = batch(rows=20)
    wanted = truth(x, training=False)
    optimized = tfmem.optimize(run, passes=("recurrent", "offload"))
    single = tf.constant(x, tf.float32)
    assert distance(run(single), wanted) < IN_TF32
    assert distance(optimized(single), wanted) < IN_TF32
    assert "precision tf32" in tfmem.report(optimized).replaced[0]


@pytest.mark.parametrize("name", sorted(ON_CUDNN))
def test_nothing_is_copied_around_a_layer(name: str) -> None:
    """Its sequences stay as they lie, no op fills its initial states, and its input products add their bias."""
    optimized = tfmem.optimize(inference(keras, name, 33)[0], passes=("recurrent", "offload"))
    graph = optimized.get_concrete_function(tf.constant(batch(), tf.float32)).graph
    operations = {op.type for op in graph.get_operations()}
    assert {RECURRENT_OP, "_FusedMatMul"} <= operations
    assert not operations & {"Transpose", "Fill"}


@pytest.mark.parametrize("units", [1, 7, 33, 1000])
@pytest.mark.parametrize("name", ["lstm", "gru, reset before"])
def test_odd_sizes(name: str, units: int) -> None:
    run, truth = inference(keras, name, units)
    optimized = tfmem.optimize(run, passes=("recurrent", "offload"))
    for rows, steps in ((1, STEPS), (1, 1), (1, 0), (3, 17), (11, 2)):
        x = numbers(rows, steps, INPUTS, seed=rows)
        found = optimized(tf.constant(x, tf.float32))
        assert found.shape == (rows, steps, 3)
        if steps:
            assert distance(found, truth(x, training=False)) < FORWARD
    assert tfmem.report(optimized).replaced


def test_a_model_that_is_not_compiled_predicts() -> None:
    model = network(keras, "lstm", 33, "float32")
    x = batch()
    wanted = model(x, training=False)
    tfmem.optimize(model, passes=("recurrent", "offload"))
    assert distance(model.predict(x, verbose=0), wanted) < FORWARD
    assert tfmem.report(model).replaced


@pytest.mark.usefixtures("tf32_products")
def test_a_saved_model_keeps_its_kernels(tmp_path: Path) -> None:
    """Wherever it is served, TF32 allowed or not."""
    model = network(keras, "lstm", 64, "float32")
    model.export(tmp_path / "model", verbose=False)
    path = tfmem.optimize(tmp_path / "model")
    assert "precision tf32" in tfmem.report(path).replaced[0]
    tf.config.experimental.enable_tensor_float_32_execution(False)
    served = tf.saved_model.load(path).signatures["serving_default"]
    functions = served.graph.as_graph_def().library.function
    (node,) = [node for each in functions for node in each.node_def if node.op == RECURRENT_OP]
    assert node.attr["precision"].s == b"tf32"
    assert node.attr["programs"].list.s
    x = tf.constant(batch(rows=20), tf.float32)
    (found,) = served(x).values()
    assert distance(found, model(x, training=False)) < IN_TF32


def stays(reason: str) -> None:
    run, truth = inference(keras, "lstm", 33)
    x = batch()
    optimized = tfmem.optimize(run, passes=("recurrent", "offload"))
    found = optimized(tf.constant(x, tf.float32))
    assert distance(found, truth(x, training=False)) < FORWARD
    report = tfmem.report(optimized)
    assert not report.replaced
    (line,) = report.not_replaced
    assert reason in line
    nodes = optimized.get_concrete_function(tf.constant(x, tf.float32)).graph.as_graph_def().library.function
    assert RECURRENT_OP not in {node.op for function in nodes for node in function.node_def}


def test_without_a_compiler_the_layer_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Any:
        raise KernelError(nvrtc.MISSING.format("no module named cuda"))

    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    monkeypatch.setattr(nvrtc, "compiler_version", missing)  # which an earlier test may have asked for
    stays("NVRTC is needed to compile GPU kernels and was not found (no module named cuda): install it")


def test_on_a_gpu_too_old_the_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "OLDEST", 200)
    stays("is too old: recurrent kernels need compute capability 20.0")


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"recurrent dropout's loop"}))
def test_training(name: str, masked: bool) -> None:
    """Losses and weights of five steps."""
    units = 48
    models = [network(keras, name, units, dtype, masked) for dtype in ("float64", "float32", "float32")]
    without_cudnn(models[0])
    weights = models[1].get_weights()
    for model in models:
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    tfmem.optimize(models[2], passes=("recurrent", "offload"))
    losses: list[list[float]] = [[], [], []]
    for step in range(5):
        x = batch(masked, seed=step)
        wide = [BATCH, 3] if name == "last step" else [BATCH, STEPS, 3]
        y = numbers(*wide, seed=50 + step)
        for place, model in enumerate(models):
            losses[place].append(float(np.ravel(model.train_on_batch(x, y))[0]))
    truth, _, found = losses
    np.testing.assert_allclose(found, truth, rtol=LOSS)
    for a, b, before in zip(models[2].get_weights(), models[0].get_weights(), weights, strict=True):
        assert distance(a - before, b - before) < CHANGED
    report = tfmem.report(models[2])
    assert report.replaced, str(report)
    assert "gradient" in report.replaced[0]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_training(policy: str) -> None:
    """Held against float32: Keras's own bfloat16 has been seen to give NaN after a step on a GPU."""
    losses = []
    for optimized in (False, True):
        dtype = policy if optimized else "float32"
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Input((None, INPUTS)),
            keras.layers.LSTM(64, dtype=dtype),
            keras.layers.Dense(1, dtype="float32"),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        if optimized:
            tfmem.optimize(model, passes=("recurrent", "offload"))
        steps = [(batch(seed=step), numbers(BATCH, 1, seed=step)) for step in range(5)]
        losses.append([float(np.ravel(model.train_on_batch(x, y))[0]) for x, y in steps])
        if optimized:
            assert tfmem.report(model).replaced
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


@pytest.mark.parametrize("name", ["lstm", "gru", "bidirectional"])
def test_tf_keras(name: str) -> None:
    """The layer is a function with an implementation for GPUs; its loop for CPUs is what is read and replaced."""
    run, truth = inference(tf_keras, name, 64)
    x = batch()
    optimized = tfmem.optimize(run, passes=("recurrent", "offload"))
    assert distance(optimized(tf.constant(x, tf.float32)), truth(x, training=False)) < FORWARD
    assert tfmem.report(optimized).replaced


@pytest.fixture(name="determinism")
def fixture_determinism() -> Iterator[None]:
    """TensorFlow's own sums over a batch are in no fixed order otherwise."""
    tf.config.experimental.enable_op_determinism()
    yield
    tf_config.disable_op_determinism()


@pytest.mark.usefixtures("determinism")
def test_two_runs_are_equal_to_the_bit() -> None:
    """Gradients too: large GEMMs and sums in one order."""
    results = []
    for _ in range(2):
        model = network(keras, "lstm", 64, "float32")
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        tfmem.optimize(model, passes=("recurrent", "offload"))
        for step in range(3):
            model.train_on_batch(batch(seed=step), numbers(BATCH, STEPS, 3, seed=step))
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
