"""What a StridedSlice takes, once all its bounds are constants: its begin, step and output for each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId, integer
from graph_passes.lower.values import integers


@dataclass(frozen=True)
class Taken:
    """What a slice takes of one dimension: positions `begin`, `begin + step`, ..., along dimension `output` of the
    result; None: the result does not have the dimension."""

    begin: int
    step: int
    output: int | None


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
