"""Keras's divisions of sparse gradients with known sizes: numbers are those of Keras's condition, other code stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmem.capture.branches import with_selects
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.divided_slices import CONDITIONS
from tfmem.capture.grappler import run_grappler
from tfmem.capture.known_sizes import LINE, all_rows, with_known_sizes

ROWS, SIZE = 12, 3
SIZED_BY_DATA = {"Where", "Unique", *CONDITIONS}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adagrad, nothing at first": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=0.0),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "RMSprop, centered": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "RMSprop, momentum": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
}
# ids of a batch: each once, some twice, and those of which Keras finds as many rows as ids where row 7 is bad
BATCHES = {
    "each once": [3, 0, 7, 11],
    "twice": [3, 3, 5, 9],
    "as many": [7, 2, 9, 4],
    "one": [7],
    "twice, and as many": [3, 3, 5, 6],
}


class Embedded:
    """A table, read once or several times, and a Dense layer."""

    def __init__(self, optimizer: Callable[[], Any], uses: int = 1, length: int = 0, dtype: str = "int32") -> None:
        keras.utils.set_random_seed(0)
        ids = [keras.Input([length] if length else [], dtype=dtype) for _ in range(uses)]
        table = keras.layers.Embedding(ROWS, SIZE)
        rows = [keras.layers.Flatten()(table(each)) if length else table(each) for each in ids]
        x = keras.layers.Concatenate()(rows) if uses > 1 else rows[0]
        self.model = keras.Model(ids, keras.layers.Dense(1)(x))
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self.table = self.model.trainable_variables[0]
        self.variables = [*self.model.trainable_variables, *self.optimizer.variables]
        self.step = tf.function(self.run)

    def run(self, *ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(list(ids)) - 1.0) ** 2)
        trained = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    def spoil(self, rows: list[int], number: float) -> None:
        """Give some rows of the optimizer's numbers a number that makes them bad."""
        for each in self.optimizer.variables:
            if tuple(each.shape) == (ROWS, SIZE):
                held = each.numpy()
                held[rows, 1] = number
                each.assign(held)

    def held(self) -> list[np.ndarray]:
        return [each.numpy() for each in self.variables]


def written(model: Embedded, *specs: Any) -> tuple[Any, Counter[str]]:
    """The step with known sizes, and its ops."""
    concrete = model.step.get_concrete_function(*specs)
    captured = capture_concrete(concrete)
    found = with_known_sizes(with_selects(run_grappler(captured, device="GPU", nested=True)))
    return restore_concrete(concrete, found, found.graph_def), Counter(node.op for node in found.graph_def.node)


def compare(plain: Embedded, model: Embedded, step: Any, batches: list[Any]) -> None:
    for ids in batches:
        given = [tf.constant(each) for each in ids]
        np.testing.assert_allclose(step(*given), plain.step(*given), 1e-5)
        for found, expected in zip(model.held(), plain.held(), strict=True):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("length", "batch", "dtype"), [(0, 4, "int32"), (0, None, "int64"), (2, 2, "int64"), (2, None, "int32")]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_train_as_keras_does(name: str, length: int, batch: int | None, dtype: str) -> None:
    plain, model = (Embedded(OPTIMIZERS[name], 1, length, dtype) for _ in range(2))
    step, ops = written(model, tf.TensorSpec([batch, length] if length else [batch], dtype))
    assert not SIZED_BY_DATA & ops.keys(), ops
    known = [np.array(ids, dtype) for ids in BATCHES.values() if batch is None or len(ids) == 4]
    known = [ids.reshape(-1, length) if length else ids for ids in known if not length or len(ids) == 4]
    if name.endswith("at first"):  # all rows are bad but those that were named; no id may be there twice on a CPU
        known = [known[0]]
    compare(plain, model, step, [[ids] for ids in known])


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "RMSprop, momentum", "Adadelta"])
def test_rows_that_are_no_numbers(name: str) -> None:
    """Keras's own numbers, also where these are those of another row."""
    plain, model = (Embedded(OPTIMIZERS[name]) for _ in range(2))
    step, _ = written(model, tf.TensorSpec([None], tf.int32))
    begun = plain.held()
    for number in (np.nan, np.inf):
        for ids in BATCHES.values():
            for each in (plain, model):
                for variable, held in zip(each.variables, begun, strict=True):
                    variable.assign(held)
                each.spoil([7], number)
            compare(plain, model, step, [[np.array(ids, np.int32)]])


def test_without_ids() -> None:
    plain, model = (Embedded(OPTIMIZERS["Adagrad"]) for _ in range(2))
    step, _ = written(model, tf.TensorSpec([None], tf.int32))
    compare(plain, model, step, [[np.array([], np.int32)], [np.array([1, 2], np.int32)]])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_that_is_read_several_times(name: str) -> None:
    plain, model = (Embedded(OPTIMIZERS[name], uses=2) for _ in range(2))
    step, ops = written(model, *[tf.TensorSpec([None], tf.int32)] * 2)
    assert not SIZED_BY_DATA & ops.keys(), ops
    pairs = [[[3, 0], [7, 11]], [[1, 2], [4, 5]]] if name.endswith("at first") else [[[3, 3], [7, 3]], [[1, 2], [2, 2]]]
    pairs = pairs[:1] if name.endswith("at first") else pairs
    compare(plain, model, step, [[np.array(each, np.int32) for each in pair] for pair in pairs])


def keras_rows(ids: Any, values: Any, divisor: Any, bad: Any) -> tuple[Any, Any]:
    """What Keras's code returns on a GPU, where a position out of range reads 0: which rows, and the quotients."""
    named = np.zeros(len(divisor), bool)
    named[ids] = True
    returned = np.flatnonzero(named | bad)
    if len(returned) == len(ids):
        return returned, values / divisor[returned]
    places = np.zeros(len(divisor), np.int64)
    np.add.at(places, ids, np.arange(1, len(ids) + 1))
    padded = np.zeros((places.max() + 2, values.shape[1]), values.dtype)
    padded[1 : len(values) + 1] = values
    return returned, padded[places[returned]] / divisor[returned]


@pytest.mark.parametrize("rows", [5, LINE, LINE + 1, LINE * LINE + 3])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_all_rows_are_those_of_keras(rows: int, count: int) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, rows, count) if seed % 2 else rng.permutation(rows)[:count]
        values, divisor = (rng.normal(size=(n, 2)).astype(np.float32) for n in (len(ids), rows))
        bad = rng.random(rows) < (0.1 if seed < 4 else 0.0)
        if seed >= 4:
            bad[ids[:1]] = True  # as many rows as ids
        divisor[bad] = np.nan if seed % 3 else 0.0
        returned, quotients = all_rows(*map(tf.constant, (ids, values, divisor, bad)))
        with np.errstate(all="ignore"):
            expected, numbers = keras_rows(ids, values, divisor, bad)
        np.testing.assert_array_equal(np.flatnonzero(returned), expected)
        np.testing.assert_array_equal(quotients.numpy()[expected], numbers)


def test_rows_that_are_added_to_stay_to_the_bit() -> None:
    """-0.0, where Adadelta names no row."""
    model = Embedded(OPTIMIZERS["Adadelta"])
    step, _ = written(model, tf.TensorSpec([None], tf.int32))
    model.table.assign(np.full((ROWS, SIZE), -0.0, np.float32))
    step(tf.constant([1, 2]))
    named = np.isin(np.arange(ROWS), [1, 2])
    assert np.signbit(model.table.numpy()[~named]).all()


def division(x: Any, ids: Any, divisor: Any, change: str = "") -> Any:
    """A condition like Keras's, with something else in it."""
    slices = tf.IndexedSlices(x, ids, tf.constant([ROWS, SIZE]))
    if change == "its rows":
        return keras.ops.divide(slices, divisor).indices
    if change == "its values":
        return keras.ops.divide(slices, divisor).values
    if change == "a product with all of a batch":
        quotients = keras.ops.divide(slices, divisor)
        return tf.convert_to_tensor(tf.IndexedSlices(quotients.values * x, quotients.indices, slices.dense_shape))
    bad = tf.reduce_any(tf.equal(divisor, 0.0), 1)
    rows = tf.squeeze(tf.where(bad), -1)
    found, where = tf.cond(
        tf.reduce_any(bad),
        lambda: (tf.gather(divisor, rows), rows),
        lambda: (x / tf.gather(divisor, ids), tf.cast(ids, tf.int64)),
    )
    return tf.math.unsorted_segment_sum(found, where, ROWS)


@pytest.mark.parametrize("change", ["its rows", "its values", "a product with all of a batch", "another computation"])
def test_others_stay(change: str) -> None:
    given = tf.ones([4, SIZE]), tf.constant([1, 2, 3, 4]), tf.ones([ROWS, SIZE])
    concrete = tf.function(lambda *x: division(*x, change=change)).get_concrete_function(*given)
    captured = with_selects(run_grappler(capture_concrete(concrete), device="GPU", nested=True))
    assert with_known_sizes(captured) is captured


def test_a_table_of_unknown_or_many_rows_stays() -> None:
    for rows in (None, (1 << 24) // SIZE + 1):
        specs = tf.TensorSpec([4, SIZE]), tf.TensorSpec([4], tf.int32), tf.TensorSpec([rows, SIZE])

        @tf.function
        def step(x: Any, ids: Any, divisor: Any) -> Any:
            slices = keras.ops.divide(tf.IndexedSlices(x, ids, tf.shape(divisor)), divisor)
            return tf.math.unsorted_segment_sum(slices.values, slices.indices, tf.shape(divisor)[0])

        concrete = step.get_concrete_function(*specs)
        captured = with_selects(run_grappler(capture_concrete(concrete), device="GPU", nested=True))
        assert with_known_sizes(captured) is captured
