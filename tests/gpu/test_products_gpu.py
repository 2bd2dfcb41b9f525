"""TfmemMatMul on a GPU: the op around the kernels, and the layers whose products it takes. Needs a GPU and NVRTC; the
kernels have separate tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.errors import KernelError
from custom_ops.image_functions import named
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.load import load
from custom_ops.matmul import kernels as matmul
from graph_passes.passes.products.apply import MATMUL_OP
from graph_passes.passes.recurrent.match import RECURRENT_OP

UNITS, STEPS, ROWS = 512, 30, 20  # with fewer units cuBLAS is faster

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.fixture(name="programs", scope="module")
def fixture_programs() -> list[KernelImage]:
    try:
        arch = DeviceContext().arch
    except KernelError as error:
        pytest.skip(str(error))
    if arch < matmul.OLDEST:
        pytest.skip(f"compute capability {arch / 10}, these need {matmul.OLDEST / 10}")
    return matmul.build(arch)


def attributes(programs: list[KernelImage]) -> dict[str, list[str]]:
    return {"programs": [each.to_text() for each in programs], "images": named([each.code for each in programs])}


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def distance(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(found, np.float64) - wanted)) / np.max(np.abs(wanted)))


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1, 1), (70, 33, 257), (2000, 300, 1025)])
def test_the_op_multiplies(
    programs: list[KernelImage], rows: int, depth: int, columns: int, transpose_a: bool, transpose_b: bool
) -> None:
    a, b, bias = numbers(rows, depth), numbers(depth, columns, seed=1), numbers(columns, seed=2)
    for biases in ([], [bias]):
        found = load().ops.tfmem_mat_mul(
            a=a.T if transpose_a else a,
            b=b.T if transpose_b else b,
            bias=biases,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            **attributes(programs),
        )
        assert "GPU" in found.device
        assert distance(found, a.astype(np.float64) @ b + sum(biases)) < 1e-6


def test_nothing_to_multiply(programs: list[KernelImage]) -> None:
    ops = load().ops
    assert ops.tfmem_mat_mul(a=numbers(0, 3), b=numbers(3, 4), bias=[], **attributes(programs)).shape == (0, 4)
    none = ops.tfmem_mat_mul(a=numbers(2, 0), b=numbers(0, 3), bias=[numbers(3)], **attributes(programs))
    np.testing.assert_array_equal(none, np.tile(numbers(3), (2, 1)))


def test_the_cpu_multiplies_where_no_program_fits(
    programs: list[KernelImage], capfd: pytest.CaptureFixture[str]
) -> None:
    @tf.function
    def multiply(a: Any, programs: list[KernelImage]) -> Any:
        return load().ops.tfmem_mat_mul(a=a, b=a, bias=[], **attributes(programs))

    a = tf.constant(numbers(4, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 1 programs for a GPU, expected 3 or none: run tfmem"):
        multiply(a, programs[:1])
    capfd.readouterr()
    for given in ([], [replace(program, arch=program.arch + 900) for program in programs]):
        np.testing.assert_allclose(multiply(a, given), numbers(4, 4) @ numbers(4, 4), rtol=1e-5, atol=1e-6)
    assert capfd.readouterr().err.count("has no program that runs on") == 2


def network(dtype: str, layer: str = "lstm", training: bool = False) -> Any:
    keras.utils.set_random_seed(5)
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        made = {
            "lstm": lambda: keras.layers.LSTM(UNITS, return_sequences=True, use_cudnn=dtype != "float64"),
            "gru": lambda: keras.layers.GRU(UNITS, return_sequences=True, reset_after=False),
            "both ways": lambda: keras.layers.Bidirectional(
                keras.layers.LSTM(UNITS, return_sequences=True, use_cudnn=dtype != "float64")
            ),
        }[layer]()
        model = keras.Sequential([keras.layers.Input((None, UNITS)), made, keras.layers.Dense(3)])
        if training:
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def function(model: Any) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, None, UNITS])])
    def run(x: Any) -> Any:
        return model(x, training=False)

    return run


def operations(graph: Any) -> list[str]:
    return [op.type for op in graph.get_operations()]


@pytest.mark.parametrize("layer", ["lstm", "gru", "both ways"])
def test_a_layers_product_runs_on_tensor_cores(layer: str) -> None:
    model, truth = network("float32", layer), network("float64", layer)
    truth.set_weights(model.get_weights())
    optimized = tfmem.optimize(function(model), passes=("recurrent", "offload"))
    x = numbers(ROWS, STEPS, UNITS)
    found = optimized(tf.constant(x))
    assert distance(found, truth(x.astype(np.float64), training=False)) < 1e-5
    report = tfmem.report(optimized)
    assert any("on tensor cores, as accurate as float32" in note for note in report.notes), str(report)
    ops = operations(optimized.get_concrete_function(tf.constant(x)).graph)
    assert MATMUL_OP in ops
    assert RECURRENT_OP in ops


@pytest.mark.usefixtures("tf32_products")
def test_where_tf32_is_allowed_it_does_not() -> None:
    optimized = tfmem.optimize(function(network("float32")), passes=("recurrent", "offload"))
    x = tf.constant(numbers(ROWS, STEPS, UNITS))
    optimized(x)
    assert MATMUL_OP not in operations(optimized.get_concrete_function(x).graph)
    assert not any("tensor cores" in note for note in tfmem.report(optimized).notes)


def test_without_a_compiler_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: Any) -> NoReturn:
        raise KernelError("no such compiler")

    monkeypatch.setattr(matmul, "build", without)
    options = tfmem.Options(cache_directory="")
    optimized = tfmem.optimize(function(network("float32")), options=options, passes=("recurrent", "offload"))
    x = tf.constant(numbers(ROWS, STEPS, UNITS))
    optimized(x)
    assert MATMUL_OP not in operations(optimized.get_concrete_function(x).graph)
    assert any(
        "in TensorFlow's float32" in note and "no such compiler" in note for note in tfmem.report(optimized).notes
    )


def test_training_products_run_on_tensor_cores() -> None:
    """What a step makes of the weights is what float64 makes of them."""
    x, y = numbers(ROWS, STEPS, UNITS), numbers(ROWS, STEPS, 3, seed=1)
    models = [network(dtype, training=True) for dtype in ("float32", "float64")]
    models[1].set_weights(models[0].get_weights())
    before = [weight.astype(np.float64) for weight in models[0].get_weights()]
    tfmem.optimize(models[0], passes=("recurrent", "offload"))
    for model in models:
        for _ in range(2):
            model.train_on_batch(x, y)
    for first, found, wanted in zip(before, *(model.get_weights() for model in models), strict=True):
        assert distance(found - first, wanted - first) < 5e-4
    report = tfmem.report(models[0])
    assert report.replaced, str(report)
    (note,) = [note for note in report.notes if note.startswith("matmuls on tensor cores, as accurate as float32: ")]
    assert note.count(",") == 3, note  # of the inputs, and what their weights and those of the states get


def test_a_saved_model_keeps_them(tmp_path: Path) -> None:
    model = network("float32")
    model.export(tmp_path / "model", verbose=False)
    path = tfmem.optimize(tmp_path / "model")
    served = tf.saved_model.load(path).signatures["serving_default"]
    functions = served.graph.as_graph_def().library.function
    assert MATMUL_OP in {node.op for each in functions for node in each.node_def}
    x = numbers(ROWS, STEPS, UNITS)
    (found,) = served(tf.constant(x)).values()
    assert distance(found, model(x, training=False)) < 1e-5
