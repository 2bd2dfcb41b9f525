"""Batched products that are one product of larger matrices: all rows of a batch times one matrix, and products that are
added up over the batch. Such are an attention's projections, and the gradients of their weights.

    [32, 128, 768] [768, 768]                      = reshaped [4096, 768] [768, 768]
    sum over b of [b, 128, 768]^T [b, 128, 768]    = reshaped [4096, 768]^T [4096, 768]

The latter otherwise stores 32 matrices of weights, only to add them up. Numbers are added in another order, as they are
with every other algorithm of a library's product.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from graph_passes.graph.ir import Graph, Node, TensorId, boolean
from graph_passes.graph.rewrite import Names, Rewrite
from graph_passes.graph.writer import Writer

BATCHED = frozenset({"BatchMatMul", "BatchMatMulV2"})
UNKNOWN = -1
WIDE = frozenset({"float32", "float64"})
HALF = frozenset({"half", "float16", "bfloat16"})  # which TensorFlow rounds to before it adds up


@dataclass(frozen=True)
class FlatProduct:
    """A batched product as one.

    Attributes:
        product: the name of its node.
        total: the name of the node that adds it up over its batch; "" if none does.
        left, right, result: shapes, of the operands those of matrices; `UNKNOWN` is what the number of elements leaves.
    """

    product: str
    total: str
    left: tuple[int, int]
    right: tuple[int, int]
    result: tuple[int, ...]


def flat_products(graph: Graph, keep: Collection[str]) -> tuple[FlatProduct, ...]:
    """The batched products of a graph that are flat; the nodes named in `keep` are fetched, and stay."""
    found = (_flat(graph, node, keep) for node in graph if node.op in BATCHED and node.name not in keep)
    return tuple(each for each in found if each is not None)


def flat_product_rewrites(plan: Sequence[FlatProduct], graph: Graph, names: Names) -> list[Rewrite]:
    """Each becomes a MatMul of reshaped operands."""
    return [_rewrite(each, graph, names) for each in plan]


def _flat(graph: Graph, node: Node, keep: Collection[str]) -> FlatProduct | None:
    left, right, result = (_shape(graph, tensor) for tensor in (*node.inputs, TensorId(node.name)))
    if not left or not right or not result or len(left) < 3 or node.control:
        return None
    dtype = graph.specs[TensorId(node.name)].dtype
    if dtype not in (*WIDE, *HALF):
        return None
    adjoint_left, adjoint_right = (boolean(node.attrs.get(name)) for name in ("adj_x", "adj_y"))
    total = _adds_up(graph, node, len(result) - 2, keep)
    alike = left[:-2] == right[:-2] and UNKNOWN not in left
    if total and dtype in WIDE and alike and adjoint_left and not adjoint_right:
        return FlatProduct(node.name, total, (UNKNOWN, left[-1]), (UNKNOWN, right[-1]), result[-2:])
    alone = UNKNOWN not in right and prod(right[:-2]) == 1
    if alone and not adjoint_left and prod(left[:-2]) != 1 and UNKNOWN not in result[1:]:
        return FlatProduct(node.name, "", (UNKNOWN, left[-1]), (right[-2], right[-1]), (UNKNOWN, *result[1:]))
    return None


def _shape(graph: Graph, tensor: TensorId) -> tuple[int, ...]:
    """The sizes, or `UNKNOWN`; empty where the rank is unknown, or a matrix may be empty."""
    spec = graph.specs.get(tensor)
    shape = spec.shape if spec is not None else None
    sizes = tuple(UNKNOWN if size is None else size for size in shape or ())
    return sizes if 0 not in sizes and UNKNOWN not in sizes[-1:] else ()


def _adds_up(graph: Graph, node: Node, batch: int, keep: Collection[str]) -> str:
    """The one reader of a product, if it adds it up over its first `batch` dimensions; else ""."""
    uses = list(graph.uses(TensorId(node.name)))
    reader = graph[uses[0].node] if len(uses) == 1 else None
    if reader is None or reader.op != "Sum" or uses[0].index != 0 or reader.name in keep or reader.control:
        return ""
    axes = graph.constants.get(reader.inputs[1].node)
    if axes is None or boolean(reader.attrs.get("keep_dims")):
        return ""
    found = {int(axis) % (batch + 2) for axis in axes.reshape(-1)}
    return reader.name if found == set(range(batch)) else ""


def _rewrite(plan: FlatProduct, graph: Graph, names: Names) -> Rewrite:
    node, dtype = graph[plan.product], graph.specs[TensorId(plan.product)].dtype
    last = plan.total or plan.product
    writer = Writer(names, f"{last}/Flat", node.device)
    left, right = (
        writer.reshape(tensor, dtype, shape) for tensor, shape in zip(node.inputs, (plan.left, plan.right), strict=True)
    )
    attrs = {
        "T": node.attrs["T"],
        "transpose_a": bool(plan.total),
        "transpose_b": not plan.total and boolean(node.attrs.get("adj_y")),
    }
    made = writer.emit("MatMul", [left, right], attrs)
    if not plan.total:
        made = writer.reshape(made, dtype, plan.result)
    replaced = (plan.total, plan.product) if plan.total else (plan.product,)
    return Rewrite(last, tuple(writer.nodes), ((TensorId(last), made),), replaced=replaced, successor=made.node)
