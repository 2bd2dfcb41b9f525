"""Outputs that may take the memory of a tensor: variables that a kernel updates in place.

Every element of the tensor has to be read by the thread that writes the output's element there, and not after it: by
loops that share out their positions alike, the last of which writes. What a product adds up is read at other places
than where its result is written. (What is read once for each row all of its threads
read, but what they make of it one of them alone uses.)
"""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.plan.arguments import storage
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, RowLoop


@dataclass(frozen=True)
class _Place:
    """A loop: the number of its piece, its own within it, and what it is."""

    piece: int
    at: int
    loop: RowLoop

    def may_write(self, read: _Place) -> bool:
        """Whether it may write where another one reads."""
        alike = (read.loop.axes, read.loop.vector) == (self.loop.axes, self.loop.vector)
        return read.piece == self.piece and read.at <= self.at and read.loop.way in ("flat", "product") and alike


def in_place(plan: KernelPlan) -> frozenset[tuple[int, int]]:
    """Pairs of a tensor and an output that may share memory. Of a launch each tensor and output may be in one pair."""
    program = plan.pattern.program
    reads: dict[int, list[int]] = {}
    for place, node in enumerate(program.nodes):
        if isinstance(node, Input) and program.live[place]:
            reads.setdefault(node.tensor, []).append(place)
    readers, writers = _loops(plan)
    alike: dict[tuple[tuple[int, ...], str], list[int]] = {}  # outputs by axes and type
    for number, output in enumerate(program.outputs):
        alike.setdefault((output.axes, storage(program.types[output.node].dtype)), []).append(number)
    found = set()
    for tensor, places in reads.items():
        identities = {_identity(plan, place) for place in places}
        axes = identities.pop()
        if identities or axes is None:
            continue
        loops = [read for place in places for read in readers.get(place, ())]
        for number in alike.get((axes, storage(program.tensors[tensor].dtype)), ()):
            if all(map(writers[number].may_write, loops)):
                found.add((tensor, number))
    return frozenset(found)


def _loops(plan: KernelPlan) -> tuple[dict[int, list[_Place]], dict[int, _Place]]:
    """The loops that read each input, and the one that writes each output."""
    readers: dict[int, list[_Place]] = {}
    writers: dict[int, _Place] = {}
    for number, piece in enumerate(plan.pieces):
        for at, loop in enumerate(piece.loops):
            place = _Place(number, at, loop)
            for needed in {each for root in loop.roots for each in plan.pattern.needs(root)}:
                readers.setdefault(needed, []).append(place)
            writers |= {root.output: place for root in loop.roots if root.output is not None}
    return readers, writers


def _identity(plan: KernelPlan, place: int) -> tuple[int, ...] | None:
    """The axes along which an input reads, at each position, the element there; None if it reads others."""
    pattern, node = plan.pattern, plan.pattern.program.nodes[place]
    assert isinstance(node, Input)
    axes = [index.axis for index in node.index]
    sizes = pattern.dimensions[node.tensor]
    if any(axis is None or pattern.size(axis) != size for axis, size in zip(axes, sizes, strict=True)):
        return None
    return tuple(axis for axis in axes if axis is not None)
