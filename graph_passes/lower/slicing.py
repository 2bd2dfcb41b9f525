"""What a StridedSlice takes, once all its bounds are constants: its begin, step and output for each dimension.

And where a Slice begins that gives a part of a concatenation its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId, integer
from graph_passes.graph.ops import passed
from graph_passes.lower.known_numbers import integers


@dataclass(frozen=True)
class Taken:
    """What a slice takes of one dimension: positions `begin`, `begin + step`, ..., along dimension `output` of the
    result; None: the result does not have the dimension."""

    begin: int
    step: int
    output: int | None


@dataclass(frozen=True)
class JoinedPart:
    """A slice of a concatenation's gradient: where it begins, the tensor that was joined there, whose shape it has, and
    along which dimension."""

    begins: tuple[int, ...]
    joined: TensorId
    axis: int


def part_of(graph: Graph, node: Node) -> JoinedPart | None:
    """The part of a concatenation that a Slice gives back its gradient; None if it is something else.

    Sizes along other dimensions than that of the concatenation need not be known.
    """
    offset, size = (passed(graph, tensor) for tensor in node.inputs[1:3])
    maker = graph[offset.node]
    place = integers(graph, maker.inputs[0]) if maker.op == "ConcatOffset" else None
    if not place:
        return None
    joined = [shaped_by(graph, passed(graph, tensor)) for tensor in maker.inputs[1:]]
    part, before = joined[offset.index], joined[: offset.index]
    shapes = [graph.specs[tensor].shape if tensor in graph.specs else None for tensor in before if tensor is not None]
    rank = len(graph.specs[node.inputs[0]].shape or ())
    known = [shape[place[0]] for shape in shapes if shape is not None and len(shape) == rank]
    offsets = [length for length in known if length is not None]
    if part is None or shaped_by(graph, size) != part or len(offsets) != offset.index:
        return None
    axis = place[0] % max(rank, 1)
    return JoinedPart(tuple(sum(offsets) if each == axis else 0 for each in range(rank)), part, axis)


def shaped_by(graph: Graph, tensor: TensorId) -> TensorId | None:
    """The tensor whose shape a tensor is."""
    maker = graph[tensor.node]
    return maker.inputs[tensor.index] if maker.op in ("Shape", "ShapeN") else None


def taken(graph: Graph, node: Node, bounds: Sequence[TensorId], shape: Sequence[int]) -> list[Taken] | None:
    """What is taken of each dimension of `shape`, of which negative sizes are not known; None if that is unknown."""
    begins, _, steps = (integers(graph, tensor) for tensor in bounds)
    if begins is None or steps is None:
        return None
    begin_mask, ellipsis, new, single = (
        integer(node.attrs.get(f"{name}_mask", 0)) for name in ("begin", "ellipsis", "new_axis", "shrink_axis")
    )
    found: list[Taken] = []
    output = 0
    for place, (begin, step) in enumerate(zip(begins, steps, strict=True)):
        bit = 1 << place
        if ellipsis & bit:
            later = sum(not (new & 1 << other) for other in range(place + 1, len(begins)))
            for _ in range(len(shape) - len(found) - later):
                found.append(Taken(0, 1, output))
                output += 1
        elif new & bit:
            output += 1
        else:
            size = shape[len(found)]
            first = _begin(None if begin_mask & bit and not single & bit else begin, step, size)
            if first is None:
                return None
            found.append(Taken(first, step, None if single & bit else output))
            output += not single & bit
    found += [Taken(0, 1, output + place) for place in range(len(shape) - len(found))]
    return found


def _begin(begin: int | None, step: int, size: int) -> int | None:
    """The first position; None where it depends on a size that is not known."""
    if begin is None:
        return 0 if step > 0 else size - 1 if size >= 0 else None
    if size < 0:
        return begin if begin >= 0 and step > 0 else None
    begin = begin + size if begin < 0 else begin
    return min(max(begin, 0), size - 1)
