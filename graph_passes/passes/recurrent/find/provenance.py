"""What a tensor consists of that was only moved about: cut, joined, transposed, reshaped.

Keras packs a layer's weights into one vector for cuDNN, and takes cuDNN's gradient apart again, with a dozen ops that
any optimizer may have reordered. So the ops are not compared with a pattern. They are carried out, on numbers that say
where an element came from: where a vector holds the numbers of a transposed quarter of some kernel, it is that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_passes.graph.ir import Graph, Node, TensorId

Places = npt.NDArray[np.int32]

LARGEST = 1 << 27  # elements: more are not traced


@dataclass(frozen=True)
class Traced:
    """A tensor as places in others.

    Attributes:
        places: of the tensor's shape; element n is element `places[n] - starts[k]` of source k, flattened.
        sources: the tensors that it was made of, of which nothing further is known.
        starts: the number of each source's first element, ascending.
        shapes: the shapes of the sources.
    """

    places: Places
    sources: tuple[TensorId, ...]
    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def source_of(self, place: int) -> int:
        """Which source an element comes from."""
        return int(np.searchsorted(self.starts, place, side="right")) - 1

    def numbered(self, source: int) -> Places:
        """All places of a source, in its shape."""
        shape, start = self.shapes[source], self.starts[source]
        return np.arange(start, start + prod(shape), dtype=np.int32).reshape(shape)

    def arrangements(self) -> list[Places]:
        """For each source, where in the tensor (flattened) its elements are; -1 for one that is nowhere."""
        total = self.starts[-1] + prod(self.shapes[-1])
        where = np.full(total, -1, np.int32)
        where[self.places.reshape(-1)] = np.arange(self.places.size, dtype=np.int32)
        return [where[self.numbered(source)] for source in range(len(self.sources))]


def trace(graph: Graph, tensor: TensorId) -> Traced | None:
    """Follow `tensor` back through the ops that move elements; None if a shape or an op's argument is unknown."""
    tracer = _Tracer(graph)
    places = tracer.places(tensor)
    if places is None:
        return None
    return Traced(places, tuple(tracer.sources), tuple(tracer.starts), tuple(tracer.shapes))


def spread(graph: Graph, tensor: TensorId, keep: Collection[str] = ()) -> dict[TensorId, Places] | None:
    """Follow `tensor` forward: the tensors that hold elements of it and are read by something else than a move.

    Args:
        graph: the graph.
        tensor: where to begin.
        keep: names of nodes that are fetched; they count as such readers.

    Returns:
        For each such tensor the place in `tensor` of each element; None if one of them holds other elements too, or if
        something cannot be followed.
    """
    found: dict[TensorId, Places] = {}
    pending, seen = [tensor], {tensor}
    while pending:
        current = pending.pop()
        readers = list(dict.fromkeys(use.node for use in graph.uses(current)))
        moves = [name for name in readers if graph[name].op in _MOVES and name not in keep]
        for result in (result for name in moves for result in graph.tensors(graph[name]) if result not in seen):
            seen.add(result)
            pending.append(result)
        if (len(moves) < len(readers) or not readers) and current != tensor:
            traced = trace_from(graph, current, tensor)
            if traced is None:
                return None
            found[current] = traced
        elif len(moves) < len(readers):
            return None
    return found


def trace_from(graph: Graph, tensor: TensorId, source: TensorId) -> Places | None:
    """Follow `tensor` back to `source`, and no further; None if it holds anything else."""
    tracer = _Tracer(graph, source)
    places = tracer.places(tensor)
    return places if places is not None and tracer.sources == [source] else None


def integers(graph: Graph, tensor: TensorId) -> npt.NDArray[Any] | None:
    """The value of an integer tensor that depends on constants and static shapes alone; None if it does not."""
    node = graph[tensor.node]
    if node.op == "Const":
        return graph.constants.get(node.name)
    if node.op in ("Shape", "ShapeN"):
        shape = graph.sizes(node.inputs[tensor.index])
        return None if shape is None else np.asarray(shape, np.int64)
    compute = _INTEGER_OPS.get(node.op)
    if compute is None:
        return None
    values = [integers(graph, source) for source in node.inputs]
    if any(value is None for value in values):
        return None
    return np.asarray(compute(values, tensor.index))


def is_zero(graph: Graph, tensor: TensorId) -> bool:
    """Whether the tensor is known to hold nothing but 0."""
    node = graph[tensor.node]
    if node.op in ("ZerosLike", "Identity", "Fill"):
        return node.op == "ZerosLike" or is_zero(graph, node.inputs[-1])
    if node.op != "Const":
        return False
    known = graph.constants.get(node.name)
    if known is not None:
        return known.dtype.kind not in "bOSU" and not np.any(known)
    proto = getattr(node.attrs.get("value"), "tensor", None)  # a large one: 0 is written as a single value
    if proto is None or proto.tensor_content or not proto.tensor_shape.dim:
        return False
    return not any([*proto.float_val, *proto.double_val, *proto.half_val, *proto.int_val])


def _concat_offsets(values: Sequence[Any], index: int) -> Any:
    axis, *shapes = values
    offset = np.zeros_like(shapes[0])
    offset[int(axis)] = sum(int(shape[int(axis)]) for shape in shapes[:index])
    return offset


_INTEGER_OPS: dict[str, Callable[[Sequence[Any], int], Any]] = {
    "Identity": lambda values, _: values[0],
    "AddV2": lambda values, _: values[0] + values[1],
    "FloorMod": lambda values, _: values[0] % values[1],
    "ConcatOffset": _concat_offsets,
    "InvertPermutation": lambda values, _: np.argsort(values[0]),
    "Pack": lambda values, _: np.stack(values),
    "ConcatV2": lambda values, _: np.concatenate(values[:-1], int(values[-1])),
}


def _slice(places: list[Places], begin: Any, sizes: Any) -> Places:
    ends = [dim if size < 0 else start + size for start, size, dim in zip(begin, sizes, places[0].shape, strict=True)]
    return places[0][tuple(map(slice, begin, ends))]


# For each op that only moves elements: which inputs hold elements, which hold arguments.
_MOVES = {
    "Identity": (slice(1), slice(0)),
    "Squeeze": (slice(1), slice(0)),
    "Reshape": (slice(1), slice(1, 2)),
    "ExpandDims": (slice(1), slice(1, 2)),
    "Transpose": (slice(1), slice(1, 2)),
    "Slice": (slice(1), slice(1, 3)),
    "Split": (slice(1, 2), slice(1)),
    "SplitV": (slice(1), slice(1, 3)),
    "ConcatV2": (slice(-1), slice(-1, None)),
}


class _Tracer:
    def __init__(self, graph: Graph, source: TensorId | None = None) -> None:
        self.graph = graph
        self.source = source
        self.sources: list[TensorId] = []
        self.starts: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.known: dict[TensorId, Places | None] = {}

    def places(self, tensor: TensorId) -> Places | None:
        if tensor not in self.known:
            node = self.graph[tensor.node]
            moves = node.op in _MOVES and tensor != self.source
            self.known[tensor] = self.moved(node, tensor) if moves else self.leaf(tensor)
        return self.known[tensor]

    def leaf(self, tensor: TensorId) -> Places | None:
        shape = self.graph.sizes(tensor)
        if shape is None:
            return None
        size, start = prod(shape), sum(map(prod, self.shapes))
        if start + size > LARGEST:
            return None
        self.sources.append(tensor)
        self.starts.append(start)
        self.shapes.append(shape)
        return np.arange(start, start + size, dtype=np.int32).reshape(shape)

    def moved(self, node: Node, tensor: TensorId) -> Places | None:
        data, arguments = _MOVES[node.op]
        places = [self.places(source) for source in node.inputs[data]]
        values = [integers(self.graph, source) for source in node.inputs[arguments]]
        if any(item is None for item in (*places, *values)):
            return None
        return self.carry_out(node, [item for item in places if item is not None], values, tensor)

    def carry_out(self, node: Node, places: list[Places], values: list[Any], tensor: TensorId) -> Places | None:
        match node.op:
            case "Identity":
                return places[0]
            case "Transpose":
                return places[0].transpose(values[0])
            case "Slice":
                return _slice(places, *values)
            case "Split":
                return np.split(places[0], node.outputs, int(values[0]))[tensor.index]
            case "SplitV":
                return np.split(places[0], np.cumsum(values[0])[:-1], int(values[1]))[tensor.index]
            case "ConcatV2":
                return np.concatenate(places, int(values[0]))
            case "Reshape":
                return places[0].reshape(values[0])
        shape = self.graph.sizes(tensor)  # Squeeze and ExpandDims
        return None if shape is None else places[0].reshape(shape)
