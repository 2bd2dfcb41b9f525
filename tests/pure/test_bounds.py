"""Which cells the product of float16 pairs may run: their operands stay in [-1, 1]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from custom_ops.errors import KernelError
from custom_ops.recurrent import cells
from custom_ops.recurrent.bounds import products_are_bounded
from custom_ops.recurrent.cell import Product
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.codegen.layout import layout
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.reference import run
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests.recurrent_cells import arguments, library

HALF = Configuration(rows=8, lanes=32, product="half")


@pytest.mark.parametrize("name", sorted(library(8)))
def test_operands_said_to_be_bounded_are(name: str) -> None:
    cell = library(8)[name]
    if not products_are_bounded(cell):
        pytest.skip("not bounded")
    given = arguments(cell, 8, 30, 3, seed=1, masked=True)
    large = [20.0 * sequence for sequence in given.sequences]
    states = [np.clip(state, -1.0, 1.0) for state in given.states]
    operands = sorted({term.operand for node in cell.nodes if isinstance(node, Product) for term in node.terms})
    watched = replace(cell, outputs=tuple((operand,) for operand in operands))
    outputs, _ = run(watched, 8, large, given.invariants, given.vectors, given.matrices, states)
    assert max(np.abs(output).max() for output in outputs) <= 1.0


@pytest.mark.parametrize(
    ("cell", "bounded"),
    [
        (cells.lstm(), True),
        (cells.lstm(activation="relu"), False),
        (cells.gru(reset_after=True), True),
        (cells.gru(reset_after=False, mask="repeat"), True),
        (cells.gru(activation="relu"), False),
        (cells.simple_rnn(activation="linear"), False),
        (differentiate(cells.lstm()).backward, False),
    ],
)
def test_cells(cell: cells.Cell, bounded: bool) -> None:
    assert products_are_bounded(cell) == bounded
    spec = RecurrentSpec(cell, 64)
    if bounded:
        layout(spec, HALF, 90)
    else:
        with pytest.raises(KernelError, match="bounded"):
            layout(spec, HALF, 90)


def test_a_mixture_with_another_weight_is_not_bounded() -> None:
    """z a + (2 - z) b may grow."""
    builder = CellBuilder()
    (gate,) = builder.sequence(1)
    matrix = builder.matrix(1, 1)
    state = builder.state()
    z = builder.apply("sigmoid", gate)
    new = builder.apply("tanh", builder.product(state, matrix))
    rest = builder.apply("subtract", builder.constant(2.0), z)
    mixed = builder.apply("add", builder.apply("multiply", z, state), builder.apply("multiply", rest, new))
    assert not products_are_bounded(builder.build((mixed,), ((mixed,),)))
