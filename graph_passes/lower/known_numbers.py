"""Numbers that a graph says: constants and attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from custom_ops.expr.program import DTYPES
from custom_ops.expr.reference import HALF_TYPES, numpy_dtype
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed

_LIKE = {"ZerosLike": 0, "OnesLike": 1}
# Where a tensor's protocol buffer has its numbers, unless it has their bytes.
_FIELDS = ("float_val", "double_val", "int_val", "int64_val", "bool_val", "half_val")


def constant(graph: Graph, tensor: TensorId) -> npt.NDArray[Any] | None:
    """The value of a small constant."""
    return graph.constants.get(passed(graph, tensor).node)


def integers(graph: Graph, tensor: TensorId) -> list[int] | None:
    """The elements of a small constant of integers; None if it is no constant, or one of another dtype."""
    found = constant(graph, tensor)
    return None if found is None or found.dtype.kind not in "iu" else [int(value) for value in found.reshape(-1)]


def number_of(graph: Graph, tensor: TensorId) -> float | int | bool | None:
    """The number that a constant is everywhere, however large and even if its size is not known; None if it is no
    constant, or holds several."""
    spec = graph.specs.get(tensor)
    if spec is None or spec.dtype not in DTYPES:
        return None
    if (op := graph[passed(graph, tensor).node].op) in _LIKE:
        return _LIKE[op]
    found = constant(graph, tensor)
    if found is None:
        found = _one_number(graph, passed(graph, tensor))
    if found is None or not found.size:
        return None
    first = found.reshape(-1)[:1]
    if found.tobytes() != first.tobytes() * found.size:  # 0.0 equals -0.0, and NaN nothing
        return None
    number: float | int | bool = first.item() if first.dtype.kind in "iub" else first.astype(np.float64).item()
    return number


def _one_number(graph: Graph, tensor: TensorId) -> npt.NDArray[Any] | None:
    """The number that a large constant says once, for all of its elements."""
    node, spec = graph[tensor.node], graph.specs.get(tensor)
    proto = getattr(node.attrs.get("value"), "tensor", None)
    if node.op != "Const" or proto is None or spec is None or proto.tensor_content:
        return None
    numbers = [number for field in _FIELDS for number in list(getattr(proto, field))[:2]]
    if len(numbers) != 1:
        return None
    dtype = numpy_dtype(spec.dtype)
    return np.array(numbers, np.uint16).view(dtype) if spec.dtype in HALF_TYPES else np.array(numbers, dtype)
