"""Small graphs that the fusion pass leaves in parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from tests.pure.test_fusion_lowering import Builder

Shape = tuple[int | None, ...] | None


def chain(*ops: tuple[str, str, tuple[str, ...]]) -> Graph:
    """Ops on vectors, each (name, type, inputs); "x" is an input."""
    b = Builder()
    b.add("x", "Placeholder", (), (1 << 12,))
    for name, op, inputs in ops:
        b.add(name, op, inputs, (1 << 12,))
    return b.graph()


def tensors(*given: tuple[str, str, tuple[str, ...], Shape, dict[str, Any]]) -> Graph:
    """Ops, each (name, type, inputs, shape, attributes); attributes name dtype, value and count of outputs, too."""
    nodes, specs, constants = [], {}, {}
    for name, op, inputs, shape, attrs in given:
        more = dict(attrs)
        dtype = more.pop("dtype", "float32")
        if "value" in more:
            constants[name] = np.array(more.pop("value"), dtype)
        count = more.pop("outputs", 1)
        nodes.append(Node(name, op, list(map(TensorId, inputs)), outputs=count, attrs=more))
        specs |= {TensorId(name, place): TensorSpec(dtype, 4, shape) for place in range(count)}
    return Graph(nodes, specs, constants)
