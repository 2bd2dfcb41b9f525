"""Which products of replaced layers go to tensor cores, as a GPU would have them: here the ops run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmem
from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage
from custom_ops.load import load
from custom_ops.recurrent.gpu_program import RecurrentProgram
from graph_passes.passes.products.apply import MATMUL_OP
from graph_passes.passes.recurrent.match import RECURRENT_OP, Kernels, RecurrentPlan
from graph_passes.report import Report
from tests.tf.recurrent_replacements import compare, data
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.devices import find_target
from tfmem.kernels import products
from tfmem.kernels import recurrent as tuning
from tfmem.kernels.replace_recurrent import replace_recurrent, with_replacements

UNITS, ROWS, STEPS = 512, 5, 30
IMAGES = [KernelImage(90, name, 32, f"code of {name}".encode()) for name in ("split", "large", "small")]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them runs on a CPU."""
    monkeypatch.setattr(tuning, "tuned_kernels", lambda *_: Kernels((RecurrentProgram(IMAGES[0]),)))
    monkeypatch.setattr(products, "_programs", lambda *_: IMAGES)


def replaced(trace: Any, precision: Any = "highest", **options: Any) -> tuple[Any, RecurrentPlan, list[str]]:
    """By a GPU on which TensorFlow multiplies float32 in `precision`; the new function, what was done, and its ops."""
    target = replace(find_target("", load()), name="/device:GPU:0", precision=precision)
    captured, plan = replace_recurrent(capture_concrete(trace), target, tfmem.Options(**options), final=True)
    ops = [node.op for node in captured.graph_def.node]
    assert RECURRENT_OP in ops
    return restore_concrete(trace, captured, captured.graph_def), plan, ops


def inference(units: int = 256, rows: int | None = None, layer: Any = keras.layers.LSTM) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((None, units)), layer(units)])
    spec = tf.TensorSpec([rows, STEPS if rows else None, units])
    trace = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec)
    trace.kept = model  # a trace does not keep its variables
    return trace


def test_the_inputs_product_does() -> None:
    trace = inference()
    function, plan, ops = replaced(trace)
    assert ops.count(MATMUL_OP) == 1
    assert [note.startswith("matmuls on tensor cores, as accurate as float32: ") for note in plan.notes] == [True]
    compare(trace, function, [data(3, 7, 256)])
    assert plan.notes[0] in with_replacements(Report("graph", "GPU", "", "unchanged: fits", 0, 0), plan).notes


def test_so_does_that_of_both_directions() -> None:
    trace = inference(layer=lambda units: keras.layers.Bidirectional(keras.layers.LSTM(units)))
    function, _, ops = replaced(trace)
    assert MATMUL_OP in ops
    compare(trace, function, [data(3, 7, 256)])


@pytest.mark.parametrize(
    ("trace", "options"),
    [
        (lambda: inference(units=64), {}),  # too small
        (lambda: inference(rows=2), {}),  # 60 rows
        (inference, {"precision": "tf32"}),
        (inference, {"recurrent": tfmem.RecurrentOptions(precision="tf32")}),
    ],
)
def test_others_stay(trace: Any, options: Any) -> None:
    _, plan, ops = replaced(trace(), **options)
    assert MATMUL_OP not in ops
    assert not plan.notes


def test_without_a_compiler_they_stay_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> list[bytes]:
        raise KernelError("no such compiler")

    monkeypatch.setattr(products, "_programs", missing)
    _, plan, ops = replaced(inference())
    assert MATMUL_OP not in ops
    (note,) = plan.notes
    assert note.startswith("matmuls in TensorFlow's float32: ")
    assert note.endswith("(there are no kernels for this device: no such compiler)")


def test_so_do_products_of_gradients() -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.LSTM(UNITS)
    layer.build((ROWS, STEPS, UNITS))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, [x, *layer.trainable_variables])

    trace = step.get_concrete_function(tf.TensorSpec([ROWS, STEPS, UNITS]))
    function, plan, ops = replaced(trace)
    assert ops.count(MATMUL_OP) == 4  # of the inputs, and what they, their weights and those of the states get
    assert plan.notes[0].count(",") == 4, plan.notes
    compare(trace, function, [data(ROWS, STEPS, UNITS, scale=0.1)], tolerance=2e-5)
