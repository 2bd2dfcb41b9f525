"""Calls of rewritten functions go straight to their graph where nothing watches them, else as TensorFlow's do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation, context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

import tfmem
from tfmem.capture.concrete_function import call_key, call_traced, capture_concrete, is_recorded, restore_concrete

STEPS, WIDTH, UNITS = 4, 3, 5


@pytest.fixture
def layer() -> keras.layers.Layer:
    layer = keras.layers.GRU(UNITS, return_sequences=True)
    layer.build((None, STEPS, WIDTH))
    return layer


def inputs(batch: int = 2, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal((batch, STEPS, WIDTH), (seed, 1))


def optimize(run: Callable[..., Any]) -> tuple[Any, Any]:
    """A function before and after; the layer in it is replaced, and it was called once."""
    before = tf.function(run)
    after = tfmem.optimize(before, passes=("recurrent",))
    after(inputs())
    assert tfmem.report(after).replaced
    return before, after


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that TensorFlow called, in its own way, eagerly or into a graph."""
    functions: list[Any] = []
    call = ConcreteFunction._call_flat

    def watched(function: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(function)
        return call(function, *args, **kwargs)

    monkeypatch.setattr(ConcreteFunction, "_call_flat", watched)
    return functions


def restored(run: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    concrete = tf.function(run).get_concrete_function(*specs)
    captured = capture_concrete(concrete)
    return restore_concrete(concrete, captured, captured.graph_def)


def test_nothing_is_asked_of_tensorflow(layer: keras.layers.Layer, asked: list[Any]) -> None:
    before, after = optimize(layer)
    for batch in (1, 2, 3, 2):
        expected = before(inputs(batch))
        asked.clear()
        np.testing.assert_allclose(after(inputs(batch)), expected, atol=1e-6)
        assert not asked


def test_results_keep_their_structure(layer: keras.layers.Layer) -> None:
    before, after = optimize(lambda x: {"all": layer(x), "some": [x[0], (None, tf.reduce_sum(x))]})
    expected, found = before(inputs()), after(inputs())
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_weights_are_read_in_each_call(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    layer.set_weights([2 * weight for weight in layer.get_weights()])
    np.testing.assert_allclose(after(inputs()), before(inputs()), atol=1e-6)


def test_a_step_that_writes_variables_writes_them_once(layer: keras.layers.Layer) -> None:
    calls = tf.Variable(0)

    def run(x: tf.Tensor) -> tf.Tensor:
        calls.assign_add(1)
        return layer(x)

    _, after = optimize(run)
    for _ in range(3):
        after(inputs())
    assert calls.numpy() == 4


def test_an_error_says_where_it_happened(layer: keras.layers.Layer) -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(layer(x), "of the layer")

    _, after = optimize(run)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Graph execution error(?s:.*)of the layer"):
        after(inputs() * float("nan"))
    assert np.isfinite(after(inputs())).all()


def test_a_call_that_is_watched_takes_the_other_way(layer: keras.layers.Layer, asked: list[Any]) -> None:
    before, after = optimize(layer)
    expected = before(inputs())
    asked.clear()
    with tf.GradientTape(watch_accessed_variables=False):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)  # watches nothing
    assert not asked
    with cancellation.CancellationManagerContext(cancellation.CancellationManager()):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)
    assert len(asked) == 1
    np.testing.assert_allclose(tf.function(after)(inputs()), expected, atol=1e-6)
    assert len(asked) > 1
    asked.clear()
    np.testing.assert_allclose(after(inputs().numpy()), expected, atol=1e-6)
    assert not asked


def test_options_of_a_call_are_followed(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    expected = before(inputs())  # a loop, which the other executor refuses
    after(inputs())
    function = after.get_concrete_function(inputs())
    options, attributes = function._told
    assert attributes[attributes.index("config_proto") + 1]  # Grappler is off
    with context.function_executor_type("SINGLE_THREADED_EXECUTOR"):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)
        assert "SINGLE_THREADED_EXECUTOR" in function._told[1]
    after(inputs())
    assert function._told == (options, attributes)


def test_threads_share_a_function(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    expected = [before(inputs(seed=seed)) for seed in range(4)]
    wrong: list[int] = []

    def call(seed: int) -> None:
        results = [after(inputs(seed=seed)) for _ in range(50)]
        wrong.extend(seed for result in results if not np.allclose(result, expected[seed], atol=1e-6))

    threads = [threading.Thread(target=call, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_handles_keep_what_they_refer_to(asked: list[Any]) -> None:
    """TensorFlow notes with a list what its items are."""

    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.EmptyTensorList(element_shape=tf.shape(x), max_num_elements=1, element_dtype=x.dtype)

    function = restored(run, tf.TensorSpec([2]))
    assert function(tf.zeros(2)).dtype == tf.variant
    assert len(asked) == 1


def test_a_function_without_results_runs(asked: list[Any]) -> None:
    seen = tf.Variable(0.0)

    def run(x: tf.Tensor) -> None:
        seen.assign_add(tf.reduce_sum(x))

    assert restored(run, tf.TensorSpec([2]))(tf.ones(2)) is None
    assert seen.numpy() == 2
    assert not asked


def test_captures_that_are_made_anew_are_made_in_each_call(asked: list[Any]) -> None:
    numbers = iter((1.0, 2.0))

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        return x + graph.capture_call_time_value(lambda: tf.constant(next(numbers)), tf.TensorSpec([]))  # type: ignore[attr-defined]

    concrete = run.get_concrete_function(tf.TensorSpec([]))
    captured = capture_concrete(concrete)
    function = restore_concrete(concrete, captured, captured.graph_def)
    assert [float(function(tf.constant(10.0))) for _ in range(2)] == [11, 12]
    assert not asked


def test_who_asks_for_a_tape_makes_no_capture_anew() -> None:
    """What each call makes, as the keys of collective ops, may be made only once in a call."""
    numbers = iter(range(1, 9))

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        return x + graph.capture_call_time_value(lambda: tf.constant(float(next(numbers))), tf.TensorSpec([]))  # type: ignore[attr-defined]

    concrete, x = run.get_concrete_function(tf.TensorSpec([])), tf.constant(10.0)
    with tf.GradientTape() as tape:
        assert not is_recorded(concrete, (x,), {})
        assert float(call_traced(concrete, (x,), {})) == 11
        tape.watch(x)
        assert is_recorded(concrete, (x,), {})
        assert float(call_traced(concrete, (x,), {})) == 12


def test_captures_that_are_replaced_between_calls_are_noticed() -> None:
    given, numbers = tf.constant(1.0), iter((2.0, 3.0))
    concrete = tf.function(lambda x: x + given).get_concrete_function(tf.TensorSpec([]))
    captured = capture_concrete(concrete)
    function = restore_concrete(concrete, captured, captured.graph_def)
    x = tf.constant(10.0)
    assert float(call_traced(function, (x,), {})) == 11
    function.set_external_captures([tf.constant(5.0)])
    assert float(call_traced(function, (x,), {})) == 15
    function.set_external_captures([lambda: tf.constant(next(numbers))])
    assert [float(call_traced(function, (x,), {})) for _ in range(2)] == [12, 13]


def test_calls_are_told_apart_by_what_traces_are() -> None:
    x = tf.zeros((2, 3))
    plain = call_key((x,), {})
    assert plain == call_key((tf.ones((2, 3)),), {})
    assert plain != call_key((tf.zeros((2, 4)),), {})
    assert plain != call_key((tf.zeros((2, 3), tf.int32),), {})
    assert plain != call_key((x, x), {})
    for args, kwargs in (((x,), {"y": 1}), ((1,), {}), ((tf.Variable(x).handle,), {}), ((np.zeros(3),), {})):
        assert call_key(args, kwargs) is None
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        scope = call_key((x,), {})
    replica = strategy.run(lambda: call_key((x,), {}))
    assert scope is not None
    assert len({plain, scope, replica}) == 3
