"""Replaces the products that `plan_products` names; makes no choice."""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.jit.image import KernelImage
from graph_passes.ir import Code, Graph, TensorId, boolean

MATMUL_OP = "TfmemMatMul"


def apply_products(graph: Graph, names: Sequence[str], programs: Sequence[KernelImage]) -> None:
    """Replace each of `names`, which nobody fetches, by a TfmemMatMul.

    Args:
        graph: is edited.
        names: as `plan_products` found them.
        programs: of the GPU that runs the graph, in the op's order.
    """
    for name in names:
        node = graph[name]
        attrs = {
            "num_args": len(node.inputs) - 2,
            "transpose_a": boolean(node.attrs.get("transpose_a")),
            "transpose_b": boolean(node.attrs.get("transpose_b")),
            "programs": tuple(program.to_text() for program in programs),
            "images": tuple(Code(program.code) for program in programs),
        }
        spec = graph.specs.get(TensorId(name))
        inserted = graph.insert(f"{name}/TensorCores", MATMUL_OP, node.inputs, attrs, node.device, node.control)
        for use in [*graph.uses(TensorId(name))]:
            graph.rewire(use.node, use.index, TensorId(inserted))
        for waiting in [*graph.waiting(node)]:
            graph.add_control(waiting, inserted)
        graph.remove([name])
        if spec is not None:
            graph.specs[TensorId(inserted)] = spec
