"""When two scalars of a graph are surely the same number: lengths, batch sizes and bounds of loops.

A scalar is reduced to a number, or to "dimension `axis` of tensor `x`", or else stays the tensor it is.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from graph_passes.graph import slices
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed, scalar_value

Key: TypeAlias = int | tuple[TensorId, int] | TensorId

# The output has the shape of input 0.
_SAME_SHAPE = frozenset({"ReverseV2", "ReverseSequence", "Cast", "ZerosLike", "OnesLike", "LogicalNot", "Relu", "Tanh"})


def scalar_key(graph: Graph, tensor: TensorId) -> Key:
    """What the scalar `tensor` is; equal keys are equal numbers."""
    source = passed(graph, tensor)
    number = scalar_value(graph, source)
    if isinstance(number, int):
        return int(number)
    node = graph[source.node]
    if node.op in ("Max", "Min", "Sum", "Prod") and _is_scalar(graph, node.inputs[0]):
        return scalar_key(graph, node.inputs[0])
    if node.op in ("Maximum", "Minimum"):
        sides = {scalar_key(graph, side) for side in node.inputs}
        return sides.pop() if len(sides) == 1 else source
    if node.op == "StridedSlice":
        axes = slices.axes(graph, node)
        if axes is not None and len(axes) == 1 and axes[0].single and isinstance(axes[0].begin, int):
            element = element_key(graph, node.inputs[0], axes[0].begin)
            return source if element is None else element
    if node.op in ("Cast", "Squeeze", "Reshape") and _is_scalar(graph, node.inputs[0]):
        return scalar_key(graph, node.inputs[0])
    return source


def dimension_key(graph: Graph, tensor: TensorId, axis: int) -> Key:
    """What dimension `axis` of `tensor` is."""
    source = passed(graph, tensor)
    spec = graph.specs.get(source)
    if spec is not None and spec.shape is not None:
        axis %= max(len(spec.shape), 1)
        dim = spec.shape[axis]
        if dim is not None:
            return dim
    node = graph[source.node]
    if node.op in _SAME_SHAPE:
        return dimension_key(graph, node.inputs[0], axis)
    if node.op == "Transpose":
        order = graph.constants.get(passed(graph, node.inputs[1]).node)
        if order is not None:
            return dimension_key(graph, node.inputs[0], int(order[axis]))
    if node.op == "ExpandDims":
        place = scalar_value(graph, node.inputs[1])
        if place is not None and (int(place) < 0 or axis < int(place)):
            rank = len(spec.shape) if spec is not None and spec.shape is not None else None
            place = int(place) + rank if int(place) < 0 and rank is not None else int(place)
            if 0 <= place != axis:
                return dimension_key(graph, node.inputs[0], axis - (axis > place))
    if node.op == "Fill":
        return element_key(graph, node.inputs[0], axis) or (source, axis)
    return source, axis


def element_key(graph: Graph, tensor: TensorId, index: int) -> Key | None:
    """What element `index` of a shape vector is."""
    source = passed(graph, tensor)
    constant: Any = graph.constants.get(source.node)
    if constant is not None:
        return int(constant[index])
    node = graph[source.node]
    if node.op == "Pack":
        return scalar_key(graph, node.inputs[index])
    if node.op == "Shape":
        return dimension_key(graph, node.inputs[0], index)
    return None


def _is_scalar(graph: Graph, tensor: TensorId) -> bool:
    spec = graph.specs.get(tensor)
    return spec is not None and spec.shape == ()
