"""The NumPy definition of a recurrence against formulas written out, and on values that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from custom_ops.errors import CellError
from custom_ops.expr.table_entry import Array
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.reference import run
from tests import addons_cells
from tests.recurrent_cells import arguments, random_cells
from tests.tiers import examples

UNITS, TIME, BATCH = 5, 4, 3


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def test_lstm() -> None:
    given_ = arguments(cells.lstm(), UNITS, TIME, BATCH)
    (outputs,), finals = run(cells.lstm(), UNITS, *given_)
    (h, c), (weights,) = given_.states, given_.matrices
    for gates, output in zip(given_.sequences[0], outputs, strict=True):
        i, f, g, o = np.split(gates + h @ weights, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        np.testing.assert_allclose(output, h, rtol=1e-12)
    np.testing.assert_allclose(finals, [h, c], rtol=1e-12)


@pytest.mark.parametrize("reset_after", [True, False])
def test_gru(reset_after: bool) -> None:
    cell = cells.gru(reset_after)
    given_ = arguments(cell, UNITS, TIME, BATCH)
    (outputs,), (final,) = run(cell, UNITS, *given_)
    (h,), (weights,) = given_.states, given_.matrices
    for gates, output in zip(given_.sequences[0], outputs, strict=True):
        x_z, x_r, x_h = np.split(gates, 3, axis=1)
        w_z, w_r, w_h = np.split(weights, 3, axis=1)
        b_z, b_r, b_h = np.split(given_.vectors[0], 3) if reset_after else (0, 0, 0)
        z, r = sigmoid(x_z + h @ w_z + b_z), sigmoid(x_r + h @ w_r + b_r)
        inner = r * (h @ w_h + b_h) if reset_after else (r * h) @ w_h
        h = z * h + (1 - z) * np.tanh(x_h + inner)
        np.testing.assert_allclose(output, h, rtol=1e-12)
    np.testing.assert_allclose(final, h, rtol=1e-12)


def test_layer_norm_is_over_all_gates_together() -> None:
    cell = addons_cells.layer_norm_simple_rnn(UNITS, epsilon=1e-3)
    given_ = arguments(cell, UNITS, 1, BATCH)
    (outputs,), _ = run(cell, UNITS, *given_)
    net = given_.sequences[0][0] + given_.states[0] @ given_.matrices[0]
    normal = (net - net.mean(1, keepdims=True)) / np.sqrt(net.var(1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(outputs[0], np.tanh(normal * given_.vectors[0] + given_.vectors[1]), rtol=1e-10)


@given(random_cells())
@settings(max_examples=examples(20))
def test_reverse_is_the_same_walk_over_reversed_data(cell: Cell) -> None:
    given_ = arguments(cell, UNITS, TIME, BATCH)
    outputs, finals = run(cell, UNITS, *given_, reverse=True)
    turned = given_._replace(sequences=[sequence[::-1] for sequence in given_.sequences])
    expected, expected_finals = run(cell, UNITS, *turned)
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output, other[::-1])
    np.testing.assert_array_equal(finals, expected_finals)


def test_a_masked_step_keeps_states_and_repeats_the_output() -> None:
    cell = cells.gru(mask="repeat")
    given_ = arguments(cell, UNITS, TIME, BATCH)
    given_.sequences[1][:] = np.array([0, 1, 0, 1])[:, None]
    given_.states[1][:] = 0
    (outputs,), (h, _) = run(cell, UNITS, *given_)
    np.testing.assert_array_equal(outputs[0], 0)
    np.testing.assert_array_equal(outputs[2], outputs[1])
    np.testing.assert_array_equal(h, outputs[3])
    zeroed, _ = run(cells.gru(mask="zero"), UNITS, *given_._replace(states=given_.states[:1]))
    np.testing.assert_array_equal(zeroed[0], outputs * given_.sequences[1][:, :, None])


def test_a_masked_step_lets_no_nan_through() -> None:
    cell = cells.lstm(mask="zero")
    given_ = arguments(cell, UNITS, TIME, BATCH)
    given_.sequences[1][:] = 1
    given_.sequences[0][2, 1] = np.nan
    (outputs,), _ = run(cell, UNITS, *given_)
    assert np.isnan(outputs[2:, 1]).all()
    assert np.isfinite(outputs[:, [0, 2]]).all()
    given_.sequences[1][2, 1] = 0
    assert np.isfinite(run(cell, UNITS, *given_)[0][0]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arithmetic_is_in_the_dtype_given(dtype: type) -> None:
    cell = addons_cells.layer_norm_lstm(UNITS)
    outputs, finals = run(cell, UNITS, *arguments(cell, UNITS, TIME, BATCH, dtype=dtype))
    assert {array.dtype for array in (*outputs, *finals)} == {np.dtype(dtype)}


@pytest.mark.parametrize(("time", "batch"), [(0, 3), (3, 0), (1, 1)])
def test_empty_and_single(time: int, batch: int) -> None:
    given_ = arguments(cells.lstm(), 1, time, batch)
    (outputs,), finals = run(cells.lstm(), 1, *given_)
    assert outputs.shape == (time, batch, 1)
    if not time:
        np.testing.assert_array_equal(finals, given_.states)


def test_scalars_and_columns_in_and_out() -> None:
    builder = CellBuilder()
    (x,), (scale,) = builder.sequence(1), builder.sequence(0)
    h = builder.state()
    new = builder.apply("add", builder.apply("multiply", x, scale), h)
    cell = builder.build([new], [[h, new], [builder.row_sum(new)]])
    given_ = arguments(cell, UNITS, TIME, BATCH)
    (both, total), _ = run(cell, UNITS, *given_)
    expected = given_.states[0] + np.cumsum(given_.sequences[0] * given_.sequences[1][:, :, None], axis=0)
    np.testing.assert_allclose(both[:, :, UNITS:], expected)
    np.testing.assert_allclose(both[1:, :, :UNITS], expected[:-1])
    np.testing.assert_allclose(total, expected.sum(2))


def test_arrays_that_do_not_fit_are_refused() -> None:
    given_ = arguments(cells.lstm(), UNITS, TIME, BATCH)
    with pytest.raises(CellError, match=r"expected matrix shapes \[\(6, 24\)\], found \[\(5, 20\)\]"):
        run(cells.lstm(), 6, *given_._replace(sequences=[np.zeros((TIME, BATCH, 24))]))
    with pytest.raises(CellError, match="expected state shapes"):
        run(cells.lstm(), UNITS, *given_._replace(states=given_.states[:1]))
    with pytest.raises(CellError, match="reads no sequence"):
        run(cells.lstm(), UNITS, *given_._replace(sequences=[]))
