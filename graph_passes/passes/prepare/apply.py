"""What a `PreparePlan` does to a graph; makes no choice."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.analysis.equal_numbers import equal_rewrites
from graph_passes.graph.flatten import flat_product_rewrites
from graph_passes.graph.ir import DataType, Graph, TensorId
from graph_passes.graph.ops import copied
from graph_passes.graph.rewrite import Names, Rewrite
from graph_passes.graph.writer import Writer
from graph_passes.passes.prepare.copies import Recomputed
from graph_passes.passes.prepare.einsum import EinsumProduct
from graph_passes.passes.prepare.plan import PreparePlan
from graph_passes.passes.prepare.seeds import SEEDED, Seeded

_FLAGS = "transpose_a transpose_b"


def prepare_rewrites(plan: PreparePlan, graph: Graph) -> list[Rewrite]:
    """What the plan says, product by product and value by value."""
    names = Names(graph)
    return [
        *equal_rewrites(plan.equal),
        *einsum_rewrites(plan.einsums, graph, names),
        *seeded_rewrites(plan.seeded, graph, names),
        *flat_product_rewrites(plan.products, graph, names),
        *recompute_rewrites(plan.recomputed, graph, names),
    ]


def recompute_rewrites(plan: Sequence[Recomputed], graph: Graph, names: Names) -> list[Rewrite]:
    """Each node gets a second one for its late readers."""
    found = []
    for each in plan:
        node = graph[each.name]
        writer = Writer(names, each.name, node.device)
        again = writer.again(node, *node.inputs)
        readers = tuple((use, again) for use in each.late)
        found.append(Rewrite(each.name, tuple(writer.nodes), inputs=readers, order=((again.node, each.after),)))
    return found


def einsum_rewrites(plan: Sequence[EinsumProduct], graph: Graph, names: Names) -> list[Rewrite]:
    """Each becomes a product of transposed and reshaped operands."""
    found = []
    for each in plan:
        node, dtype = graph[each.name], graph.specs[TensorId(each.name)].dtype
        writer = Writer(names, each.name, node.device)
        factors = []
        for operand in (each.left, each.right):
            tensor = node.inputs[operand.input]
            if operand.order is not None:
                tensor = writer.transposed(tensor, dtype, operand.order)
            factors.append(writer.reshape(tensor, dtype, operand.shape))
        op, flags = ("BatchMatMulV2", "adj_x adj_y") if len(each.left.shape) == 3 else ("MatMul", _FLAGS)
        flipped = dict(zip(flags.split(), (each.left.flipped, each.right.flipped), strict=True))
        made = writer.reshape(writer.emit(op, factors, {"T": node.attrs["T"], **flipped}), dtype, each.result)
        if each.order is not None:
            made = writer.transposed(made, dtype, each.order)
        rewired = ((TensorId(each.name), made),)
        found.append(Rewrite(each.name, tuple(writer.nodes), rewired, replaced=(each.name,), successor=made.node))
    return found


def seeded_rewrites(plan: Sequence[Seeded], graph: Graph, names: Names) -> list[Rewrite]:
    """Each becomes an op that takes the seed."""
    found = []
    for each in plan:
        node = graph[each.name]
        writer = Writer(names, f"{each.name}/Seeded", node.device)
        attrs = {"T": copied(node)["Tshape"], "Tseed": DataType("int64"), "dtype": copied(node)["dtype"]}
        made = writer.emit(SEEDED, [node.inputs[0], each.seed], attrs)
        found.append(
            Rewrite(
                each.name,
                tuple(writer.nodes),
                ((TensorId(each.name), made),),
                replaced=each.replaced,
                successor=made.node,
            )
        )
    return found
