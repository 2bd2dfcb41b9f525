"""What happens to a Keras model around `optimize`: attributes that are set later, a fit that fails, training before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "budget": {"memory_budget": "4GiB"},
    "fused": {
        "passes": ("recurrent", "fusion", "offload"),
        "observe": False,
        "fusion": tfmem.FusionOptions(tune="off"),
    },
}
X = np.random.default_rng(0).normal(size=(96, 16)).astype(np.float32)
Y = X[:, :3].copy()
Optimize = Callable[[Any], Any]


def model_of(library: Any = keras, jit_compile: bool = False, kind: Any = None) -> Any:
    library.utils.set_random_seed(1)
    given = library.Input((16,))
    hidden = library.layers.Dense(8, activation="tanh")(given)
    made = (kind or library.Model)(given, library.layers.Dense(3)(hidden))
    made.compile("adam", "mse", jit_compile=jit_compile)
    return made


def fitted(model: Any, epochs: int = 1) -> Any:
    return model.fit(X, Y, epochs=epochs, batch_size=32, verbose=0, shuffle=False).history


def same(run: Callable[[Optimize], Any], way: str) -> None:
    """That a program gives the same with `tfmem.optimize` as without."""
    expected = run(lambda model: model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfmem.TfmemWarning)
        found = run(lambda model: tfmem.optimize(model, cache_directory="", **WAYS[way]))
    tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, expected)


ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize(
    ("library", "first"),
    [(keras, "fit"), (keras, "evaluate"), (tf_keras, "evaluate")],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_call_whose_step_cannot_be_traced_leaves_nothing_behind(library: Any, first: str, way: str) -> None:
    """The next one has a batch of another shape, in a layer that reads it."""

    class Halves(library.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.reshape(x, [-1, 2, x.shape[1] // 2])[:, 0]

    def run(optimize: Optimize) -> Any:
        library.utils.set_random_seed(1)
        model = library.Sequential([Halves(), library.layers.Dense(3)])
        model.compile("sgd", "mse")
        model(X[:2])  # builds it
        model = optimize(model)
        with pytest.raises(ValueError, match=r"incompatible|axis -1"):
            getattr(model, first)(X[:, :6], Y, verbose=0)
        return fitted(model), fitted(model)

    same(run, way)


@ways
def test_a_step_that_is_set_before_the_first_fit(way: str) -> None:
    def run(optimize: Optimize) -> Any:
        model = optimize(model_of())
        given = model.train_step
        model.train_step = lambda data: {**given(data), "extra": tf.constant(7.0)}
        model.test_step = lambda data: {"extra": tf.constant(8.0)}
        return fitted(model), model.evaluate(X, Y, verbose=0, return_dict=True)

    same(run, way)


@ways
def test_a_model_that_is_to_run_eagerly_later(way: str) -> None:
    def run(optimize: Optimize) -> Any:
        calls = []

        class Counted(keras.Model):
            def train_step(self, data: Any) -> Any:
                calls.append(tf.executing_eagerly())
                return super().train_step(data)

        model = optimize(model_of(kind=Counted))
        model.run_eagerly = True
        history = fitted(model)
        assert calls == [True] * 3
        return history

    same(run, way)


def test_a_budget_that_eager_steps_do_not_keep_is_warned_of() -> None:
    model = tfmem.optimize(model_of(), memory_budget="4GiB")
    model.run_eagerly = True
    with pytest.warns(tfmem.TfmemWarning, match="its memory budget is not kept"):
        fitted(model)


@ways
def test_xla_that_is_turned_off_before_the_first_fit(way: str) -> None:
    """The step has an op for which XLA has no kernel."""

    class Strings(keras.Model):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            return {**logs, "length": tf.cast(tf.strings.length(tf.as_string(logs["loss"])) > 0, tf.float32)}

    def run(optimize: Optimize) -> Any:
        model = optimize(model_of(jit_compile=True, kind=Strings))
        model.jit_compile = False
        return fitted(model)

    same(run, way)


@ways
def test_a_model_that_was_trained_keeps_what_keras_traced(way: str) -> None:
    """Keras looks at `trainable` when it traces; it would trace again after `compile`."""

    def run(optimize: Optimize) -> Any:
        model = model_of()
        before = fitted(model)
        model.layers[1].trainable = False
        return before, fitted(optimize(optimize(model)), 2)

    same(run, way)


@ways
def test_logs_that_are_lists(way: str) -> None:
    class Listed(keras.Model):
        def train_step(self, data: Any) -> Any:
            loss = super().train_step(data)["loss"]
            return {"both": [loss, 2 * loss], "within": {"pair": (loss, [loss])}}

    seen: list[Any] = []

    def run(optimize: Optimize) -> Any:
        model = optimize(model_of(kind=Listed))
        logs = model.train_function(iter(tf.data.Dataset.from_tensors((X, Y)))) if model.train_function else None
        if logs is None:
            model.make_train_function()
            logs = model.train_function(iter(tf.data.Dataset.from_tensors((X, Y))))
        seen.append((type(logs["both"]), type(logs["within"]["pair"])))
        return logs

    same(run, way)
    assert seen[0] == seen[1]
