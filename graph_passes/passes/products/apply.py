"""What a `ProductPlan` does to a graph; makes no choice."""

from __future__ import annotations

from custom_ops.jit.image import KernelImage
from graph_passes.graph.ir import Code, Graph, Node, TensorId, boolean
from graph_passes.graph.rewrite import Names, NewNode, Rewrite
from graph_passes.passes.products.plan import ProductPlan

MATMUL_OP = "TfmemMatMul"


def product_rewrites(plan: ProductPlan, graph: Graph) -> list[Rewrite]:
    """Each product of `plan` becomes a TfmemMatMul, where there are kernels."""
    names = Names(graph)
    return [_rewrite(graph[name], plan.programs, names) for name in plan.names] if plan.programs else []


def _rewrite(node: Node, programs: tuple[KernelImage, ...], names: Names) -> Rewrite:
    attrs = {
        "num_args": len(node.inputs) - 2,
        "transpose_a": boolean(node.attrs.get("transpose_a")),
        "transpose_b": boolean(node.attrs.get("transpose_b")),
        "programs": tuple(program.to_text() for program in programs),
        "images": tuple(Code(program.code) for program in programs),
    }
    name = names.fresh(f"{node.name}/TensorCores")
    new = NewNode(name, MATMUL_OP, tuple(node.inputs), attrs, node.device, tuple(node.control))
    rewired = ((TensorId(node.name), TensorId(name)),)
    return Rewrite(node.name, (new,), rewired, replaced=(node.name,), successor=name)
