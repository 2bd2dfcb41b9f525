"""Whatever holds a step goes in; the same kind of object comes out, and runs its regions as one op each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES, Softmax, batch, close, optimized, require_stitched, run, values

OPTIONS: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}
UPDATE = "AssignSubVariableOp"


def test_a_function() -> None:
    plain, model = Softmax(), Softmax()
    step = optimized(model.step)
    close(run(step), run(plain.step))
    close(values(model.variables), values(plain.variables))
    report = require_stitched(step, "MatMul", "SoftmaxCrossEntropyWithLogits", UPDATE, "ReadVariableOp")
    assert len(report.regions) == 1


def test_a_function_within_another() -> None:
    plain, model = Softmax(), Softmax()
    step = optimized(model.step)

    @tf.function
    def twice(x: Any, y: Any) -> Any:
        return step(x, y)[0] + step(x, y)[0]

    x, y = batch()
    close(twice(x, y), plain.step(x, y)[0] + plain.step(x, y)[0])
    require_stitched(step, UPDATE)


def test_a_concrete_function() -> None:
    plain, model = Softmax(), Softmax()
    step = optimized(model.step.get_concrete_function(*batch()))
    close(run(step), run(plain.step))
    require_stitched(step, UPDATE)


def session_graph() -> tuple[tf.Graph, Any, Any, Any, Any, list[Any]]:
    """Two layers, by TensorFlow 1."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [32, 12], name="x")
        y = tf.compat.v1.placeholder(tf.float32, [32, 5], name="y")
        weights = tf.compat.v1.get_variable("w", [12, 5], initializer=tf.zeros_initializer(), use_resource=True)
        bias = tf.compat.v1.get_variable("b", [5], initializer=tf.zeros_initializer(), use_resource=True)
        logits = tf.matmul(x, weights) + bias
        rows = tf.nn.softmax_cross_entropy_with_logits(y, tf.tanh(logits) * 2.0)
        loss = tf.reduce_mean(rows, name="loss")
        train = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss, name="train")
        start = tf.compat.v1.global_variables_initializer()
    return graph, train, loss, start, logits, [weights, bias]


def losses(graph: tf.Graph, names: tuple[str, str, str], config: Any = None) -> list[Any]:
    start, train, loss = names
    x, y = batch()
    found = []
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(start)
        for _ in range(4):
            found.append(session.run([loss, train], {"x:0": x.numpy(), "y:0": y.numpy()})[0])
            found.append(session.run(loss, {"x:0": x.numpy(), "y:0": y.numpy()}))  # which trains nothing
    return found


def test_a_graph_in_place() -> None:
    plain, train, loss, start, *_ = session_graph()
    names = start.name, train.name, loss.name
    expected = losses(plain, names)
    graph, *_, logits, _ = session_graph()
    tfmem.optimize(graph, fetches=["train", "loss:0"], **OPTIONS)
    close(losses(graph, names, tfmem.session_config()), expected)
    require_stitched(graph, "MatMul")
    x, y = batch()
    with tf.compat.v1.Session(graph=graph) as session:  # what is no result of the step is there all the same
        session.run(start.name)
        assert session.run(logits, {"x:0": x.numpy(), "y:0": y.numpy()}).shape == (32, 5)


def test_a_graph_def() -> None:
    plain, train, loss, start, *_ = session_graph()
    names = start.name, train.name, loss.name
    expected = losses(plain, names)
    graph_def = tfmem.optimize(plain.as_graph_def(), fetches=["train", "loss:0"], feeds=["x", "y"], **OPTIONS)
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    close(losses(graph, names), expected)
    require_stitched(graph_def, "MatMul", "TanhGrad")
    x, y = batch()
    for each in (plain, graph):  # no variable has a value yet
        error = pytest.raises(tf.errors.FailedPreconditionError, match="Could not find variable")
        with tf.compat.v1.Session(graph=each) as session, error:
            session.run("loss:0", {"x:0": x.numpy(), "y:0": y.numpy()})


def test_a_saved_model(tmp_path: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            self.weights = tf.Variable(tf.random.stateless_normal([12, 5], [1, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 12])])
        def __call__(self, x: Any) -> Any:
            return tf.nn.softmax(tf.tanh(x @ self.weights) * 2.0 - 1.0)

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "plain"))
    path = tfmem.optimize(str(tmp_path / "plain"), output=str(tmp_path / "stitched"), **OPTIONS)
    loaded = tf.saved_model.load(path)
    for rows in (32, 3):
        x, _ = batch(rows=rows)
        close(loaded(x), model(x))
        close(loaded.signatures["serving_default"](x)["output_0"], model(x))
    require_stitched(path, "MatMul", "Tanh", "Softmax")
    x, _ = batch()
    with tf.GradientTape() as tape, tf.GradientTape() as other:
        tape.watch(x)
        other.watch(x)
        found, expected = tf.reduce_sum(loaded(x) ** 2), tf.reduce_sum(model(x) ** 2)
    close(tape.gradient(found, x), other.gradient(expected, x))
