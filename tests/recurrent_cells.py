"""Cells, random cells and random arguments for the tests of everything that runs cells."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from custom_ops.expr.table import FLOAT_OPS
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell, Product, Term
from custom_ops.recurrent.cell_builder import CellBuilder
from tests import addons_cells

Array = NDArray[Any]

# Of one argument, and smooth where `random_cells` uses them.
SMOOTH = ("tanh", "sigmoid", "softplus", "sin", "cos", "erf", "square", "negate", "elu")


def library(units: int) -> dict[str, Cell]:
    """Every cell of `custom_ops.recurrent.cells` and of Addons, some with masks and other activations."""
    return {
        "lstm": cells.lstm(),
        "lstm softplus hard_sigmoid": cells.lstm("softplus", "hard_sigmoid"),
        "lstm masked": cells.lstm(mask="repeat"),
        "lstm zeroed": cells.lstm(mask="zero"),
        "gru": cells.gru(),
        "gru masked": cells.gru(mask="repeat"),
        "gru canonical": cells.gru(reset_after=False),
        "gru canonical zeroed": cells.gru(reset_after=False, mask="zero"),
        "simple_rnn": cells.simple_rnn(),
        "simple_rnn linear": cells.simple_rnn("linear"),
        "simple_rnn masked": cells.simple_rnn("elu", mask="repeat"),
        "peephole_lstm": addons_cells.peephole_lstm(),
        "layer_norm_lstm": addons_cells.layer_norm_lstm(units),
        "layer_norm_simple_rnn": addons_cells.layer_norm_simple_rnn(units),
        "nas": addons_cells.nas(),
        "nas with bias, masked": addons_cells.nas(use_bias=True, mask="repeat"),
        "esn": addons_cells.esn(),
        "esn leaky": addons_cells.esn(leaky=0.3),
    }


def every_op() -> Cell:
    """A simple recurrence whose step puts out every elementwise op of its state and two inputs."""
    builder = CellBuilder()
    first, second = builder.sequence(2)
    state = builder.state()
    new = builder.apply("add", first, builder.product(state, builder.matrix(1, 1)))
    results = [builder.apply(name, *(new, second, state)[: op.arity]) for name, op in FLOAT_OPS.items()]
    return builder.build([builder.apply("tanh", new)], [[result] for result in results])


class Arguments(NamedTuple):
    """The arguments of `reference.run`, in its order."""

    sequences: list[Array]
    invariants: list[Array]
    vectors: list[Array]
    matrices: list[Array]
    states: list[Array]


def arguments(
    cell: Cell, units: int, time: int, batch: int, seed: int = 0, dtype: Any = np.float64, masked: bool = False
) -> Arguments:
    """Random arrays that fit `cell`; scalar sequences are masks of 0 and 1 if `masked`."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return np.asarray(random.normal(size=shape) * scale, dtype)

    def scalar() -> Array:
        return np.asarray(random.random((time, batch)) < 0.7, dtype) if masked else normal(time, batch)

    return Arguments(
        [normal(time, batch, n * units) if n else scalar() for n in cell.sequences],
        [normal(batch, n * units) for n in cell.invariants],
        [normal(n * units) for n in cell.vectors],
        [normal(r * units, c * units, scale=max(units, 1) ** -0.5) for r, c in cell.matrices],
        [normal(batch, units) for _ in cell.states],
    )


@st.composite
def random_cells(draw: st.DrawFn) -> Cell:
    """Cells without a name: products in up to two stages, row sums, every kind of leaf, most elementwise ops.

    Values stay moderate and each op in the domain where it is smooth, so that they can be differentiated numerically.
    """
    builder = CellBuilder()
    states = [builder.state() for _ in range(draw(st.integers(1, 3)))]
    blocks = draw(st.integers(1, 3))
    matrix = builder.matrix(2, blocks)
    wide = [*states, *builder.sequence(draw(st.integers(1, 2))), *builder.invariant(1), *builder.vector(2)]
    scalars = [*builder.sequence(0), builder.constant(draw(st.floats(-1, 1, width=32)))]

    def bounded(value: int) -> int:
        return builder.apply(draw(st.sampled_from(["tanh", "sigmoid", "sin", "erf"])), value)

    def positive(value: int) -> int:
        return builder.apply("add", builder.apply("softplus", value), builder.constant(0.5))

    for _ in range(draw(st.integers(3, 12))):
        a, b = draw(st.sampled_from(wide)), draw(st.sampled_from([*wide, *scalars]))
        kind = draw(st.sampled_from(["smooth", "join", "positive", "choose", "product", "row_sum", "bounded"]))
        if kind == "smooth":
            wide.append(builder.apply(draw(st.sampled_from(SMOOTH)), bounded(a)))
        elif kind == "join":
            wide.append(builder.apply(draw(st.sampled_from(["add", "subtract", "multiply"])), bounded(a), b))
        elif kind == "positive":
            op = draw(st.sampled_from(["sqrt", "reciprocal_sqrt", "reciprocal", "log", "log1p", "divide", "power"]))
            # the exponent or numerator may be anything bounded, the rest is positive
            order = (bounded(b), positive(a)) if op == "divide" else (positive(a), bounded(b))
            wide.append(builder.apply(op, *order[: 2 if op in ("divide", "power") else 1]))
        elif kind == "choose":
            op = draw(st.sampled_from(["maximum", "minimum", "select", "relu", "absolute", "exp", "expm1"]))
            if op == "select":
                wide.append(builder.apply(op, builder.apply("greater", a, b), draw(st.sampled_from(wide)), bounded(a)))
            else:
                wide.append(builder.apply(op, *((a, b) if op in ("maximum", "minimum") else (bounded(a),))))
        elif kind == "product":
            operands = draw(st.lists(st.sampled_from(wide), min_size=1, max_size=2))
            terms = [
                Term(operand, matrix, draw(st.integers(0, 1)), draw(st.integers(0, blocks - 1)), draw(st.booleans()))
                for operand in operands
            ]
            wide.append(builder.add(Product(tuple(terms))))
        elif kind == "row_sum":
            scalars.append(builder.apply("tanh", builder.row_sum(bounded(a))))
        else:
            wide.append(bounded(a))
    # every state is squashed, so that a few steps do not run away
    new = [builder.apply("tanh", draw(st.sampled_from(wide[len(states) :]))) for _ in states]
    outputs = [tuple(draw(st.lists(st.sampled_from(wide), min_size=1, max_size=3)))]
    if draw(st.booleans()):
        outputs.append((draw(st.sampled_from(scalars)),))
    return builder.build(new, outputs)


def chained() -> Cell:
    """Three products that wait for each other, of nothing but what every processor can have of the states: r, then u of
    r, then one of u and of the state itself; with inputs of every kind, and a state that no product reads."""
    builder = CellBuilder()
    x, (bias,), (fixed,), (mask,) = builder.sequence(2), builder.vector(1), builder.invariant(1), builder.sequence(0)
    h, kept = builder.state(), builder.state()
    matrix = builder.matrix(1, 4)
    r = builder.apply("sigmoid", builder.sum(x[0], bias, builder.product(h, matrix)))
    inner = builder.product(builder.apply("multiply", r, h), matrix, column=1)
    u = builder.apply("tanh", builder.sum(fixed, inner, builder.apply("multiply", mask, x[1])))
    last = builder.add(Product((Term(builder.apply("multiply", u, r), matrix, 0, 2), Term(h, matrix, 0, 3))))
    new = builder.apply("tanh", builder.sum(x[1], last))
    return builder.build((new, builder.apply("multiply", kept, r)), ((new, u), (kept,)))


def side_by_side() -> Cell:
    """Two states, each multiplied alone; then two products of what follows: two buffers alike in each of two stages."""
    builder = CellBuilder()
    x = builder.sequence(2)
    one, other = builder.state(), builder.state()
    matrix = builder.matrix(1, 4)
    first = [builder.product(state, matrix, column=column) for column, state in enumerate((one, other))]
    inner = [builder.apply("tanh", builder.sum(x[i], first[i])) for i in range(2)]
    second = [builder.product(value, matrix, column=column) for column, value in enumerate(inner, 2)]
    new = tuple(builder.apply("tanh", builder.sum(second[i], inner[1 - i])) for i in range(2))
    return builder.build(new, (new,))
