"""Graphs of TensorFlow's ops on float32, node by node, and what gives them to a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec

FLOAT = {"T": DataType("float32")}


class Build:
    """A graph, node by node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[TensorId, TensorSpec] = {}
        self.constants: dict[str, Any] = {}

    def __call__(self, name: str, op: str, shape: Sequence[int | None], *inputs: str, **attrs: Any) -> str:
        node = Node(name, op, [TensorId(each) for each in inputs], attrs={**FLOAT, **attrs}, outputs=1)
        self.nodes.append(node)
        self.specs[TensorId(name)] = TensorSpec("float32", 4, tuple(shape))
        return name

    def axes(self, name: str, *axes: int) -> str:
        self.nodes.append(Node(name, "Const", attrs={"dtype": DataType("int32")}, outputs=1))
        self.specs[TensorId(name)] = TensorSpec("int32", 4, (len(axes),))
        self.constants[name] = np.array(axes, np.int32)
        return name

    def graph(self) -> Graph:
        return Graph(self.nodes, self.specs, self.constants)


class Given:
    """A source of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def read(self, **how: Any) -> Graph:
        return self.graph

    def keep(self, graph: Graph) -> set[str]:
        return {"out"}
