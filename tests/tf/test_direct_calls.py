"""Plain calls of optimised functions go straight to their graph; all others as TensorFlow's do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation, context

import tfmem
from tfmem import optimized
from tfmem.capture.direct import direct_call, plain_key
from tfmem.capture.function import capture_concrete, restore_concrete

STEPS, WIDTH, UNITS = 4, 3, 5


@pytest.fixture
def layer() -> keras.layers.Layer:
    layer = keras.layers.GRU(UNITS, return_sequences=True)
    layer.build((None, STEPS, WIDTH))
    return layer


def inputs(batch: int = 2, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal((batch, STEPS, WIDTH), (seed, 1))


def optimize(run: Callable[..., Any]) -> tuple[Any, Any]:
    """A function before and after; the layer in it is swapped, and calls with a batch of 2 are direct."""
    before = tf.function(run)
    after = tfmem.optimize(before)
    after(inputs())
    assert len(after._direct) == 1
    return before, after


def refuse(*_: Any) -> None:
    raise AssertionError("looked for a trace")


def restored(run: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    concrete = tf.function(run).get_concrete_function(*specs)
    captured = capture_concrete(concrete)
    return restore_concrete(concrete, captured, captured.graph_def)


def test_a_second_call_looks_for_nothing(layer: keras.layers.Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = optimize(layer)
    monkeypatch.setattr(optimized.OptimizedFunction, "_step_of", refuse)
    for seed in range(3):
        np.testing.assert_allclose(after(inputs(seed=seed)), before(inputs(seed=seed)), atol=1e-6)
    with pytest.raises(AssertionError, match="looked for"):
        after(inputs(batch=3))


def test_each_shape_goes_to_its_trace(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    for _ in range(2):
        for batch in (1, 2, 3):
            np.testing.assert_allclose(after(inputs(batch)), before(inputs(batch)), atol=1e-6)
    assert len(after._direct) == 3


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


def test_a_call_that_is_not_plain_takes_the_other_way(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    expected = before(inputs())
    with tf.GradientTape(watch_accessed_variables=False):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)
    with cancellation.CancellationManagerContext(cancellation.CancellationManager()):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)
    np.testing.assert_allclose(after(inputs().numpy()), expected, atol=1e-6)
    np.testing.assert_allclose(tf.function(after)(inputs()), expected, atol=1e-6)
    assert len(after._direct) == 1


def test_options_of_a_call_are_followed(layer: keras.layers.Layer) -> None:
    before, after = optimize(layer)
    expected = before(inputs())  # a loop, which the other executor refuses
    after(inputs())
    (direct,) = after._direct.values()
    options, attributes = direct._known
    assert attributes[attributes.index("config_proto") + 1]  # Grappler is off
    with context.function_executor_type("SINGLE_THREADED_EXECUTOR"):
        np.testing.assert_allclose(after(inputs()), expected, atol=1e-6)
        assert "SINGLE_THREADED_EXECUTOR" in direct._known[1]
    after(inputs())
    assert direct._known == (options, attributes)


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


def test_known_calls_do_not_pile_up(layer: keras.layers.Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "MOST_KNOWN", 2)
    _, after = optimize(layer)
    for batch in range(1, 6):
        assert after(inputs(batch)).shape == (batch, STEPS, UNITS)
        assert len(after._direct) <= 2


@pytest.mark.parametrize(
    "argument", [1, np.zeros(2), (tf.zeros(2),), tf.Variable(1.0), tf.Variable(1.0).handle, tf.ragged.constant([[1]])]
)
def test_what_is_not_a_tensor_makes_a_call_not_plain(argument: Any) -> None:
    assert plain_key((tf.zeros(2),)) is not None
    assert plain_key((tf.zeros(2), argument)) is None


def test_a_plain_call_is_known_by_dtypes_and_shapes() -> None:
    a, b = tf.zeros([2, 3]), tf.ones([2, 3])
    assert plain_key((a, b)) == plain_key((b, a))
    others = [(a,), (a, b), (tf.zeros([3, 2]),), (tf.zeros([2, 3], tf.int32),), ()]
    assert len({plain_key(args) for args in others}) == 5


def test_nothing_is_plain_where_others_take_part() -> None:
    args = (tf.zeros(2),)
    with tf.GradientTape():
        assert plain_key(args) is None
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert plain_key(args) is None
    with cancellation.CancellationManagerContext(cancellation.CancellationManager()):
        assert plain_key(args) is None
    with tf.Graph().as_default():
        assert plain_key(args) is None
    assert plain_key(args) is not None


def test_what_is_called_as_before() -> None:
    """Not ours; captures that are made anew for each call; handles among the results."""
    spec = tf.TensorSpec([2])
    function = restored(lambda x: x + 1, spec)
    assert direct_call(function) is not None
    assert direct_call(tf.function(lambda x: x + 1).get_concrete_function(spec)) is None
    assert (
        direct_call(
            restored(
                lambda x: tf.raw_ops.EmptyTensorList(
                    element_shape=tf.shape(x), max_num_elements=1, element_dtype=tf.float32
                ),
                spec,
            )
        )
        is None
    )
    function._captured_inputs = [lambda: tf.zeros(2)]
    assert direct_call(function) is None


def test_a_function_without_results_runs() -> None:
    seen = tf.Variable(0.0)

    def run(x: tf.Tensor) -> None:
        seen.assign_add(tf.reduce_sum(x))

    direct = direct_call(restored(run, tf.TensorSpec([2])))
    assert direct is not None
    assert direct((tf.ones(2),)) is None
    assert seen.numpy() == 2
