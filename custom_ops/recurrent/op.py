"""The gradient of TfmemRecurrent in TensorFlow, which is the same op with another cell and a few GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from custom_ops.errors import CellError
from custom_ops.recurrent.cell import Cell, from_text
from custom_ops.recurrent.differentiate import Column, Gradient, WeightGradient, differentiate

if TYPE_CHECKING:
    from types import ModuleType

    import tensorflow as tf

OP = "TfmemRecurrent"
_NO_SECOND_ORDER = (
    "the gradient of TfmemRecurrent's gradient needs the op without saved outputs: build it with training=False"
)


def register_gradient(ops: ModuleType) -> None:
    """Tells TensorFlow the op's gradient; once, when the op library is loaded.

    Args:
        ops: the wrappers of the library that was loaded.
    """
    import tensorflow as tf

    tf.RegisterGradient(OP)(functools.partial(_gradient, ops))


@dataclass(frozen=True)
class _Direction:
    """The tensors of one direction of the forward op."""

    sequences: Sequence[tf.Tensor]
    invariants: Sequence[tf.Tensor]
    vectors: Sequence[tf.Tensor]
    matrices: Sequence[tf.Tensor]
    states: Sequence[tf.Tensor]
    kept: Sequence[tf.Tensor]  # what the forward cell puts out
    output_gradients: Sequence[tf.Tensor]
    final_gradients: Sequence[tf.Tensor]

    def source(self, gradient: Gradient) -> list[tf.Tensor]:
        """The sequences of the backward cell."""
        tensors = {"sequence": self.sequences, "output": self.kept, "gradient": self.output_gradients}
        return [tensors[source.kind][source.tensor] for source in gradient.sequences]

    def first(self, gradient: Gradient) -> list[tf.Tensor]:
        """The states from which the backward cell starts."""
        import tensorflow as tf

        zeros = tf.zeros_like(self.final_gradients[0])
        return [zeros if index is None else self.final_gradients[index] for index in gradient.states]


@functools.lru_cache(maxsize=64)
def _differentiated(text: str) -> Gradient:
    return differentiate(from_text(text))


def _gradient(ops: ModuleType, op: Any, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
    """The gradients of the op's inputs, from those of its outputs, as TensorFlow asks for them."""
    import tensorflow as tf

    base = op.get_attr("base_cell").decode()
    text = op.get_attr("cell").decode()
    gradient = _differentiated(base or text)
    if base and gradient.forward.to_text() != text:
        raise CellError("attr cell is not the forward cell of attr base_cell's gradient; optimize the graph again")
    cell = from_text(base or text)
    units, directions = op.get_attr("units"), op.get_attr("directions")
    reverse = op.get_attr("reverse") or [False] * directions
    given = [tf.zeros_like(tensor) if g is None else g for tensor, g in zip(op.outputs, gradients, strict=True)]
    given_outputs, given_finals = given[: op.get_attr("No")], given[op.get_attr("No") :]
    counts = [op.get_attr(count) for count in ("Ns", "Ni", "Nv", "Nm", "Nh")]
    inputs = _cut(list(op.inputs), counts)
    common = {name: op.get_attr(name) for name in ("units", "directions", "batch_major", "precision")}
    if base:
        kept = list(op.outputs)[: op.get_attr("No")]
    else:
        kept = _run(ops, gradient.forward, inputs, reverse=list(reverse), **common)[0]
    kept_of = [
        [*tensors[: len(cell.outputs)], *(_saved(tensor, bool(base)) for tensor in tensors[len(cell.outputs) :])]
        for tensors in _split(kept, directions)
    ]
    tables: list[Sequence[Sequence[tf.Tensor]]] = [_split(tensors, directions) for tensors in inputs]
    tables += [kept_of, _split(given_outputs, directions), _split(given_finals, directions)]
    parts = [_Direction(*(table[direction] for table in tables)) for direction in range(directions)]
    backward_inputs = [
        [tensor for part in parts for tensor in part.source(gradient)],
        *inputs[1:4],
        [tensor for part in parts for tensor in part.first(gradient)],
    ]
    results, finals = _run(
        ops,
        gradient.backward,
        backward_inputs,
        reverse=[not flag for flag in reverse],
        **common,
    )
    found = [
        _Results(cell, gradient, units, part, part_results, part_finals).all()
        for part, part_results, part_finals in zip(
            parts, _split(results, directions), _split(finals, directions), strict=True
        )
    ]
    return [tensor for kind in zip(*found, strict=True) for of_direction in kind for tensor in of_direction]


@dataclass(frozen=True)
class _Results:
    """What the backward cell of one direction computed, put where TensorFlow wants it."""

    cell: Cell
    gradient: Gradient
    units: int
    forward: _Direction
    outputs: Sequence[tf.Tensor]
    finals: Sequence[tf.Tensor]

    def all(self) -> list[list[tf.Tensor | None]]:
        """The gradients of sequences, invariants, vectors, matrices and states."""
        import tensorflow as tf

        gradient = self.gradient
        invariants = map(self._of_states, gradient.invariant_gradients)
        vectors = map(self._of_states, gradient.vector_gradients)
        states = map(self._of_state, self.forward.states, gradient.state_gradients)
        return [
            list(map(self._of_sequence, self.cell.sequences, gradient.sequence_gradients)),
            list(invariants),
            [None if whole is None else tf.reduce_sum(whole, axis=0) for whole in vectors],
            list(map(self._of_matrix, range(len(self.cell.matrices)))),
            list(states),
        ]

    def _columns(self, tensors: Sequence[tf.Tensor], place: Column, count: int = 1) -> tf.Tensor:
        """`count` columns, without a copy if they are all there are."""
        tensor = tensors[place.tensor]
        if tensor.shape[-1] == count * self.units:
            return tensor
        return tensor[..., place.column * self.units : (place.column + count) * self.units]

    def _of_sequence(self, size: int, places: tuple[Column | None, ...]) -> tf.Tensor | None:
        import tensorflow as tf

        present = [place for place in places if place is not None]
        if not present:
            return None
        if size == 0:
            return self.outputs[present[0].tensor]
        adjacent = [Column(present[0].tensor, present[0].column + i) for i in range(len(places))]
        if list(places) == adjacent:
            return self._columns(self.outputs, present[0], len(places))
        parts = [None if place is None else self._columns(self.outputs, place) for place in places]
        zeros = tf.zeros_like(next(part for part in parts if part is not None))
        return tf.concat([zeros if part is None else part for part in parts], axis=-1)

    def _of_state(self, state: tf.Tensor, place: int | None) -> tf.Tensor | None:
        """The gradient of an initial state; a state that stands for zeros has no rows, nor has its gradient."""
        if place is None:
            return None
        return self.finals[place][:0] if state.shape[0] == 0 else self.finals[place]

    def _of_states(self, places: tuple[int | None, ...]) -> tf.Tensor | None:
        """`[batch, columns * units]`."""
        import tensorflow as tf

        if all(place is None for place in places):
            return None
        zeros = tf.zeros_like(self.finals[0])
        parts = [zeros if place is None else self.finals[place] for place in places]
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=-1)

    def _of_matrix(self, index: int) -> tf.Tensor | None:
        import tensorflow as tf

        parts = [self._product(weight) for weight in self.gradient.weight_gradients if weight.matrix == index]
        return tf.add_n(parts) if len(parts) > 1 else (parts or [None])[0]

    def _product(self, weight: WeightGradient) -> tf.Tensor:
        """One GEMM over all steps, and zeros around it up to the matrix's size."""
        import tensorflow as tf

        units, blocks = self.units, weight.blocks
        operand = tf.reshape(self._columns(self.forward.kept, weight.operand), [-1, units])
        adjoint = tf.reshape(self._columns(self.outputs, weight.adjoint, blocks), [-1, blocks * units])
        left, right = (adjoint, operand) if weight.transposed else (operand, adjoint)
        part = tf.matmul(left, right, transpose_a=True)
        rows, columns = self.cell.matrices[weight.matrix]
        height, width = (blocks, 1) if weight.transposed else (1, blocks)
        if (height, width) == (rows, columns):
            return part
        above, left_of = weight.row * units, weight.column * units
        below, right_of = (rows - height) * units - above, (columns - width) * units - left_of
        return tf.pad(part, [[above, below], [left_of, right_of]])


def _run(ops: ModuleType, cell: Cell, inputs: Sequence[Sequence[tf.Tensor]], **attributes: Any) -> Any:
    """The op with all of `attributes`, on the CPU: there is no GPU program for it."""
    import tensorflow as tf

    names = ("sequences", "invariants", "vectors", "matrices", "states")
    with tf.device("/device:CPU:0"):
        return ops.tfmem_recurrent(
            **dict(zip(names, inputs, strict=True)),
            No=attributes["directions"] * len(cell.outputs),
            cell=cell.to_text(),
            **attributes,
        )


def _saved(tensor: tf.Tensor, guarded: bool) -> tf.Tensor:
    """A value that was saved for this gradient: no gradient goes back through it, and TensorFlow is to say so."""
    import tensorflow as tf

    return tf.raw_ops.PreventGradient(input=tensor, message=_NO_SECOND_ORDER) if guarded else tensor


def _cut(tensors: Sequence[tf.Tensor], counts: Sequence[int]) -> list[Sequence[tf.Tensor]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [tensors[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _split(tensors: Sequence[tf.Tensor], directions: int) -> list[Sequence[tf.Tensor]]:
    """The parts of each direction."""
    count = len(tensors) // directions
    return [tensors[direction * count : (direction + 1) * count] for direction in range(directions)]
