"""Without a budget of the user's, a GPU's memory is the budget: what cannot be planned for it is left unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.optimized_runs import SPARE
from tfmem.api import make_engine, optimize_with

OPEN = [tf.TensorSpec([None, 32, 32, 2], name="x"), tf.TensorSpec([None], tf.int64, name="y")]
MIB = 1 << 20


def optimize(x: Any, budget: int | None = None, **how: Any) -> Any:
    """`tfmem.optimize` as on a device of 1 MiB, which is the budget where none is given."""
    called = not isinstance(x, tf.Graph | tf.compat.v1.GraphDef)
    options = tfmem.Options(memory_budget=budget, offload=tfmem.OffloadOptions(split="never"))
    engine = make_engine(options, called)
    return optimize_with(
        engine if engine.settings.must_fit else engine.under(replace(engine.settings, budget=MIB)), x, **how
    )


def notes(x: Any) -> str:
    report = tfmem.report(x)
    assert not report.transfers
    assert report.budget is None
    return " ".join(report.notes)


def test_an_open_batch(new_net: Any, batch: Any, flow: Any) -> None:
    function = optimize(tf.function(new_net().step, input_signature=OPEN))
    expected = tf.function(new_net().step)
    for _ in range(3):
        assert function(*batch).numpy() == expected(*batch).numpy()
    assert "memory was not planned: " in notes(function)
    assert "input_shapes={'x'" in notes(function)
    assert tfmem.report(function).decision == "unchanged: no budget"
    assert flow.moved == 0


def test_an_open_batch_with_a_budget(new_net: Any, batch: Any, flow: Any) -> None:
    with pytest.raises(tfmem.UnknownShapeError):
        optimize(tf.function(new_net().step, input_signature=OPEN), budget=MIB)(*batch)


def test_no_gradient(new_net: Any, batch: Any, flow: Any) -> None:
    net = new_net()
    function = optimize(tf.function(net.loss))
    assert function(*batch).numpy() == tf.function(net.loss)(*batch).numpy()
    assert "there is no gradient in the graph" in notes(function)
    with pytest.raises(tfmem.NoGradientError):
        optimize(tf.function(net.loss), budget=MIB)(*batch)


def test_a_step_that_can_be_planned_is(new_net: Any, batch: Any, flow: Any, smallest: Any) -> None:
    least = smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    engine = make_engine(tfmem.Options(), called=True)
    engine = engine.under(replace(engine.settings, budget=SPARE + least))
    function, expected = optimize_with(engine, tf.function(new_net().step)), tf.function(new_net().step)
    assert function(*batch).numpy() == expected(*batch).numpy()
    assert flow.moved > 0


def test_a_step_that_no_plan_brings_within_it(new_net: Any, batch: Any, flow: Any) -> None:
    function, expected = optimize(tf.function(new_net().step)), tf.function(new_net().step)
    with pytest.warns(
        tfmem.TfmemWarning, match="its memory was not planned: by estimates it needs about .* bytes at op"
    ):
        assert function(*batch).numpy() == expected(*batch).numpy()
    assert f"TensorFlow may use {MIB:,}" in notes(function)
    assert flow.moved == 0
    with pytest.raises(tfmem.InfeasibleBudgetError):
        optimize(tf.function(new_net().step), budget=MIB)(*batch)


def graph_of_tensorflow_1() -> tf.Graph:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        h = v1.placeholder(tf.float32, [None, 64], name="x")
        for place in range(4):
            h = tf.tanh(h @ v1.get_variable(f"w{place}", [64, 64], use_resource=True))
        loss = tf.reduce_mean(h)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    return graph


def test_graphs(flow: Any) -> None:
    graph = graph_of_tensorflow_1()
    before = graph.as_graph_def()
    optimize(graph)
    assert graph.as_graph_def() == before
    assert "input_shapes={'x'" in notes(graph)
    with pytest.raises(tfmem.UnknownShapeError):
        optimize(graph_of_tensorflow_1(), budget=MIB)
    after = optimize(before, fetches=["train"])
    assert "input_shapes={'x'" in notes(after)
    del after.node[0].attr["_tfmem_report"]  # where a GraphDef carries what `report` tells
    assert after == before
    with pytest.raises(tfmem.UnknownShapeError):
        optimize(before, fetches=["train"], budget=MIB)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_keras_model_that_predicts(compiled: bool, flow: Any) -> None:
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(4)])
    if compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(5, 7, 3)).astype("float32")
    wanted = [model(x[:rows]) for rows in (5, 3)]
    optimize(model)
    for rows, outputs in zip((5, 3), wanted, strict=True):
        np.testing.assert_allclose(model.predict(x[:rows], verbose=0), outputs, atol=1e-6)
    assert tfmem.report(model).replaced


def test_what_is_replaced_stays_so(flow: Any) -> None:
    layer = keras.layers.GRU(4, return_sequences=True)
    layer.build((None, None, 3))
    spec = tf.TensorSpec([None, None, 3], name="x")
    function = optimize(tf.function(layer, input_signature=[spec]))
    x = tf.random.stateless_normal([2, 5, 3], [0, 1])
    np.testing.assert_allclose(function(x), layer(x), atol=1e-6)
    assert tfmem.report(function).decision == "replaced"
    assert tfmem.report(function).replaced
