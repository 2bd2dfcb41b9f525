"""tf_keras's updates of unique rows with known sizes: numbers are those of its ops, other code stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.known_sizes import MOST_NUMBERS
from tfmem.capture.unique_rows import with_all_rows

ROWS, SIZE = 13, 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tf_keras.optimizers.SGD(0.1),
    "SGD, momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "SGD, Nesterov": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: tf_keras.optimizers.Adam(0.01),
    "Adam, amsgrad": lambda: tf_keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: tf_keras.optimizers.AdamW(0.01),
    "Adamax": lambda: tf_keras.optimizers.Adamax(0.01),
    "Nadam": lambda: tf_keras.optimizers.Nadam(0.01),
    "Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: tf_keras.optimizers.Adadelta(0.5),
    "RMSprop": lambda: tf_keras.optimizers.RMSprop(0.01),
    "RMSprop, centered": lambda: tf_keras.optimizers.RMSprop(0.01, centered=True, momentum=0.9),
    "Lion": lambda: tf_keras.optimizers.Lion(0.01),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1),
    "legacy RMSprop": lambda: tf_keras.optimizers.legacy.RMSprop(0.01),
}
BATCHES = [[3, 0, 7, 11, 5], [3, 3, 5, 9, 3], [7, 7, 7, 7, 7], [12, 0, 12, 1, 0]]


class Embedded:
    """A table, read once or several times, and a Dense layer."""

    def __init__(self, optimizer: Callable[[], Any], uses: int = 1) -> None:
        tf_keras.utils.set_random_seed(0)
        self.embedding, self.dense = tf_keras.layers.Embedding(ROWS, SIZE), tf_keras.layers.Dense(1)
        self.embedding.build(None)
        self.dense.build([None, uses * SIZE])
        self.trained = [*self.embedding.trainable_variables, *self.dense.trainable_variables]
        self.table = self.trained[0]
        self.optimizer = optimizer()
        if hasattr(self.optimizer, "build"):
            self.optimizer.build(self.trained)
        self.optimizer.apply_gradients([(tf.zeros_like(each), each) for each in self.trained])
        self.step = tf.function(self.run)

    @property
    def variables(self) -> list[Any]:
        own = self.optimizer.variables
        return [*self.trained, *(own() if callable(own) else own)]

    def run(self, *ids: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.concat([self.embedding(each) for each in ids], 1)
            loss = tf.reduce_mean((self.dense(rows) - 1.0) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trained), self.trained, strict=True))
        return loss

    def held(self) -> list[Any]:
        return [each.numpy() for each in self.variables]


def captured_step(step: Any, *specs: Any) -> tuple[Any, Any]:
    """The concrete function, and what Grappler leaves of it."""
    concrete = step.get_concrete_function(*specs)
    return concrete, run_grappler(capture_concrete(concrete), device="GPU", nested=True)


def grappled(step: Any, *specs: Any) -> Any:
    """The step as Grappler leaves it for other sizes, too."""
    concrete, captured = captured_step(step, *specs)
    return restore_concrete(concrete, captured, captured.graph_def)


def written(step: Any, *specs: Any) -> tuple[Any, Counter[str]]:
    """The step with known sizes, and its ops."""
    concrete, captured = captured_step(step, *specs)
    found = with_all_rows(captured)
    return restore_concrete(concrete, found, found.graph_def), Counter(node.op for node in found.graph_def.node)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("batch", "dtype"), [(5, "int32"), (None, "int64")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_train_as_tf_keras_does(name: str, batch: int | None, dtype: str) -> None:
    plain, model = (Embedded(OPTIMIZERS[name]) for _ in range(2))
    spec = tf.TensorSpec([batch], dtype)
    as_given, (step, ops) = grappled(plain.step, spec), written(model.step, spec)
    assert "Unique" not in ops, ops
    for ids in BATCHES if batch else [*BATCHES, [4], [1, 2, 1]]:
        given = tf.constant(ids, dtype)
        np.testing.assert_allclose(step(given), as_given(given), 1e-6)
        for found, expected in zip(model.held(), plain.held(), strict=True):
            np.testing.assert_allclose(found, expected, 1e-6, 1e-7)


def test_a_table_that_is_read_several_times() -> None:
    plain, model = (Embedded(OPTIMIZERS["Adagrad"], uses=2) for _ in range(2))
    step, ops = written(model.step, *[tf.TensorSpec([None], tf.int32)] * 2)
    assert "Unique" not in ops, ops
    for ids in BATCHES:
        both = [tf.constant(each, tf.int32) for each in (ids, ids[::-1])]
        np.testing.assert_allclose(step(*both), plain.step(*both), 1e-6)
        for found, expected in zip(model.held(), plain.held(), strict=True):
            np.testing.assert_allclose(found, expected, 1e-6, 1e-7)


def updated(ids: Any, values: Any, table: Any, sums: Any, change: str = "") -> Any:
    """Rows as Adagrad updates them, with something else in it."""
    rows, place = tf.unique(ids)
    total = tf.math.unsorted_segment_sum(values, place, tf.shape(rows)[0])
    if change == "its rows":
        return rows
    if change == "its sums":
        table.scatter_add(tf.IndexedSlices(total, rows))
        return total
    if change == "a product with all of a batch":
        total = total * values
    if change == "a sum over rows":
        total = total * tf.reduce_sum(total, 0)
    if change == "its count":
        total = total / tf.cast(tf.shape(rows)[0], tf.float32)
    sums.scatter_add(tf.IndexedSlices(total * total + 1.0, rows))
    table.scatter_sub(tf.IndexedSlices(total / (tf.gather(sums, rows) + 2.0), rows))
    return tf.constant(0.0)


def tables(held: Any) -> tuple[tf.Variable, tf.Variable]:
    return tf.Variable(held), tf.Variable(held)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, -0.0])
@pytest.mark.parametrize("shape", [(7, 3), (5,), (4, 1, 3), (1, 2)])
def test_numbers_are_tensorflows_to_the_bit(shape: tuple[int, ...], number: float) -> None:
    """Rows without ids keep -0.0 and what is no number; sums have the order of the ids."""
    rng = np.random.default_rng(0)
    held = rng.normal(size=shape).astype(np.float32)
    held[0, ...] = number
    values = rng.normal(size=(9, *shape[1:])).astype(np.float32)
    values[2, ...] = number
    expected, found = tables(held), tables(held)
    specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, *shape[1:]])
    plain = tf.function(lambda ids, x: updated(ids, x, *expected))
    step, ops = written(tf.function(lambda ids, x: updated(ids, x, *found)), *specs)
    assert "Unique" not in ops
    assert ops["AssignAddVariableOp"] == ops["AssignSubVariableOp"] == 1
    for seed in range(3):
        ids = tf.constant(np.random.default_rng(seed).integers(shape[0] // 2, shape[0], 9))
        for run in (plain, step):
            run(ids, tf.constant(values))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
            np.testing.assert_array_equal(np.signbit(one.numpy()), np.signbit(other.numpy()))


def test_sums_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    held, values = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(300, 5)).astype(np.float32)
    table = tf.Variable(held)

    @tf.function
    def step(ids: Any, x: Any) -> None:
        rows, place = tf.unique(ids)
        table.scatter_add(tf.IndexedSlices(tf.math.unsorted_segment_sum(x, place, tf.shape(rows)[0]), rows))

    run, ops = written(step, tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 5]))
    assert "Unique" not in ops
    ids = rng.integers(0, 6, 300)
    run(tf.constant(ids), tf.constant(values))
    exact = held.astype(np.float64)
    np.add.at(exact, ids, values.astype(np.float64))
    np.testing.assert_allclose(table.numpy(), exact, 1e-5, 1e-5)


@pytest.mark.parametrize(
    "change", ["its rows", "its sums", "a product with all of a batch", "a sum over rows", "its count"]
)
def test_others_stay(change: str) -> None:
    held = tables(np.ones([ROWS, SIZE], np.float32))
    specs = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, SIZE])
    _, captured = captured_step(tf.function(lambda ids, x: updated(ids, x, *held, change)), *specs)
    assert with_all_rows(captured) is captured


def test_tables_of_unknown_of_many_and_of_different_rows_stay() -> None:
    specs = tf.TensorSpec([4], tf.int32), tf.TensorSpec([4, SIZE])
    many = tf.Variable(tf.zeros([MOST_NUMBERS // SIZE + 1, SIZE]))
    unknown = tf.Variable(tf.zeros([ROWS, SIZE]), shape=tf.TensorShape([None, SIZE]))
    one, other = (tf.Variable(tf.ones([rows, SIZE])) for rows in (ROWS, ROWS + 1))
    for held in ((many, many), (unknown, unknown), (one, other)):
        _, captured = captured_step(tf.function(lambda ids, x, held=held: updated(ids, x, *held)), *specs)
        assert with_all_rows(captured) is captured
