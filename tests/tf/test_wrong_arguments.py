"""Wrong arguments of the public functions, and steps with nothing in them: an error of tfmem's that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.memory_in_use import in_use


def square(x: Any) -> Any:
    return x * x


def graph_def() -> Any:
    with tf.Graph().as_default() as graph:
        tf.square(tf.compat.v1.placeholder(tf.float32, [4], "x"), name="y")
    return graph.as_graph_def()


WRONG: list[dict[str, Any]] = [
    {"fetches": "y"},
    {"fetches": 3},
    {"fetches": [3]},
    {"fetches": [None]},
    {"fetches": ["y:zero"]},
    {"fetches": ["y:0:0"]},
    {"fetches": [""]},
    {"fetches": {"y": "y"}},
    {"fetches": ["y:7"]},
    {"feeds": "x"},
    {"feeds": [b"x"]},
    {"feeds": ["x:9"]},
    {"fetches": ["nothing"]},
    {"output": 3},
    {"output": b"/tmp/x"},
    {"options": {"device": "CPU"}},
    {"options": "CPU"},
    {"policy": 3},
    {"policy": ["hybrid"]},
    {"passes": "offload"},
    {"offload": {"policy": "hybrid"}},
    {"recurrent": None},
    {"observe": "no"},
    {"device": ""},  # not wrong: the last row, see below
]


@pytest.mark.parametrize("wrong", WRONG[:-1], ids=str)
@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_wrong_arguments_of_optimize(wrong: dict[str, Any], budget: Any) -> None:
    with pytest.raises((tfmem.OptionsError, tfmem.GraphError)) as caught:
        tfmem.optimize(graph_def(), memory_budget=budget, **wrong)
    assert type(caught.value).__module__.startswith("graph_passes")
    tfmem.optimize(graph_def(), memory_budget=budget, **WRONG[-1])  # without them it works


@pytest.mark.parametrize("x", [None, 3, "", "no/such/model", b"bytes", [], object(), square, np.zeros(3), tf.Module])
def test_what_cannot_be_optimised(x: Any) -> None:
    with pytest.raises(tfmem.GraphError):
        tfmem.optimize(x)


@pytest.mark.parametrize(
    "device", ["GPU:77", "TPU:0", "0", ":0", "/device:", "CPU:1", "CPU", "CPU:", "nonsense", "PU:0"]
)
def test_no_such_device(device: str) -> None:
    if device == "CPU:1" and len(tf.config.list_logical_devices("CPU")) > 1:
        pytest.skip("there is one")
    with pytest.raises(tfmem.OptionsError, match=r"device=.*there are: "):
        tfmem.optimize(tf.function(square), device=device)


@pytest.mark.parametrize(
    "device", ["CPU:0", "cpu:0", "/CPU:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"]
)
def test_a_device_as_tensorflow_writes_it(device: str) -> None:
    assert tfmem.optimize(tf.function(square), device=device)(2.0) == 4.0


@pytest.mark.parametrize("mechanism", ["copy", "managed"])
def test_a_mechanism_that_the_device_does_not_have_is_refused_at_once(mechanism: Any) -> None:
    with pytest.raises(tfmem.OptionsError, match=f"mechanism='{mechanism}'.*use 'file' or 'auto'"):
        tfmem.optimize(tf.function(square), device="CPU:0", offload=tfmem.OffloadOptions(mechanism=mechanism))


def nothing() -> None:
    """A step without an op."""


def no_entries() -> dict[str, Any]:
    """Another."""
    return {}


@pytest.mark.parametrize("room", [None, 1 << 20])
def test_a_step_without_ops_runs(room: int | None) -> None:
    budget = room and in_use() + room
    for function in (nothing, lambda: (), no_entries):
        optimized = tfmem.optimize(tf.function(function), memory_budget=budget, device="CPU:0")
        for _ in range(3):
            assert optimized() == function()
        assert str(tfmem.report(optimized))
    same = tfmem.optimize(tf.function(lambda x: x), memory_budget=budget, device="CPU:0")
    assert float(same(tf.constant(3.0))) == 3.0
    concrete = tf.function(nothing).get_concrete_function()
    assert tfmem.optimize(concrete, memory_budget=budget, device="CPU:0")() is None


@pytest.mark.parametrize("room", [None, 1 << 20])
def test_an_empty_graph_stays_one(room: int | None) -> None:
    budget = room and in_use() + room
    empty = tf.compat.v1.GraphDef()
    assert tfmem.optimize(empty, memory_budget=budget, device="CPU:0") == empty
    assert not tfmem.optimize(tf.compat.v1.MetaGraphDef(), memory_budget=budget, device="CPU:0").graph_def.node
    graph = tf.Graph()
    assert tfmem.optimize(graph, memory_budget=budget, device="CPU:0") is graph
    assert not graph.get_operations()


VERIFY: list[dict[str, Any]] = [
    {"before": None},
    {"after": 3},
    {"inputs": None},
    {"inputs": 3},
    {"inputs": "x"},
    {"steps": 0},
    {"steps": -1},
    {"steps": 1.5},
    {"steps": True},
    {"steps": None},
    {"tolerance": -1.0},
    {"tolerance": float("nan")},
    {"tolerance": float("inf")},
    {"tolerance": "small"},
    {"tolerance": None},
    {"variables": None},
    {"variables": [3]},
    {"variables": 3},
]


@pytest.mark.parametrize("wrong", VERIFY, ids=str)
def test_wrong_arguments_of_verify(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"before": square, "after": square, "inputs": [2.0]}
    with pytest.raises(tfmem.OptionsError, match=f"^{next(iter(wrong))}"):
        tfmem.verify(**{**right, **wrong})
    assert tfmem.verify(**right, steps=np.int64(2), variables=(tf.Variable(1.0),)).bit_equal


@pytest.mark.parametrize("loss", [None, 3.0, "loss", np.float32(3), tf.constant(3.0), []], ids=str)
def test_wrong_losses(loss: Any) -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [4])
        with pytest.raises(tfmem.TfmemError, match="loss="):
            tfmem.avm_gradients(loss, [variable])


@pytest.mark.parametrize("variables", [None, "v", [None], [3], {}, ["v"], 3])
def test_wrong_variables(variables: Any) -> None:
    with tf.Graph().as_default():
        loss = tf.reduce_sum(tf.compat.v1.get_variable("v", [4]) ** 2)
        with pytest.raises(tfmem.TfmemError, match="variables"):
            tfmem.avm_gradients(loss, variables)


def test_one_variable_is_taken_as_tensorflow_takes_it() -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [4])
        assert len(tfmem.avm_gradients(tf.reduce_sum(variable**2), variable)) == 1


def test_a_report_that_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "assets.extra"
    folder.mkdir()
    for text in ("", "{", "[1]", "[" * 200_000, '{"format": 1}', "null"):
        (folder / "tfmem_report.json").write_text(text)
        with pytest.raises(tfmem.GraphError, match="report"):
            tfmem.report(str(tmp_path))
