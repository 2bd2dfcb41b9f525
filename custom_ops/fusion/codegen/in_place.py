"""Which outputs may lie where a tensor lies: variables that a kernel updates in place.

Every element of the tensor has to be read by the thread that writes the output's element there, and not after it: by
loops that share out their positions alike, the last of which writes. What a product adds up is read at other places
than where its result is written. (What is read once for each row all of its threads
read, but what they make of it one of them alone uses.)
"""

from __future__ import annotations

from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.arguments import storage
from custom_ops.fusion.codegen.plan import Plan


def in_place(plan: Plan) -> frozenset[tuple[int, int]]:
    """Pairs of a tensor and an output that may share memory. Of a launch each tensor and output may be in one pair."""
    program = plan.pattern.program
    return frozenset(
        (tensor, output)
        for tensor in range(len(program.tensors))
        for output in range(len(program.outputs))
        if _can_share(plan, tensor, output)
    )


def _can_share(plan: Plan, tensor: int, output: int) -> bool:
    pattern, program = plan.pattern, plan.pattern.program
    axes = program.outputs[output].axes
    read = [place for place, node in enumerate(program.nodes) if isinstance(node, Input) and node.tensor == tensor]
    read = [place for place in read if program.live[place]]
    same = storage(program.tensors[tensor].dtype) == storage(program.types[program.outputs[output].node].dtype)
    if not read or not same or any(not _is_identity(plan, place, axes) for place in read):
        return False
    loops = [
        (number, at, loop)
        for number, piece in enumerate(plan.pieces)
        for at, loop in enumerate(piece.loops)
        if any(place in pattern.needs(root) for root in loop.roots for place in read)
    ]
    (written,) = (
        (number, at, loop)
        for number, piece in enumerate(plan.pieces)
        for at, loop in enumerate(piece.loops)
        if any(root.output == output for root in loop.roots)
    )
    return all(
        number == written[0]
        and at <= written[1]
        and loop.way in ("flat", "product")
        and (loop.axes, loop.vector) == (written[2].axes, written[2].vector)
        for number, at, loop in loops
    )


def _is_identity(plan: Plan, place: int, axes: tuple[int, ...]) -> bool:
    """Whether an input reads, at each position, the element that an output has there."""
    pattern, node = plan.pattern, plan.pattern.program.nodes[place]
    assert isinstance(node, Input)
    dimensions = pattern.dimensions[node.tensor]
    return tuple(index.axis for index in node.index) == axes and all(
        size == pattern.size(axis) for size, axis in zip(dimensions, axes, strict=True)
    )
