"""A call of TfmemRecurrent as the passes write it: in graph mode and eagerly, with the gradient's saved outputs."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import tensorflow as tf

from custom_ops.image_functions import named
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.gpu_program import RecurrentProgram


def recurrent(
    ops: ModuleType,
    cell: Cell,
    units: int,
    sequences: Sequence[tf.Tensor],
    invariants: Sequence[tf.Tensor],
    vectors: Sequence[tf.Tensor],
    matrices: Sequence[tf.Tensor],
    states: Sequence[tf.Tensor],
    *,
    reverse: Sequence[bool] = (False,),
    batch_major: bool = False,
    precision: str = "highest",
    programs: Sequence[RecurrentProgram] = (),
    training: bool = False,
    name: str | None = None,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Run `cell` over whole sequences, once for each direction.

    All lists hold the tensors of direction 0, then those of direction 1, each in the order of the cell. All tensors are
    of one dtype: float32, float64, float16 or bfloat16.

    Args:
        ops: of the op library, `custom_ops.load.load().ops`.
        cell: what one step computes.
        units: the hidden size.
        sequences: `[time, batch, columns * units]`, or `[time, batch]` for 0 columns.
        invariants: `[batch, columns * units]`.
        vectors: `[columns * units]`.
        matrices: `[rows * units, columns * units]`.
        states: before the first step, `[batch, units]`; `[0, units]` stands for zeros.
        reverse: for each direction whether it walks time from last to first.
        batch_major: whether sequences and outputs begin with batch and time, not with time and batch.
        precision: how a GPU stores weights: "highest", "tf32", "bfloat16" or "float16".
        programs: GPU programs for the cell; with `training`, for its gradient's forward cell.
        training: keep what the gradient needs; without it, a gradient runs the forward sweep a second time. The
            gradient runs on the CPU: passes put ops with GPU programs into a training step themselves.
        name: of the op.

    Returns:
        Outputs, as sequences, `[time, batch, columns * units]`, or `[time, batch]` for a scalar, and final states
        `[batch, units]`.

    Raises:
        tf.errors.InvalidArgumentError: a number of tensors or a shape does not fit the cell.
        CellError: with `training`, the cell has no gradient.
    """
    run = differentiate(cell).forward if training else cell
    outputs, finals = ops.tfmem_recurrent(
        sequences=sequences,
        invariants=invariants,
        vectors=vectors,
        matrices=matrices,
        states=states,
        No=len(reverse) * len(run.outputs),
        cell=run.to_text(),
        base_cell=cell.to_text() if training else "",
        units=units,
        directions=len(reverse),
        reverse=list(reverse),
        batch_major=batch_major,
        precision=precision,
        programs=[program.to_text() for program in programs],
        images=named([program.image.code for program in programs]),
        name=name,
    )
    kept = [of_direction[: len(cell.outputs)] for of_direction in _directions(outputs, len(reverse))]
    return [tensor for of_direction in kept for tensor in of_direction], list(finals)


def _directions(tensors: Sequence[tf.Tensor], count: int) -> list[Sequence[tf.Tensor]]:
    """The tensors of each direction."""
    each = len(tensors) // count
    return [tensors[first : first + each] for first in range(0, len(tensors), each)] if each else [()] * count
