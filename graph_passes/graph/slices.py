"""What a StridedSlice takes along each axis: its masks and arguments, decoded once."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId, integer
from graph_passes.graph.ops import passed


@dataclass(frozen=True)
class Axis:
    """What is taken along one axis, `x[begin:end:step]`.

    Attributes:
        begin: the first index, or the only one; a tensor where the graph computes it; None: from the start.
        end: the index behind the last one; None: to the end. Of a single index it is not read.
        step: from one index to the next.
        single: one index is taken, and the axis goes: `x[begin]`.
        new: no axis of the operand, but a new one of size 1: `x[tf.newaxis]`.
    """

    begin: int | TensorId | None
    end: int | TensorId | None
    step: int
    single: bool
    new: bool

    @property
    def whole(self) -> bool:
        """Whether all of the axis is taken, as it is."""
        return self.begin is None and self.end is None and self.step == 1 and not (self.single or self.new)


def axes(graph: Graph, node: Node) -> tuple[Axis, ...] | None:
    """What a StridedSlice takes along its first axes; of all others it takes everything.

    Example: `x[:, 3:]` gives `(Axis(None, None, 1, False, False), Axis(3, None, 1, False, False))`.

    Returns:
        None if the axes are unknown (an ellipsis; a step or a bound that is neither a constant nor a `Pack`).
    """
    begin, steps = _values(graph, node.inputs[1]), _values(graph, node.inputs[3])
    if begin is None or steps is None or _mask(node, "ellipsis"):
        return None
    begins, ends, singles, new = (_mask(node, key) for key in ("begin", "end", "shrink_axis", "new_axis"))
    stop = _values(graph, node.inputs[2])
    found = []
    for place, (first, step) in enumerate(zip(begin, steps, strict=True)):
        bit = 1 << place
        bounded = not (ends | singles | new) & bit
        if not isinstance(step, int) or (bounded and stop is None):
            return None
        found.append(
            Axis(
                begin=None if begins & ~singles & bit else first,
                end=stop[place] if bounded and stop is not None else None,
                step=step,
                single=bool(singles & bit),
                new=bool(new & bit),
            )
        )
    return tuple(found)


def _mask(node: Node, name: str) -> int:
    return integer(node.attrs.get(f"{name}_mask", 0))


def _values(graph: Graph, tensor: TensorId) -> tuple[int | TensorId, ...] | None:
    """The elements of a vector: numbers of a constant, or the scalars that a `Pack` was made of."""
    source = passed(graph, tensor)
    known = graph.constants.get(source.node)
    if known is not None:
        return tuple(int(value) for value in known.reshape(-1))
    node = graph[source.node]
    return tuple(node.inputs) if node.op == "Pack" else None
