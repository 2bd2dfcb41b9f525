"""An optimised function has what a `tf.function` has: attributes, copies, and a place in a saved object."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem

NUMBER = tf.TensorSpec([])
Way = Callable[[Any], Any]


def as_given(function: Any) -> Any:
    return function


def within_a_budget(function: Any) -> Any:
    return tfmem.optimize(function, memory_budget="1GiB")


def made(way: Way) -> Any:
    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = tf.Variable(3.0)
            self.doubled = way(tf.function(lambda: 2.0 * self.total, input_signature=[]))

        @way
        @tf.function(input_signature=[NUMBER])
        def step(self, x: Any) -> Any:
            """Adds a number."""
            return self.total.assign_add(x)

        @way
        @tf.function(input_signature=[NUMBER])
        def never_called(self, x: Any) -> Any:
            return self.total * x

    module = Module()
    module.step(tf.constant(1.0))
    return module


WAYS = pytest.mark.parametrize("way", [as_given, tfmem.optimize, within_a_budget])


@WAYS
def test_an_object_that_holds_one_is_saved_with_it(way: Way, tmp_path: Path) -> None:
    module = made(way)
    tf.saved_model.save(module, str(tmp_path), signatures=module.step.get_concrete_function())
    found = tf.saved_model.load(str(tmp_path))
    results = found.step(tf.constant(2.0)), found.never_called(tf.constant(2.0)), found.doubled()
    assert [float(each) for each in results] == [6.0, 12.0, 12.0]
    assert list(found.signatures) == ["serving_default"]


@WAYS
def test_a_keras_model_that_has_one_is_saved_with_it(way: Way, tmp_path: Path) -> None:
    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        @way
        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def scores(self, x: Any) -> Any:
            return tf.nn.softmax(self(x))

    model, x = Model(), tf.ones([4, 3])
    expected = model.scores(x)
    model.save(tmp_path / "model.keras")
    tf.saved_model.save(model, str(tmp_path / "saved"))
    found = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_array_equal(found.scores(x), expected)


@WAYS
def test_a_checkpoint_holds_its_variables_and_nothing_else(way: Way, tmp_path: Path) -> None:
    checkpoint = tf.train.Checkpoint(made(way))
    path = checkpoint.save(str(tmp_path / "kept"))
    names = {name.partition("/")[0] for name, _ in tf.train.list_variables(path)}
    assert names == {"total", "save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH"}
    plain = tf.train.Checkpoint(made(as_given))
    plain.restore(path).assert_consumed()
    checkpoint.restore(plain.save(str(tmp_path / "plain"))).assert_consumed()


@WAYS
def test_its_attributes_are_those_of_the_function(way: Way) -> None:
    module = made(way)
    assert module.step.input_signature == (NUMBER,)
    assert (module.step.__name__, module.step.__doc__) == ("step", "Adds a number.")
    assert module.step.experimental_get_tracing_count() >= 1
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.step.nothing


@WAYS
def test_a_copy_computes_the_same(way: Way) -> None:
    function = way(tf.function(lambda x: tf.tanh(x) * 2.0))
    x = tf.constant([0.5, -1.0])
    np.testing.assert_array_equal(copy.deepcopy(function)(x), function(x))


class Counted(tf.Module):
    """An object whose class another process finds by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.total = tf.Variable(3.0)

    @tfmem.optimize
    @tf.function
    def step(self, x: Any) -> Any:
        return self.total.assign_add(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_copy_of_an_object_has_a_method_of_its_variables(copied: Way) -> None:
    module = Counted()
    module.step(tf.constant(1.0))
    other = copied(module)
    assert float(other.step(tf.constant(2.0))) == 6.0
    assert float(module.total) == 4.0
    again = copied(other)
    assert float(again.step(tf.constant(2.0))) == 8.0


@WAYS
def test_an_object_that_holds_one_is_freed(way: Way) -> None:
    module = made(way)
    held = weakref.ref(module)
    del module
    gc.collect()
    assert held() is None
