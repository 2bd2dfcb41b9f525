"""Gradients of recurrent cells against central differences in float64, and the shape that they take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.errors import CellError
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.expr.table_entry import Array
from custom_ops.recurrent import cells
from custom_ops.recurrent.adjoint import derivatives
from custom_ops.recurrent.cell import Cell, Product, RowSum, Sequence
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.differentiate import BackwardInput, Column, Gradient, Request, WeightGradient, differentiate
from custom_ops.recurrent.recompute import cheapest
from custom_ops.recurrent.reference import run
from tests import addons_cells
from tests.gradient_reference import Gradients, gradients
from tests.recurrent_cells import Arguments, arguments, library, random_cells
from tests.tiers import examples

UNITS, TIME, BATCH = 3, 3, 2


class Problem:
    """A cell, arguments, and a random linear function of what it puts out."""

    def __init__(self, cell: Cell, masked: bool = False, reverse: bool = False, request: Request | None = None) -> None:
        request = request or Request()
        self.cell, self.reverse = cell, reverse
        self.gradient = differentiate(cell, request)
        self.arguments = arguments(cell, UNITS, TIME, BATCH, seed=1, masked=masked)
        outputs, finals = run(cell, UNITS, *self.arguments, reverse)
        random = np.random.default_rng(2)
        self.outputs = [random.normal(size=output.shape) for output in outputs]
        self.finals = [random.normal(size=final.shape) for final in finals]
        for arrays, given_ in ((self.outputs, request.outputs), (self.finals, request.finals)):
            for index, array in enumerate(arrays):
                np.multiply(array, given_ is None or index in given_, out=array)

    def value(self, changed: Arguments) -> float:
        outputs, finals = run(self.cell, UNITS, *changed, self.reverse)
        pairs = zip((*outputs, *finals), (*self.outputs, *self.finals), strict=True)
        return sum(float((result * weight).sum()) for result, weight in pairs)

    def gradients(self) -> Gradients:
        arguments_ = self.arguments
        return gradients(self.gradient, UNITS, *arguments_, self.outputs, self.finals, reverse=self.reverse)

    def check(self, kinds: tuple[str, ...] = Arguments._fields) -> None:
        """Along one random direction in each tensor."""
        found = self.gradients()
        random = np.random.default_rng(3)
        for kind in kinds:
            for index, array in enumerate(getattr(self.arguments, kind)):
                direction = random.normal(size=array.shape)
                expected = self.slope(kind, index, direction)
                analytic = (getattr(found, kind)[index] * direction).sum()
                assert analytic == pytest.approx(expected, rel=1e-5, abs=1e-6), f"{kind} {index}"

    def slope(self, kind: str, index: int, direction: Array, step: float = 1e-5) -> float:
        def at(distance: float) -> float:
            tensors = list(getattr(self.arguments, kind))
            tensors[index] = tensors[index] + distance * direction
            return self.value(self.arguments._replace(**{kind: tensors}))

        return (at(step) - at(-step)) / (2 * step)


def is_masked(name: str) -> bool:
    return name.endswith(("masked", "zeroed"))


@pytest.mark.parametrize("name", library(UNITS))
def test_every_cell_of_the_library(name: str) -> None:
    problem = Problem(library(UNITS)[name], masked=is_masked(name))
    problem.check(("sequences", "vectors", "matrices", "states"))


@given(random_cells(), st.booleans())
@settings(max_examples=examples(60))
def test_any_cell(cell: Cell, reverse: bool) -> None:
    Problem(cell, reverse=reverse).check()


@given(random_cells(), st.data())
@settings(max_examples=examples(25))
def test_only_what_is_asked_for(cell: Cell, data: st.DataObject) -> None:
    """What is not wanted is zero, the rest as if all were."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else ())

    counts = {
        "sequences": len(cell.sequences),
        "invariants": len(cell.invariants),
        "vectors": len(cell.vectors),
        "matrices": len(cell.matrices),
    }
    wanted = {kind: some(count) for kind, count in counts.items()}
    ends = {"outputs": some(len(cell.outputs)), "finals": some(len(cell.states))}
    all_, chosen = (Problem(cell, request=Request(**ends, **kinds)).gradients() for kinds in ({}, wanted))
    for kind, indices in wanted.items():
        for index, (array, complete) in enumerate(zip(getattr(chosen, kind), getattr(all_, kind), strict=True)):
            np.testing.assert_allclose(array, complete if index in indices else 0 * complete, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(chosen.states, all_.states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["gru", "peephole_lstm", "layer_norm_simple_rnn"])
def test_a_gradient_is_a_cell_that_can_be_differentiated(name: str) -> None:
    Problem(differentiate(library(UNITS)[name]).backward).check()


POINTS = {1: [(x,) for x in (-1.3, -0.6, 0.4, 0.6, 1.9)], 2: [(1.0, 2.0), (0.7, -0.3), (-1.5, -0.5), (2.0, 1.5)]}
POINTS[3] = [(1.0, 2.0, 3.0), (0.0, 2.0, 3.0)]


@pytest.mark.parametrize("op", FLOAT_OPS)
def test_every_elementwise_op(op: str) -> None:
    """At those of the points that are in its domain, and where it does not jump."""
    points = [point for point in POINTS[FLOAT_OPS[op].arity] if np.isfinite(evaluate(op, np.array(point)))]
    points = [point for point in points if op != "floor_mod" or point[0] % point[1]]
    assert len(points) > 1
    for values in map(np.array, points):
        for argument in range(len(values)):
            step = np.eye(len(values))[argument] * 1e-6
            difference = (evaluate(op, values + step) - evaluate(op, values - step)) / 2e-6
            smooth = op != "stop_gradient" and (op != "select" or argument > 0)
            assert derivative(op, values)[argument] == pytest.approx(difference if smooth else 0, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("relu", [0.0], [0]),
        ("relu", [np.nan], [0]),
        ("absolute", [0.0], [0]),
        ("elu", [0.0], [1]),
        ("maximum", [2.0, 2.0], [1, 0]),
        ("minimum", [2.0, 2.0], [1, 0]),
        ("maximum", [np.nan, 1.0], [0, 1]),
        ("power", [0.0, 2.0], [0, 0]),
        ("power", [-2.0, 2.0], [-4, 0]),
        ("select", [np.nan, np.nan, 1.0], [0, 1, 0]),
    ],
)
def test_where_there_is_no_derivative_it_is_tensorflows(op: str, values: list[float], expected: list[float]) -> None:
    assert derivative(op, np.array(values)) == expected


def on_leaves(op: str, pick: Callable[[CellBuilder, list[int]], list[int]], values: Array) -> list[float]:
    builder = CellBuilder()
    places = list(builder.sequence(len(values)))
    results = pick(builder, places)
    cell = builder.build([], [[place] for place in results])
    outputs, _ = run(cell, 1, [values[None, None, :]], [], [], [], [])
    return [float(output.squeeze()) for output in outputs]


def evaluate(op: str, values: Array) -> float:
    return on_leaves(op, lambda builder, places: [builder.apply(op, *places)], values)[0]


def derivative(op: str, values: Array) -> list[float]:
    def pick(builder: CellBuilder, places: list[int]) -> list[int]:
        one = builder.apply("select", builder.constant(0), places[0], builder.constant(1))
        parts = derivatives(builder, op, one, builder.apply(op, *places), places)
        zero = builder.apply("subtract", one, one)
        return [zero if part is None else part for part in parts]

    return on_leaves(op, pick, values)


def count(cell: Cell, kind: type) -> int:
    return sum(isinstance(node, kind) for node in cell.nodes)


def test_lstm_is_one_product_a_step_and_one_gemm() -> None:
    """What moves is what cuDNN moves: four activated gates and c; the gates' gradients come out once."""
    gradient = differentiate(cells.lstm())
    assert gradient.backward.matrices == ((1, 4),)
    assert count(gradient.backward, Product) == 1
    assert gradient.backward.blocks == 4
    assert [len(output) for output in gradient.forward.outputs] == [1, 1, 5]
    assert gradient.sequences == (BackwardInput("gradient", 0), BackwardInput("output", 2))
    assert [len(output) for output in gradient.backward.outputs] == [4]
    assert gradient.sequence_gradients == (tuple(Column(0, gate) for gate in range(4)),)
    assert gradient.weight_gradients == (WeightGradient(0, 0, 0, 4, False, Column(1), Column(0)),)
    assert gradient.states == gradient.state_gradients == (0, 1)


def test_canonical_gru_keeps_both_operands() -> None:
    gradient = differentiate(cells.gru(reset_after=False))
    assert [weight.blocks for weight in gradient.weight_gradients] == [2, 1]
    assert [weight.adjoint for weight in gradient.weight_gradients] == [Column(0, 0), Column(0, 2)]
    assert max(gradient.backward.stages) == 2


def test_gru_sums_its_recurrent_bias_in_states() -> None:
    gradient = differentiate(cells.gru())
    assert gradient.vector_gradients == ((1, 2, 3),)
    assert gradient.states == (0, None, None, None)
    # the recurrent products' gradients differ from the input's in one column, so they are a separate tensor
    assert [len(output) for output in gradient.backward.outputs] == [3, 3]
    assert [weight.blocks for weight in gradient.weight_gradients] == [3]


def test_a_mask_has_no_gradient() -> None:
    for mask in ("repeat", "zero"):
        assert differentiate(cells.lstm(mask=mask)).sequence_gradients[1] == (None,)  # type: ignore[arg-type]


def test_a_state_that_nothing_depends_on_is_not_carried_back() -> None:
    """The repeated output of a masked cell, if only final states matter."""
    gradient = differentiate(cells.gru(mask="repeat"), Request(outputs=(), finals=(0,)))
    assert gradient.state_gradients == (0, None)
    assert all(source.kind != "gradient" for source in gradient.sequences)


def test_a_final_state_that_is_not_given_starts_from_zeros() -> None:
    assert differentiate(cells.lstm(), Request(finals=())).states == (None, None)


def test_a_linear_cell_reads_one_sequence_for_the_number_of_steps() -> None:
    gradient = differentiate(cells.simple_rnn("linear"), Request(outputs=(), matrices=()))
    assert gradient.sequences == (BackwardInput("sequence", 0),)
    assert count(gradient.backward, Sequence) == 0


def test_frozen_weights_store_no_operand() -> None:
    gradient = differentiate(cells.simple_rnn(), Request(matrices=()))
    assert gradient.forward.outputs == cells.simple_rnn().outputs
    assert gradient.weight_gradients == ()


def test_a_scalar_that_is_broadcast_counts_every_unit() -> None:
    """d/dm of sum(units * tanh(m + 0 * h)): the adjoint is a scalar, added once for each unit."""
    builder = CellBuilder()
    (m,), (x,) = builder.sequence(0), builder.sequence(1)
    h = builder.state()
    total = builder.row_sum(builder.apply("add", x, m))
    cell = builder.build([builder.apply("multiply", h, total)], [[total]])
    problem = Problem(cell, request=Request(finals=()))
    problem.check()
    np.testing.assert_allclose(problem.gradients().sequences[0], UNITS * problem.outputs[0])


def test_wide_results_share_row_sums() -> None:
    """A scalar's uses are summed over units together."""
    gradient = differentiate(addons_cells.layer_norm_simple_rnn(UNITS))
    assert count(gradient.backward, RowSum) == 2
    assert max(gradient.backward.stages) == 3


def test_the_cheapest_cut_prefers_what_is_stored() -> None:
    builder = CellBuilder()
    (x,) = builder.sequence(1)
    h = builder.state()
    y = builder.apply("tanh", builder.apply("add", x, h))
    z = builder.apply("exp", y)
    cell = builder.build([z], [[z]])
    h, y, z = 1, 3, 4
    assert cheapest(cell, {y, z}, set()) == {y}
    assert cheapest(cell, {z}, set()) == {z}
    assert cheapest(cell, {z}, {y}) == {y}
    assert cheapest(cell, {0, y}, {h}) == {0, h}


def test_an_empty_sequence_hands_the_gradient_through() -> None:
    cell = cells.lstm()
    given_ = arguments(cell, UNITS, 0, BATCH)
    finals = [np.ones((BATCH, UNITS)), np.full((BATCH, UNITS), 2.0)]
    found = gradients(differentiate(cell), UNITS, *given_, [np.zeros((0, BATCH, UNITS))], finals)
    np.testing.assert_array_equal(found.states, finals)
    np.testing.assert_array_equal(found.matrices, 0)


def test_errors_say_what_is_missing() -> None:
    builder = CellBuilder()
    (x,) = builder.sequence(1)
    with pytest.raises(CellError, match="a recurrence has sequences and states"):
        differentiate(builder.build([], [[x]]))
    cell = cells.simple_rnn()
    with pytest.raises(CellError, match=r"the request names matrix \(1,\); the cell has 1"):
        differentiate(cell, Request(matrices=(1,)))
    gradient: Gradient = differentiate(cell)
    with pytest.raises(CellError, match="with a Request that does not name it"):
        gradients(gradient, UNITS, *arguments(cell, UNITS, TIME, BATCH), [None], [np.zeros((BATCH, UNITS))])


def test_a_value_that_many_others_are_recomputed_from_is_written_once() -> None:
    builder = CellBuilder()
    (item,) = builder.sequence(1)
    value = builder.state()
    for _ in range(60):  # 2 to the power of 60 ways from the last to the first
        value = builder.apply("multiply", builder.apply("add", value, item), value)
    gradient = differentiate(builder.build([value], [[value]]))
    assert len(gradient.backward.nodes) < 1000
