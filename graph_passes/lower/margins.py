"""Kernels that put zeros around a tensor, or take them away, for calls that are steps of no graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.lower.lower_nodes import LoweredKernel, lower_kernel

_GIVEN, _MADE = "given", "made"


def with_margins(given: TensorSpec, made: TensorSpec, margins: Sequence[tuple[int, int]]) -> LoweredKernel:
    """Makes of a tensor a larger one, with so many zeros before and behind it in each dimension."""
    return _kernel("Pad", given, made, [margins])


def without_margins(given: TensorSpec, made: TensorSpec, margins: Sequence[tuple[int, int]]) -> LoweredKernel:
    """Makes a tensor of a larger one, which has so many more numbers before and behind it in each dimension."""
    sizes = [-1 if size is None else size for size in made.shape or ()]
    return _kernel("Slice", given, made, [[before for before, _ in margins], sizes])


def _kernel(op: str, given: TensorSpec, made: TensorSpec, constants: Sequence[Sequence[object]]) -> LoweredKernel:
    values = {f"constant_{place}": np.array(value, np.int32) for place, value in enumerate(constants)}
    specs = {TensorId(name): TensorSpec("int32", 4, value.shape) for name, value in values.items()}
    nodes = [Node(_GIVEN, "Placeholder", outputs=1), *(Node(name, "Const", outputs=1) for name in values)]
    nodes.append(Node(_MADE, op, [TensorId(node.name) for node in nodes], outputs=1))
    graph = Graph(nodes, {**specs, TensorId(_GIVEN): given, TensorId(_MADE): made}, values)
    return lower_kernel(graph, [_MADE], [TensorId(_MADE)])
