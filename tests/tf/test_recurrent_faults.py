"""Whatever goes wrong inside the recurrent pass, values are TensorFlow's, the user is told, and others are replaced."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import custom_ops.errors
import tfmem
import tfmem.frontends.live_graph
import tfmem.kernels.replace_recurrent
from graph_passes.graph import rewrite
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.recurrent import plan
from graph_passes.passes.recurrent.find import roll
from graph_passes.passes.recurrent.lower import bidirectional, loop
from graph_passes.passes.recurrent.train import plan_training as training
from graph_passes.passes.recurrent.train import trained
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers
from tfmem.capture import captured_source

L = keras.layers


class InjectedError(Exception):
    """No error that anybody expects."""


def failing(original: Any, calls: range, error: type[BaseException] = InjectedError) -> Callable[..., Any]:
    """`original`, which fails in some of its calls."""
    count = iter(range(1_000_000))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(count) in calls:
            raise error("on purpose")
        return original(*arguments, **options)

    return function


def model(*layers: Any) -> Any:
    built = keras.Sequential([keras.Input([STEPS, INPUTS]), *layers])
    for seed, weight in enumerate(built.weights):
        weight.assign(numbers(*weight.shape, seed=seed) * 0.5)
    return built


def two_layers() -> Any:
    return model(L.LSTM(UNITS, return_sequences=True), L.GRU(UNITS))


def inference(network: Any) -> Any:
    return tf.function(lambda x: network(x))  # noqa: PLW0108


def gradient(network: Any) -> Any:
    weights = [weight.value for weight in network.trainable_weights]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x) ** 2)
        return loss, tape.gradient(loss, weights)

    return step


def check(function: Any, replaced: int) -> tfmem.Report:
    """It computes what it did, so many recurrences are replaced, and the report and a warning say what happened."""
    x = tf.constant(numbers(4, STEPS, INPUTS))
    plain = tf.nest.flatten(function(x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimized = tfmem.optimize(function, passes=("recurrent", "offload"))
        found = tf.nest.flatten(optimized(x))
    for before, after in zip(plain, found, strict=True):
        np.testing.assert_allclose(after, before, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    assert len(report.replaced) == replaced, report
    said = [str(each.message) for each in caught if each.category is custom_ops.errors.TfmemWarning]
    assert sum("a bug" in text for text in said) == 1, said
    assert any("a bug" in line for line in report.not_replaced), report
    assert any("Traceback" in note and "on purpose" in note for note in report.notes), report
    return report


IN_INFERENCE = {
    "reading": (plan, "read_loop", two_layers, 1),
    "a cell": (loop, "CellReader", two_layers, 1),
    "initial states": (plan, "without_zeros", two_layers, 1),
    "two directions": (bidirectional, "_joined", lambda: model(L.Bidirectional(L.LSTM(UNITS)), L.Dense(2)), 1),
    "finding loops": (plan, "functional_loops", two_layers, 0),
    "unrolled steps": (roll, "RecurrenceSearch", lambda: model(L.LSTM(UNITS, unroll=True)), 0),
    "products": (tfmem.kernels.replace_recurrent, "product_needs", two_layers, 2),
    "kernels": (tfmem.kernels.replace_recurrent, "with_kernels", two_layers, 2),
}


@pytest.mark.parametrize("place", IN_INFERENCE)
def test_in_inference(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    module, name, network, replaced = IN_INFERENCE[place]
    function = inference(network())
    calls = range(2) if place in ("unrolled steps", "kernels") else range(1)
    monkeypatch.setattr(module, name, failing(getattr(module, name), calls))
    if place == "kernels":  # all together once, then the first alone
        replaced -= 1
    check(function, replaced)


IN_TRAINING = {
    "finding gradients": (training, "gradient_loops", 0),
    "reading a pair": (training, "trained_loop", 1),
    "which gradient is which": (trained, "read_pair", 1),
    "the gradient op": (training, "_Whole", 1),
    "differentiating a cell": (training, "differentiable", 1),
    "differentiating what is inserted": (tfmem.kernels.replace_recurrent, "gradients", 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", IN_TRAINING)
def test_in_training(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    module, name, replaced = IN_TRAINING[place]
    function = gradient(two_layers())
    monkeypatch.setattr(module, name, failing(getattr(module, name), range(1)))
    check(function, replaced)


@pytest.mark.parametrize("kind", [inference, gradient])
def test_applying_one_of_two(monkeypatch: pytest.MonkeyPatch, kind: Callable[[Any], Any]) -> None:
    function = kind(two_layers())
    original, first = rewrite.apply_rewrites, list[str]()

    def apply(rewrites: Any, graph: Any) -> None:
        original(rewrites, graph)
        first.append(rewrites[0].name)
        if any(each.name == first[0] for each in rewrites):
            raise InjectedError("on purpose")

    monkeypatch.setattr(rewrite, "apply_rewrites", apply)
    report = check(function, 1)
    assert first[0] in report.not_replaced[0]


@pytest.mark.parametrize("harm", ["an input that is none", "an attribute that is none"])
def test_a_graph_that_is_none(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    function = gradient(two_layers())
    original = rewrite.apply_rewrites

    def apply(rewrites: Any, graph: Graph) -> None:
        original(rewrites, graph)
        node = next(node for node in graph if node.op == "TfmemRecurrent")
        if harm == "an input that is none":
            user = graph.uses(TensorId(node.name))[0]
            graph.rewire(user.node, user.index, TensorId(node.name, 99))
        else:
            node.attrs["units"] = "no number"

    monkeypatch.setattr(rewrite, "apply_rewrites", apply)
    x = tf.constant(numbers(4, STEPS, INPUTS))
    plain = tf.nest.flatten(function(x))
    optimized = tfmem.optimize(function)
    with pytest.warns(custom_ops.errors.TfmemWarning, match="a bug"):
        found = tf.nest.flatten(optimized(x))
    for before, after in zip(plain, found, strict=True):
        np.testing.assert_array_equal(after, before)
    assert not tfmem.report(optimized).replaced


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (captured_source, "inline_captured"),
        (captured_source, "shaped_graph"),
        (captured_source, "applied"),
        (tfmem.kernels.replace_recurrent, "implementations"),
        (plan, "plan_whole"),
    ],
)
@pytest.mark.parametrize("error", [InjectedError, RecursionError, MemoryError])
def test_the_pass_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: type[BaseException]
) -> None:
    function = gradient(two_layers())
    monkeypatch.setattr(module, name, failing(getattr(module, name), range(1), error))
    check(function, 0)


@pytest.mark.long
def test_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for broken in (False, True):
        keras.utils.set_random_seed(1)
        network = two_layers()
        network.compile("sgd", "mse")
        if broken:
            tfmem.optimize(network)
            monkeypatch.setattr(training, "trained_loop", failing(training.trained_loop, range(1)))
        x, y = numbers(20, STEPS, INPUTS), numbers(20, UNITS, seed=1)
        with pytest.warns(custom_ops.errors.TfmemWarning) if broken else contextlib.nullcontext():
            losses.append(network.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"])
        if broken:
            assert "a bug" in str(tfmem.report(network))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("error", [InjectedError, tfmem.GraphError])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (plan, "read_loop"),
        (plan, "plan_whole"),
        (tfmem.frontends.live_graph, "with_kernels"),
        (tfmem.frontends.live_graph, "apply_rewrites"),
    ],
)
def test_a_live_graph(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: type[BaseException]) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [STEPS, 4, UNITS], name="x")
        y = tf.scan(lambda h, item: tf.tanh(item + 0.5 * h), x, tf.zeros([4, UNITS]))
    monkeypatch.setattr(module, name, failing(getattr(module, name), range(1), error))
    with pytest.warns(custom_ops.errors.TfmemWarning, match="a bug"):
        tfmem.optimize(graph, fetches=[y.name])
    assert "on purpose" in str(tfmem.report(graph))
    with tf.compat.v1.Session(graph=graph, config=tfmem.session_config()) as session:
        found = session.run(y, {x: numbers(STEPS, 4, UNITS)})
    state = np.zeros([4, UNITS], "float32")
    for item, row in zip(numbers(STEPS, 4, UNITS), found, strict=True):
        state = np.tanh(item + 0.5 * state)
        np.testing.assert_allclose(row, state, rtol=1e-5, atol=1e-6)


def test_a_graph_that_tensorflow_refuses_is_the_users() -> None:
    function = inference(two_layers())
    with pytest.raises(tfmem.GraphError, match="shape"):
        tfmem.optimize(function, input_shapes={"x": (4, STEPS, INPUTS + 1)})(tf.constant(numbers(4, STEPS, INPUTS)))
