"""The cells of TensorFlow Addons against their formulas, one step in plain NumPy, and what all cells have in common.

LSTM and GRU are in `test_recurrent_reference.py`; the originals are run in tests/tf."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.expr.table_entry import Array
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell, State
from custom_ops.recurrent.reference import run
from tests import addons_cells
from tests.recurrent_cells import Arguments, arguments, library

UNITS, BATCH = 5, 3


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def normal(x: Array, epsilon: float = 1e-3) -> Array:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + epsilon)


def one_step(cell: Cell) -> tuple[Arguments, Array, list[Array]]:
    """Random arguments, the output, the states after it."""
    given = arguments(cell, UNITS, 1, BATCH)
    (outputs,), finals = run(cell, UNITS, *given)
    return given, outputs[0], finals


def gates(given: Arguments, state: int, count: int) -> list[tuple[Array, Array]]:
    """For each gate its part of the input and its product with the state."""
    product = given.states[state] @ given.matrices[0]
    return list(zip(np.split(given.sequences[0][0], count, 1), np.split(product, count, 1), strict=True))


def test_peephole_lstm() -> None:
    given, output, finals = one_step(addons_cells.peephole_lstm())
    (p_i, p_f, p_o), old_c = given.vectors, given.states[1]
    i, f, g, o = (x + r for x, r in gates(given, 0, 4))
    c = sigmoid(f + p_f * old_c) * old_c + sigmoid(i + p_i * old_c) * np.tanh(g)
    h = sigmoid(o + p_o * c) * np.tanh(c)
    np.testing.assert_allclose([output, *finals], [h, h, c], rtol=1e-12)


def test_layer_norm_lstm() -> None:
    given, output, finals = one_step(addons_cells.layer_norm_lstm(UNITS))
    gain, offset, c_gain, c_offset = given.vectors
    z = given.sequences[0][0] + normal(given.states[0] @ given.matrices[0]) * gain + offset
    i, f, g, o = np.split(z, 4, 1)
    c = normal(sigmoid(f) * given.states[1] + sigmoid(i) * np.tanh(g)) * c_gain + c_offset
    h = sigmoid(o) * np.tanh(c)
    np.testing.assert_allclose([output, *finals], [h, h, c], rtol=1e-10)


@pytest.mark.parametrize("use_bias", [False, True])
def test_nas(use_bias: bool) -> None:
    given, output, finals = one_step(addons_cells.nas(use_bias))
    bias = np.split(given.vectors[0], 8) if use_bias else np.zeros(8)
    (x0, r0), (x1, r1), (x2, r2), (x3, r3), (x4, r4), (x5, r5), (x6, r6), (x7, r7) = (
        (x, r + b) for (x, r), b in zip(gates(given, 1, 8), bias, strict=True)
    )
    left = np.tanh(np.tanh(sigmoid(x0 + r0) * relu(x1 + r1)) + given.states[0])
    c = left * np.tanh(sigmoid(x2 + r2) + relu(x3 * r3))
    right = np.tanh(np.tanh(np.tanh(x4 + r4) * sigmoid(x5 + r5)) + sigmoid(np.tanh(x6 + r6) + sigmoid(x7 + r7)))
    m = np.tanh(c * right)
    np.testing.assert_allclose([output, *finals], [m, c, m], rtol=1e-12)


@pytest.mark.parametrize("leaky", [1.0, 0.3])
def test_esn(leaky: float) -> None:
    given, output, finals = one_step(addons_cells.esn(leaky))
    ((x, r),) = gates(given, 0, 1)
    h = (1 - leaky) * given.states[0] + leaky * np.tanh(x + r)
    np.testing.assert_allclose([output, *finals], [h, h], rtol=1e-12)


def test_hard_sigmoid_is_that_of_keras_3() -> None:
    cell = cells.simple_rnn("hard_sigmoid")
    given = arguments(cell, UNITS, 1, BATCH)
    given.sequences[0][0] = np.linspace(-5, 5, BATCH * UNITS).reshape(BATCH, UNITS)
    given.states[0][:] = 0
    (output,), _ = run(cell, UNITS, *given)
    np.testing.assert_allclose(output[0], np.clip(given.sequences[0][0] / 6 + 0.5, 0, 1), atol=1e-15)


@pytest.mark.parametrize("name", library(UNITS))
def test_every_cell_puts_out_one_column(name: str) -> None:
    cell = library(UNITS)[name]
    assert [len(output) for output in cell.outputs] == [1]
    assert not cell.scalar[cell.outputs[0][0]]
    assert not isinstance(cell.nodes[cell.outputs[0][0]], State)


MASKED = {
    "lstm": cells.lstm, "gru": cells.gru, "simple_rnn": cells.simple_rnn, "peephole_lstm": addons_cells.peephole_lstm,
    "nas": addons_cells.nas, "esn": addons_cells.esn,
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_ones_changes_nothing(name: str) -> None:
    given = arguments(MASKED[name](), UNITS, 4, BATCH)
    (expected,), finals = run(MASKED[name](), UNITS, *given)
    masked = given._replace(sequences=[*given.sequences, np.ones((4, BATCH))])
    (zeroed,), zeroed_finals = run(MASKED[name](mask="zero"), UNITS, *masked)
    masked.states.append(np.zeros((BATCH, UNITS)))
    (repeated,), repeated_finals = run(MASKED[name](mask="repeat"), UNITS, *masked)
    np.testing.assert_array_equal([zeroed, repeated], [expected, expected])
    np.testing.assert_array_equal(zeroed_finals, finals)
    np.testing.assert_array_equal(repeated_finals, [*finals, expected[-1]])
