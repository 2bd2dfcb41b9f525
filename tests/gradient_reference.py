"""The gradient of a recurrence in NumPy: what `custom_ops.recurrent.differentiate` says, done with the reference."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from custom_ops.errors import CellError
from custom_ops.expr.table_entry import Array
from custom_ops.recurrent.differentiate import Column, Gradient
from custom_ops.recurrent.reference import run


class Gradients(NamedTuple):
    """The gradients of all that a cell reads, in the order of `run`'s arguments and in their shapes.

    They are zero where `Gradient` names nothing.
    """

    sequences: list[Array]
    invariants: list[Array]
    vectors: list[Array]
    matrices: list[Array]
    states: list[Array]


def gradients(
    gradient: Gradient,
    units: int,
    sequences: Many[Array],
    invariants: Many[Array],
    vectors: Many[Array],
    matrices: Many[Array],
    states: Many[Array],
    output_gradients: Many[Array | None],
    final_gradients: Many[Array | None],
    reverse: bool = False,
) -> Gradients:
    """Runs the forward cell, the backward cell and the GEMMs, and puts every gradient in its place.

    Args:
        gradient: what `differentiate` made of a cell.
        units: this, those up to `states`, and `reverse`, are what `run` takes for that cell.
        output_gradients: for each output of the cell; None for what was not requested.
        final_gradients: for each state; None for what was not requested.

    Raises:
        CellError: a number of arrays or a shape does not fit, or a requested gradient is None.
    """
    parameters = (invariants, vectors, matrices)
    kept, _ = run(gradient.forward, units, sequences, *parameters, states, reverse)
    tensors: dict[str, Many[Array | None]] = {"sequence": sequences, "output": kept, "gradient": output_gradients}
    read = [tensors[source.kind][source.tensor] for source in gradient.sequences]
    first = [np.zeros_like(states[0]) if index is None else final_gradients[index] for index in gradient.states]
    given = [array for array in (*read, *first) if array is not None]
    if len(given) < len(read) + len(first):
        raise CellError("a gradient is None that was requested; differentiate with a Request that does not name it")
    results, finals = run(gradient.backward, units, given[: len(read)], *parameters, given[len(read) :], not reverse)

    def columns(arrays: Many[Array], place: Column, blocks: int = 1) -> Array:
        return arrays[place.tensor][..., place.column * units : (place.column + blocks) * units]

    def put(whole: Array, parts: list[Array | None]) -> Array:
        """Its gradient, made of those of its columns."""
        result = np.zeros_like(whole)
        for column, part in enumerate(parts):
            if part is not None:
                result[..., column * units : (column + 1) * units] = part
        return result

    def of_sequence(whole: Array, places: tuple[Column | None, ...]) -> Array:
        if whole.ndim == 3:
            return put(whole, [columns(results, place) if place else None for place in places])
        return np.zeros_like(whole) if places[0] is None else results[places[0].tensor]

    def of_states(whole: Array, places: tuple[int | None, ...], sum_rows: bool = False) -> Array:
        parts = [None if place is None else finals[place] for place in places]
        return put(whole, [part.sum(0) if part is not None and sum_rows else part for part in parts])

    of_matrices = [np.zeros_like(matrix) for matrix in matrices]
    for weight in gradient.weight_gradients:
        operand = columns(kept, weight.operand).reshape(-1, units)
        adjoint = columns(results, weight.adjoint, weight.blocks).reshape(-1, weight.blocks * units)
        part = adjoint.T @ operand if weight.transposed else operand.T @ adjoint
        top, left = weight.row * units, weight.column * units
        of_matrices[weight.matrix][top : top + len(part), left : left + part.shape[1]] += part
    return Gradients(
        [of_sequence(*pair) for pair in zip(sequences, gradient.sequence_gradients, strict=True)],
        [of_states(*pair) for pair in zip(invariants, gradient.invariant_gradients, strict=True)],
        [of_states(*pair, sum_rows=True) for pair in zip(vectors, gradient.vector_gradients, strict=True)],
        of_matrices,
        [of_states(whole, (place,)) for whole, place in zip(states, gradient.state_gradients, strict=True)],
    )
