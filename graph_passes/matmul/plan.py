"""Decides which products take longer in cuBLAS than on tensor cores. Pure: a graph in, names out."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.ir import Graph, Node, TensorId, TensorSpec, boolean

BIAS = ("BiasAdd",)  # what a product may have fused
# From so many rows and multiply-adds on it is worth it to cut both operands (benchmarks/matmul.py on an H200).
LEAST_ROWS = 100
LEAST = 1 << 26
ROWS = 512  # of a product whose rows nobody knows before it runs


def plan_products(graph: Graph, among: Collection[str]) -> tuple[str, ...]:
    """The names of the products to replace.

    Args:
        graph: with the shapes that are known.
        among: names of nodes; those that are no products of two float32 matrices stay.
    """
    return tuple(name for name in among if name in graph.nodes and _replaced(graph, graph[name]))


def worth_it(weights: int, rows: int | None) -> bool:
    """Whether a matrix of so many numbers times so many rows takes less time on tensor cores; None: nobody knows."""
    rows = ROWS if rows is None else rows
    return rows >= LEAST_ROWS and weights * rows >= LEAST


def _replaced(graph: Graph, node: Node) -> bool:
    if node.op != "MatMul" and (node.op != "_FusedMatMul" or _fused(node) != BIAS):
        return False
    left, right = (_matrix(graph, tensor) for tensor in node.inputs[:2])
    if left is None or right is None:
        return False
    rows = (left.shape or ())[1 if boolean(node.attrs.get("transpose_a")) else 0]
    return right.nbytes is not None and worth_it(right.nbytes // right.itemsize, rows)


def _matrix(graph: Graph, tensor: TensorId) -> TensorSpec | None:
    spec = graph.specs.get(tensor)
    return spec if spec and spec.dtype == "float32" and spec.shape is not None and len(spec.shape) == 2 else None


def _fused(node: Node) -> tuple[str, ...]:
    """What a `_FusedMatMul` does behind the product; its attributes are read from a GraphDef, or written by a pass."""
    ops = node.attrs["fused_ops"]
    return ops if isinstance(ops, tuple) else tuple(op.decode() for op in ops.list.s)
