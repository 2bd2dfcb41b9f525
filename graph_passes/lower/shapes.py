"""Sizes of tensors, and which of the unknown ones are equal all the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Protocol, TypeAlias

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec, boolean, integer
from graph_passes.graph.ops import CONVOLUTIONS, IDENTITIES, IN_PLACE, passed
from graph_passes.graph.order import topological
from graph_passes.lower.known_numbers import integers
from graph_passes.lower.slicing import part_of, shaped_by, taken

Shape: TypeAlias = tuple[int, ...]

_IMAGE_GRADIENTS = frozenset({"AvgPoolGrad", *(op for op in CONVOLUTIONS if "BackpropInput" in op)})
_BATCH_FIRST = CONVOLUTIONS | {"MaxPool", "AvgPool"}
_LIKE_FIRST = frozenset({"ZerosLike", "OnesLike", "Cast", "ReverseV2", "Roll", "Cumsum", "LogSoftmax"})
# All inputs are broadcast.
_BROADCASTS = IN_PLACE | {"Softmax", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
# The first input says the shape.
_SHAPED = frozenset({"Fill", "StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomUniformFullIntV2"})
# Ops that add up rows: which input has the rows, and which one their places.
_ROWS = {"UnsortedSegmentSum": (0, 1), "ScatterNd": (1, 0)}
_ROWS |= dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"), (2, 1))
# Attributes that say whether a product's factors are transposed.
TRANSPOSES = {"MatMul": ("transpose_a", "transpose_b"), "_FusedMatMul": ("transpose_a", "transpose_b")}
TRANSPOSES |= dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), ("adj_x", "adj_y"))
# All inputs have the same shape, or it is an error.
_ALIKE = frozenset(
    {
        "AddN", "ReluGrad", "Relu6Grad", "EluGrad", "SeluGrad", "LeakyReluGrad", "SoftplusGrad", "SoftsignGrad",
        "SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad",
    }
)  # fmt: skip


class HandleInput(Protocol):
    """A variable, by an op's input that is its handle."""

    @property
    def node(self) -> str:
        """The op."""

    @property
    def index(self) -> int:
        """Its input."""


def variable_spec(graph: Graph, node: str, index: int) -> TensorSpec | None:
    """What the variable holds whose handle is input `index` of `node`."""
    handle = graph.specs.get(graph[node].inputs[index])
    return handle.behind if handle is not None else None


class Shapes:
    """The shape of every tensor of a graph, as integers.

    A negative one stands for a size that is known when the step runs; equal ones are equal then. They follow from the
    ops between the tensors: a batch keeps its size through a layer, and sparse labels are as many as the logits.

    Args:
        graph: the graph, with specs.
        equal: what the caller knows: groups of dimensions that are equal, such as the first ones of all inputs.
    """

    def __init__(self, graph: Graph, equal: Iterable[Sequence[tuple[TensorId, int]]] = ()) -> None:
        self._graph = graph
        self._found: dict[TensorId, Shape] = {}
        self._equal: dict[int, int] = {}
        if any(None in (spec.shape or ()) for spec in graph.specs.values()):
            first = {dimension: group[0] for group in equal for dimension in group}
            for name in topological(graph):
                self._read(graph[name])
                for output, (tensor, place) in first.items():
                    if output[0].node == name or tensor.node == name:
                        self._unite(self._dimension(*output), self._dimension(tensor, place))

    def __getitem__(self, value: TensorId | HandleInput) -> Shape:
        spec = self.spec(value)
        if spec is None or spec.shape is None:
            raise KeyError(value)
        if isinstance(value, TensorId) and value in self._found:
            return tuple(map(self._same, self._found[value]))
        return tuple(self._new() if size is None else size for size in spec.shape)

    def spec(self, value: TensorId | HandleInput) -> TensorSpec | None:
        """What inference knows of it."""
        if isinstance(value, TensorId):
            return self._graph.specs.get(value)
        return variable_spec(self._graph, value.node, value.index)

    def dtype(self, value: TensorId | HandleInput) -> str:
        """The name of its dtype."""
        spec = self.spec(value)
        if spec is None:
            raise KeyError(value)
        return spec.dtype

    def _new(self) -> int:
        number = -len(self._equal) - 1
        self._equal[number] = number
        return number

    def _same(self, size: int) -> int:
        while self._equal.get(size, size) != size:
            size = self._equal[size]
        return size

    def _unite(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Two shapes are equal, or it is an error."""
        for first, second in zip(map(self._same, one), map(self._same, other), strict=False):
            if first < 0 and second < 0 and first != second:
                self._equal[max(first, second)] = min(first, second)

    def _dimension(self, tensor: TensorId, place: int) -> Shape:
        return self._found[tensor][place : place + 1] if tensor in self._found else ()

    def _read(self, node: Node) -> None:
        known = [
            spec.shape if (spec := self._graph.specs.get(t)) is not None else None for t in self._graph.tensors(node)
        ]
        given = [self._of(tensor) for tensor in node.inputs]
        for output, shape in enumerate(known):
            if shape is not None and None in shape:
                rule = self._rule(node, output, given)
                inferred = rule if rule is not None and len(rule) == len(shape) else (None,) * len(shape)
                self._found[TensorId(node.name, output)] = tuple(
                    size if size is not None else self._new() if found is None or found >= 0 else found
                    for size, found in zip(shape, inferred, strict=True)
                )
        if node.op in _ALIKE:
            for other in given[1:]:
                self._unite(given[0] or (), other or ())
        elif node.op == "SparseSoftmaxCrossEntropyWithLogits":
            self._unite((given[0] or ())[:1], given[1] or ())
        elif node.op in _IMAGE_GRADIENTS:
            self._unite(self._dimension(TensorId(node.name), 0), (given[-1] or ())[:1])
        elif node.op in _ROWS:
            rows, ids = (given[place] or () for place in _ROWS[node.op])
            self._unite(rows, ids[:-1] if node.op == "ScatterNd" else ids)
        elif node.op == "Slice" and (part := part_of(self._graph, node)) is not None:
            self._unite_parts([given[0] or (), self._of(part.joined) or ()], part.axis)
        elif node.op == "ConcatV2" and (place := integers(self._graph, node.inputs[-1])):
            self._unite_parts([shape for shape in given[:-1] if shape], place[0])

    def _unite_parts(self, shapes: Sequence[Shape], place: int) -> None:
        """What is joined along one dimension has the same sizes along all others."""
        for shape in shapes[1:]:
            for number, (one, other) in enumerate(zip(shapes[0], shape, strict=False)):
                if number != place % len(shape):
                    self._unite((one,), (other,))

    def _of(self, tensor: TensorId) -> Shape | None:
        spec = self._graph.specs.get(tensor)
        return None if spec is None or spec.shape is None else self[tensor]

    def _rule(self, node: Node, output: int, given: Sequence[Shape | None]) -> Sequence[int | None] | None:
        """The sizes of an output, None for those of which nothing is known; None if nothing is known at all."""
        if not given or given[0] is None:
            return None
        first, second = given[0], given[1] if len(given) > 1 else None
        if node.op in IDENTITIES | _LIKE_FIRST:
            return given[output] if node.op == "IdentityN" else first
        if node.op in ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"):
            return first[:1] if output == 0 else first
        if node.op in ("TopK", "TopKV2"):
            return (*first[:-1], None)
        if node.op == "ResourceGather" and second is not None and not integer(node.attrs.get("batch_dims", 0)):
            held = variable_spec(self._graph, node.name, 0)
            return (*second, *held.shape[1:]) if held is not None and held.shape else None
        if node.op in _IMAGE_GRADIENTS:  # the first input says sizes
            image = shaped_by(self._graph, passed(self._graph, node.inputs[0]))
            batch = (given[-1] if image is None else self._of(image)) or (None,)
            return (batch[0], *(None,) * (first[0] - 1))
        if node.op in _BATCH_FIRST:
            return (first[0], *(None,) * (len(first) - 1))
        if node.op in TRANSPOSES and second is not None and len(first) == len(second):
            turned = [boolean(node.attrs.get(name)) for name in TRANSPOSES[node.op]]
            return (*first[:-2], first[-1 if turned[0] else -2], second[-2 if turned[1] else -1])
        if node.op in _BROADCASTS:
            return self._broadcast([shape for shape in given if shape is not None]) if None not in given else None
        if node.op == "Slice" and (part := part_of(self._graph, node)) is not None:
            return self._of(part.joined)
        asked = passed(self._graph, node.inputs[0])
        if node.op in _SHAPED and self._graph[asked.node].op == "Shape":
            return self._of(self._graph[asked.node].inputs[0])
        constants = [integers(self._graph, tensor) for tensor in node.inputs]
        return _layout(self._graph, node, first, second, constants)

    def _broadcast(self, shapes: Sequence[Shape]) -> list[int | None]:
        rank = max(map(len, shapes))
        found: list[int | None] = []
        for place in range(-rank, 0):
            sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
            known = [size for size in sizes if size > 0]
            found.append(1 if not sizes else known[0] if known else sizes.pop() if len(sizes) == 1 else None)
        return found


def _layout(
    graph: Graph, node: Node, first: Shape, second: Shape | None, constants: Sequence[list[int] | None]
) -> Sequence[int | None] | None:
    """The shape that an op gives which moves elements, or reduces over some dimensions."""
    argument = constants[1] if len(constants) > 1 else None
    if node.op in ("Sum", "Mean", "Max", "Min", "Prod", "Any", "All") and argument is not None:
        over = {place % len(first) for place in argument} if first else set()
        kept = boolean(node.attrs.get("keep_dims"))
        return [1 if place in over else size for place, size in enumerate(first) if kept or place not in over]
    if node.op == "Transpose" and argument is not None:
        return [first[place] for place in argument]
    target = graph.specs[TensorId(node.name)].shape or ()
    if node.op in ("ExpandDims", "Squeeze"):
        return _with_ones(first, target)
    if node.op == "Reshape":
        return _reshaped(first, target)
    if node.op == "Tile" and argument is not None:
        return [size if factor == 1 else None for size, factor in zip(first, argument, strict=True)]
    if node.op in ("Pad", "PadV2") and argument is not None:
        pads = zip(argument[::2], argument[1::2], strict=True)
        return [None if any(pad) else size for size, pad in zip(first, pads, strict=True)]
    if node.op == "Slice" and argument is not None and (lengths := constants[2]) is not None:
        taken_whole = ((begin, length) == (0, -1) for begin, length in zip(argument, lengths, strict=True))
        return [size if whole else None for size, whole in zip(first, taken_whole, strict=True)]
    if node.op == "ConcatV2" and constants[-1] is not None:
        return [None if place == constants[-1][0] % len(first) else size for place, size in enumerate(first)]
    if node.op == "OneHot":
        place = integer(node.attrs.get("axis", -1)) % (len(first) + 1)
        return (*first[:place], None, *first[place:])
    if node.op == "Pack":
        place = integer(node.attrs.get("axis", 0)) % (len(first) + 1)
        return (*first[:place], len(node.inputs), *first[place:])
    if node.op == "GatherV2" and second is not None and constants[2] is not None:
        place = constants[2][0] % len(first)
        return (*first[:place], *second, *first[place + 1 :])
    if node.op == "StridedSlice" and (places := taken(graph, node, node.inputs[1:4], first)) is not None:
        ends = integer(node.attrs.get("end_mask", 0)) & ~integer(node.attrs.get("ellipsis_mask", 0))
        found: list[int | None] = [None] * len(target)
        for place, (each, size) in enumerate(zip(places, first, strict=True)):
            whole = each.begin == 0 and each.step == 1 and (ends >> place & 1 or place >= len(argument or ()))
            if each.output is not None and each.output < len(target) and whole:
                found[each.output] = size
        return found
    return None


def _reshaped(source: Shape, target: Sequence[int | None]) -> Sequence[int | None] | None:
    """The one size that is not known is the same if all others make up as many elements."""
    wide = [size for size in source if size != 1]
    others = [size for size in target if size != 1]
    unknown = [size for size in wide if size < 0]
    if len(unknown) != 1 or others.count(None) != 1:
        return None
    same = prod(size for size in wide if size > 0) == prod(size for size in others if size is not None)
    return [unknown[0] if size is None and same else size for size in target]


def _with_ones(source: Shape, target: Sequence[int | None]) -> Sequence[int | None] | None:
    """Dimensions of size 1 come and go, and no others."""
    left = [size for size in source if size != 1]
    if len(left) != sum(size != 1 for size in target):
        return None
    return [1 if size == 1 else left.pop(0) for size in target]
