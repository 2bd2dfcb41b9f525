"""Replaces products that `plan_products` names; makes no choice."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.ir import Editor, Graph, Node, TensorId, boolean
from graph_passes.rewrite import Names, NewNode, Rewrite, apply_rewrites

MATMUL_OP = "TfmemMatMul"


def apply_products(graph: Graph, names: Sequence[str], programs: Sequence[bytes], editor: Editor | None = None) -> None:
    """Replace each of `names`, which nobody fetches, by a TfmemMatMul.

    Args:
        graph: is edited.
        names: as `plan_products` found them.
        programs: of the GPU that runs the graph, in the op's order.
        editor: see `apply_rewrites`.
    """
    fresh = Names(graph)
    apply_rewrites([_rewrite(graph[name], programs, fresh) for name in names], graph, editor)


def _rewrite(node: Node, programs: Sequence[bytes], names: Names) -> Rewrite:
    attrs = {
        "num_args": len(node.inputs) - 2,
        "transpose_a": boolean(node.attrs.get("transpose_a")),
        "transpose_b": boolean(node.attrs.get("transpose_b")),
        "programs": tuple(programs),
    }
    name = names.fresh(f"{node.name}/TensorCores")
    new = NewNode(name, MATMUL_OP, tuple(node.inputs), attrs, node.device, tuple(node.control))
    rewired = ((TensorId(node.name), TensorId(name)),)
    return Rewrite(node.name, (new,), rewired, replaced=(node.name,), successor=name)
