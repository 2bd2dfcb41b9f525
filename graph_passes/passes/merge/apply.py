"""What a `MergePlan` does to a graph; makes no choice."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.rewrite import Names, Rewrite
from graph_passes.graph.writer import Writer
from graph_passes.passes.merge.plan import Group, MergePlan


def merge_rewrites(plan: MergePlan, graph: Graph) -> list[Rewrite]:
    """One for each family."""
    names = Names(graph)
    return [_rewrite(family, graph, names) for family in plan.families]


def _rewrite(family: Sequence[Group], graph: Graph, names: Names) -> Rewrite:
    first = graph[family[0].products[0]]
    writer = Writer(names, f"{first.name}/Merged", first.device)
    rewired: list[tuple[TensorId, TensorId]] = []
    replaced: list[str] = []
    made = TensorId(first.name)
    for group in family:
        dtype = group.merged.dtype
        left, right = (writer.joined(each.parts, dtype, each.axis) for each in (group.left, group.right))
        attrs = {
            "T": graph[group.products[0]].attrs["T"],
            "transpose_a": group.merged.left_transposed,
            "transpose_b": group.merged.right_transposed,
        }
        made = writer.emit("MatMul", [left, right], attrs)
        if group.total:
            result = TensorId(group.total)
            total = writer.reshape(made, dtype, graph.sizes(result) or ())
            if group.rest:
                total = writer.emit("AddN", [*group.rest, total], {"N": len(group.rest) + 1, "T": attrs["T"]})
            rewired.append((result, total))
        else:
            begin = 0
            for name, form in zip(group.products, group.apart, strict=True):
                part = writer.slice(made, dtype, (0, begin), (form.rows, form.columns))
                if graph[name].op != "MatMul":
                    bias = graph[name].inputs[2]
                    part = writer.emit("BiasAdd", [part, bias], {"T": attrs["T"], "data_format": "NHWC"})
                rewired.append((TensorId(name), part))
                begin += form.columns
        replaced += [each for each in (group.total, *group.between, *group.products) if each]
    return Rewrite(first.name, tuple(writer.nodes), tuple(rewired), replaced=tuple(replaced), successor=made.node)
