"""Forms of TfmemRecurrent's tensors: sequences that begin with the batch, and states without rows, which are zeros."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.load import Library, load
from custom_ops.recurrent import cells
from tests.recurrent_cells import library as cells_of
from tests.tf.recurrent_calls import recurrent
from tests.tf.recurrent_tensors import Tensors, in_dtype, tensors_of

CELLS = tuple(cells_of(1))
REVERSE = (False, True)


@pytest.fixture(name="library", scope="module")
def fixture_library() -> Library:
    return load()


def turned(tensor: tf.Tensor) -> tf.Tensor:
    """Time and batch exchanged."""
    return tf.transpose(tensor, [1, 0, *range(2, len(tensor.shape))])


def turned_sequences(given: Tensors) -> Tensors:
    return given._replace(sequences=[turned(tensor) for tensor in given.sequences])


def check_equal(found: list[tf.Tensor], expected: list[tf.Tensor]) -> None:
    for tensor, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.cast(tensor, tf.float64), tf.cast(wanted, tf.float64))


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32, tf.half], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", CELLS)
def test_sequences_that_begin_with_the_batch(library: Library, name: str, dtype: tf.DType) -> None:
    for units, time, batch in ((1, 3, 2), (33, 4, 3), (64, 6, 1), (70, 1, 17), (9, 0, 2), (9, 2, 0)):
        cell = cells_of(units)[name]
        given = in_dtype(tensors_of(cell, units, time, batch, directions=2), dtype)
        outputs, finals = recurrent(library.ops, cell, units, *given, reverse=REVERSE)
        found, ends = recurrent(library.ops, cell, units, *turned_sequences(given), reverse=REVERSE, batch_major=True)
        check_equal([*map(turned, found), *ends], [*outputs, *finals])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_their_gradients(library: Library, name: str, training: bool) -> None:
    cell, units = cells_of(7)[name], 7
    given = tensors_of(cell, units, 5, 3, directions=2).map(tf.constant)

    def gradients(given: Tensors, batch_major: bool) -> Tensors:
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs, finals = recurrent(
                library.ops, cell, units, *given, reverse=REVERSE, batch_major=batch_major, training=training
            )
            loss = tf.add_n([tf.reduce_sum(tf.sin(tensor)) for tensor in [*outputs, *finals]])
        return Tensors(*tape.gradient(loss, given, unconnected_gradients="zero"))

    found = turned_sequences(gradients(turned_sequences(given), True))
    for kind, wanted in zip(found, gradients(given, False), strict=True):
        for tensor, array in zip(kind, wanted, strict=True):
            np.testing.assert_allclose(tensor, array, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_state_without_rows_stands_for_zeros(library: Library, name: str, training: bool) -> None:
    cell, units = cells_of(33)[name], 33
    given = tensors_of(cell, units, 4, 3, directions=2).map(tf.constant)
    zeros = given._replace(states=[tf.zeros_like(state) for state in given.states])
    empty = given._replace(states=[state[:0] for state in given.states])
    results = []
    for each in (zeros, empty):
        with tf.GradientTape() as tape:
            tape.watch(each)
            outputs, finals = recurrent(library.ops, cell, units, *each, reverse=REVERSE, training=training)
            loss = tf.add_n([tf.reduce_sum(tf.sin(tensor)) for tensor in [*outputs, *finals]])
        gradient = Tensors(*tape.gradient(loss, each, unconnected_gradients="zero"))
        results.append([*outputs, *finals, *(tensor for kind in gradient[:4] for tensor in kind)])
        assert [tensor.shape for tensor in gradient.states] == [state.shape for state in each.states]
    check_equal(*results)


def test_some_states_are_zeros_and_some_are_not(library: Library) -> None:
    cell, units = cells.lstm(), 12
    given = tensors_of(cell, units, 4, 3).map(tf.constant)
    h, c = given.states
    expected = recurrent(library.ops, cell, units, *given._replace(states=[tf.zeros_like(h), c]))
    found = recurrent(library.ops, cell, units, *given._replace(states=[h[:0], c]))
    check_equal([*found[0], *found[1]], [*expected[0], *expected[1]])


@pytest.mark.parametrize("batch_major", [False, True])
@pytest.mark.parametrize("rows", [0, 3, None])
def test_shapes_are_known_before_it_runs(library: Library, batch_major: bool, rows: int | None) -> None:
    cell = cells.lstm(mask="zero")

    @tf.function
    def run(gates: tf.Tensor, mask: tf.Tensor, matrix: tf.Tensor, h: tf.Tensor) -> list[tf.Tensor]:
        given = [gates, mask], [], [], [matrix], [h, h]
        outputs, finals = recurrent(library.ops, cell, 8, *given, batch_major=batch_major)
        return [*outputs, *finals]

    unknown = tf.TensorSpec((None, None, 32)), tf.TensorSpec((None, 5) if batch_major else (5, None))
    traced = run.get_concrete_function(*unknown, tf.TensorSpec((8, 32)), tf.TensorSpec((rows, 8)))
    batch = rows or None
    output = (batch, 5, 8) if batch_major else (5, batch, 8)
    assert [tuple(tensor.shape) for tensor in traced.outputs] == [output, (batch, 8), (batch, 8)]


def test_what_does_not_fit_is_named(library: Library) -> None:
    cell, units = cells.lstm(), 12
    given = tensors_of(cell, units, 4, 3).map(tf.constant)
    short = given._replace(states=[given.states[0][:1], given.states[1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"states\[0\] .* has shape \[1,12\]; expected \[3,12\]"):
        recurrent(library.ops, cell, units, *short)
    narrow = given._replace(states=[tf.zeros((0, 11), tf.float64), given.states[1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"states\[0\] .* has shape \[0,11\]; expected \[3,12\]"):
        recurrent(library.ops, cell, units, *narrow)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected \[4,12\] \(time 3, batch 4"):
        recurrent(library.ops, cell, units, *given, batch_major=True)
