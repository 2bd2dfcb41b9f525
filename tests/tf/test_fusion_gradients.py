"""A stitched inference function has the gradient of the ops that it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES, batch, close, optimized, require_stitched

WEIGHTS = tf.Variable(tf.random.stateless_normal([12, 5], [1, 2]))


@tf.function
def network(x: Any) -> Any:
    return tf.nn.softmax(tf.tanh(x @ WEIGHTS) * 2.0 - 1.0)


OPTIONS: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}


def gradient(function: Any, x: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x) ** 2)
    return loss, tape.gradient(loss, [x, WEIGHTS])


def test_under_a_tape() -> None:
    fused = optimized(network)
    x, _ = batch()
    close(fused(x), network(x))
    require_stitched(fused, "Tanh", "Softmax")
    with pytest.warns(tfmem.TfmemWarning, match="so the original function runs"):
        close(gradient(fused, x), gradient(network, x))


def test_in_a_function_with_a_tape() -> None:
    fused = optimized(network)
    x, _ = batch()
    expected = gradient(network, x)
    found = tf.function(lambda x: gradient(fused, x))(x)
    close(found, expected)


def test_of_second_order() -> None:
    fused = optimized(network)
    x, _ = batch()

    def second(function: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            _, (first, _) = gradient(function, x)
            total = tf.reduce_sum(first**2)
        return outer.gradient(total, x)

    close(second(fused), second(network), 1e-4)


def test_a_function_that_trains_within_a_tape_trains_once() -> None:
    count = tf.Variable(0.0)

    @tf.function
    def step(x: Any) -> Any:
        count.assign_add(1.0)
        return tf.reduce_sum(tf.tanh(x) * count)

    fused = optimized(step)
    x, _ = batch()
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = fused(x)
    close(tape.gradient(loss, x), 1 - tf.tanh(x) ** 2)
    assert count.numpy() == 1.0


def _jacobian(function: Callable[[Any], Any], x: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        results = function(x)
    return tape.batch_jacobian(results, x)


def _forwards(function: Callable[[Any], Any], x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        results = function(x)
    return accumulator.jvp(results)


def _vectorized(function: Callable[[Any], Any], x: Any) -> Any:
    return tf.vectorized_map(lambda row: function(row[None])[0], x)


def _recomputed(function: Callable[[Any], Any], x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.recompute_grad(function)(x) ** 2)
    return tape.gradient(loss, x)


@pytest.mark.parametrize("how", [_jacobian, _forwards, _vectorized, _recomputed])
@pytest.mark.filterwarnings("ignore::tfmem.TfmemWarning")
def test_in_other_ways(how: Callable[..., Any]) -> None:
    fused = optimized(network)
    x, _ = batch()
    fused(x)
    require_stitched(fused, "Tanh")
    close(how(fused, x), how(network, x))


class _Counting(tf.Module):
    """Counts its calls, so that it cannot run a second time for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0.0)
        self.weights = tf.Variable(tf.random.stateless_normal([12, 5], [1, 2]))

    @tf.function(input_signature=[tf.TensorSpec([None, 12])])
    def __call__(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return tf.nn.softmax(tf.tanh(x @ self.weights) * 2.0 - 1.0) * self.calls


def test_a_reloaded_model_that_cannot_run_again_says_what_to_do(tmp_path: Path) -> None:
    tf.saved_model.save(_Counting(), str(tmp_path / "plain"))
    loaded = tf.saved_model.load(tfmem.optimize(str(tmp_path / "plain"), output=str(tmp_path / "stitched"), **OPTIONS))
    x, _ = batch()
    close(loaded(x), _Counting()(x))
    with pytest.raises(tfmem.GradientError, match="leave 'fusion' out of passes"):
        gradient(loaded, x)


def test_a_graph_says_what_to_do() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [32, 12], name="x")
        tf.reduce_sum(tf.tanh(x * 2.0 + 1.0) - 1.0, name="loss")
    graph_def = tfmem.optimize(graph.as_graph_def(), fetches=["loss:0"], feeds=["x"], **OPTIONS)
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(graph_def, name="")
        with pytest.raises(tfmem.TfmemError, match="Take the gradient in the original graph and optimise both"):
            tf.gradients(imported.get_tensor_by_name("loss:0"), imported.get_tensor_by_name("x:0"))
