"""What a recurrent cell computes over a sequence, in NumPy: the definition that every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, TypeAlias

import numpy as np

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import Array
from custom_ops.recurrent.cell import Cell, CellConstant, Invariant, Product, RowSum, Sequence, State, Term, Vector

Shape: TypeAlias = tuple[int, ...]
KINDS = ("sequence", "invariant", "vector", "matrix", "state")


def run(
    cell: Cell,
    units: int,
    sequences: Many[Array],
    invariants: Many[Array],
    vectors: Many[Array],
    matrices: Many[Array],
    states: Many[Array],
    reverse: bool = False,
) -> tuple[list[Array], list[Array]]:
    """All steps of `cell`, in the dtype of the arrays; in float64 it is the truth that others approach.

    Args:
        cell: what one step computes.
        units: the hidden size.
        sequences: `[time, batch, columns * units]`, or `[time, batch]` for 0 columns; at least one.
        invariants: `[batch, columns * units]`.
        vectors: `[columns * units]`.
        matrices: `[rows * units, columns * units]`.
        states: before the first step, `[batch, units]`.
        reverse: walk from the last time index to the first.

    Returns:
        Outputs `[time, batch, columns * units]`, or `[time, batch]` for a scalar; states after the last step.

    Raises:
        CellError: a number of arrays or a shape does not fit the cell.
    """
    if not sequences:
        raise CellError("the cell reads no sequence, so the number of steps is unknown")
    time, batch = sequences[0].shape[:2]
    given = (sequences, invariants, vectors, matrices, states)
    for kind, arrays, expected in zip(KINDS, given, input_shapes(cell, units, time, batch), strict=True):
        found = [array.shape for array in arrays]
        if found != expected:
            raise CellError(f"expected {kind} shapes {expected}, found {found}")
    dtype = np.result_type(*(array for arrays in given for array in arrays))
    outputs = [np.zeros(shape, dtype) for shape in output_shapes(cell, units, time, batch)]
    now = [state.astype(dtype) for state in states]
    with np.errstate(all="ignore"):  # infinity and NaN are values like others
        for step in reversed(range(time)) if reverse else range(time):
            values = _step(cell, units, [x[step] for x in sequences], invariants, vectors, matrices, now, dtype)
            for output, columns in zip(outputs, cell.outputs, strict=True):
                output[step] = np.concatenate([values[place] for place in columns], 1).reshape(output[step].shape)
            now = [values[place] for place in cell.states]
    return outputs, now


def _step(
    cell: Cell,
    units: int,
    sequences: list[Array],
    invariants: Many[Array],
    vectors: Many[Array],
    matrices: Many[Array],
    states: list[Array],
    dtype: np.dtype[Any],
) -> list[Array]:
    """The value of every node: `[batch, units]`, or `[batch, 1]` for a scalar."""
    batch = len(sequences[0])
    values: list[Array] = []

    def column(tensor: Array, index: int) -> Array:
        return tensor[..., index * units : (index + 1) * units]

    def product(term: Term) -> Array:
        block = column(matrices[term.matrix][term.row * units : (term.row + 1) * units], term.column)
        return values[term.operand] @ (block.T if term.transposed else block)

    for node, scalar in zip(cell.nodes, cell.scalar, strict=True):
        match node:
            case Sequence(tensor=tensor, column=index):
                value = sequences[tensor][:, None] if scalar else column(sequences[tensor], index)
            case Invariant(tensor=tensor, column=index):
                value = column(invariants[tensor], index)
            case Vector(tensor=tensor, column=index):
                value = column(vectors[tensor], index)
            case CellConstant(value=number):
                value = np.asarray(number)
            case State(index=index):
                value = states[index]
            case Product(terms=terms):
                value = sum((product(term) for term in terms[1:]), start=product(terms[0]))
            case RowSum(operand=operand):
                value = values[operand].sum(1, keepdims=True)
            case Elementwise(op=op, arguments=arguments):
                value = TABLE[op].numpy(*(values[argument] for argument in arguments))
        values.append(np.broadcast_to(value.astype(dtype, copy=False), (batch, 1 if scalar else units)))
    return values


def input_shapes(cell: Cell, units: int, time: int, batch: int) -> list[list[Shape]]:
    """The shapes of sequences, invariants, vectors, matrices and states, in the order of `run`'s arguments."""
    return [
        [_sequence_shape(columns, units, time, batch) for columns in cell.sequences],
        [(batch, columns * units) for columns in cell.invariants],
        [(columns * units,) for columns in cell.vectors],
        [(rows * units, columns * units) for rows, columns in cell.matrices],
        [(batch, units)] * len(cell.states),
    ]


def output_shapes(cell: Cell, units: int, time: int, batch: int) -> list[Shape]:
    """The shapes of the outputs, without the final states."""
    return [_sequence_shape(columns, units, time, batch) for columns in cell.output_columns]


def _sequence_shape(columns: int, units: int, time: int, batch: int) -> Shape:
    return (time, batch, columns * units) if columns else (time, batch)
