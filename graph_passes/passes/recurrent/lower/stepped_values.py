"""What a variable to which every step adds the same is in each step, and after the last one."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph.ir import DataType, TensorId
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.stepped_variables import Stepped
from graph_passes.passes.recurrent.lower.prologue import Prologue


def in_steps(
    prologue: Prologue, stepped: Stepped, resource: TensorId, added: Sequence[TensorId], count: int, reverse: bool
) -> TensorId:
    """The value behind `count` assignments of each step, `[time, ...]`.

    Args:
        prologue: takes the new nodes.
        stepped: the variable.
        resource: it, in the graph around the loop.
        added: what each assignment adds, there.
        count: of the assignments of a step.
        reverse: whether the launch numbers steps from the last one.
    """
    steps = prologue.counted(prologue.time, "steps")
    steps = prologue.reversed(steps, SHAPE_DTYPE) if reverse else steps
    start = _sum(prologue, stepped, [_start(prologue, stepped, resource), *added[:count]])
    return _behind(prologue, stepped, start, added, steps, (-1, *[1] * len(stepped.spec.shape or ())))


def assigned(prologue: Prologue, stepped: Stepped, resource: TensorId, added: Sequence[TensorId]) -> str:
    """The node that assigns the value behind the last step."""
    start = _start(prologue, stepped, resource)
    end = _behind(prologue, stepped, start, added, prologue.scalar(prologue.time), ())
    attrs = {"dtype": DataType(stepped.spec.dtype), "validate_shape": False}
    return prologue.emit("AssignVariableOp", [resource, end], attrs).node


def _start(prologue: Prologue, stepped: Stepped, resource: TensorId) -> TensorId:
    return prologue.once("ReadVariableOp", [resource], {"dtype": DataType(stepped.spec.dtype)}, "start")


def _behind(
    prologue: Prologue,
    stepped: Stepped,
    start: TensorId,
    added: Sequence[TensorId],
    steps: TensorId,
    dims: Sequence[int],
) -> TensorId:
    """`start`, and all that so many steps add; `steps` in the shape `dims`."""
    dtype = stepped.spec.dtype
    counts = prologue.reshape(prologue.cast(steps, SHAPE_DTYPE, dtype), dtype, dims)
    more = prologue.once("Mul", [counts, _sum(prologue, stepped, added)], {"T": DataType(dtype)})
    return _sum(prologue, stepped, [start, more])


def _sum(prologue: Prologue, stepped: Stepped, parts: Sequence[TensorId]) -> TensorId:
    total = parts[0]
    for part in parts[1:]:
        total = prologue.once("AddV2", [total, part], {"T": DataType(stepped.spec.dtype)})
    return total
