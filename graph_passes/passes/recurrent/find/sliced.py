"""Slices `x[:, 0]`, `x[:, 1]` ... of a Python loop as what they are together: the items of one Unpack."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graph_passes.graph import slices
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec, WorkingCopy

LEAST = 2  # items


def unpacked(graph: Graph, keep: Collection[str]) -> Graph:
    """`graph`, or a copy with an Unpack in place of the slices of each tensor whose items are all taken."""
    families: dict[tuple[TensorId, int], dict[int, list[str]]] = {}
    for node in graph:
        place = _item(graph, node) if node.op == "StridedSlice" and node.name not in keep else None
        if place is not None:
            axis, index = place
            families.setdefault((node.inputs[0], axis), {}).setdefault(index, []).append(node.name)
    whole = {
        key: items
        for key, items in families.items()
        if len(items) >= LEAST and len(items) == (graph.specs[key[0]].shape or ())[key[1]]
    }
    return _with_unpacks(graph, whole) if whole else graph


def _item(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The axis along which a slice takes one item, and which, if that is all it does."""
    axes, spec = slices.axes(graph, node), graph.specs.get(node.inputs[0])
    taken = [place for place, axis in enumerate(axes or ()) if not axis.whole]
    if axes is None or len(taken) != 1 or axes[taken[0]].new or spec is None or spec.shape is None:
        return None
    item, size = axes[taken[0]], spec.shape[taken[0]] or 0
    if not item.single or item.new or not isinstance(item.begin, int) or not -size <= item.begin < size:
        return None
    return taken[0], item.begin % size


def _with_unpacks(graph: Graph, families: Mapping[tuple[TensorId, int], Mapping[int, list[str]]]) -> WorkingCopy:
    rewired: dict[TensorId, TensorId] = {}
    added: list[Node] = []
    specs: dict[TensorId, TensorSpec] = {}
    for (tensor, axis), items in families.items():
        first = graph[items[0][0]]
        name = f"{first.name}/unpacked"
        whole, item = graph.specs[tensor], graph.specs[TensorId(first.name)]
        attrs = {"num": len(items), "T": DataType(whole.dtype), "axis": axis}
        added.append(Node(name, "Unpack", [tensor], [], first.device, attrs, len(items)))
        for index, names in items.items():
            specs[TensorId(name, index)] = item
            rewired |= {TensorId(old): TensorId(name, index) for old in names}
    gone = {old.node for old in rewired}
    nodes = [node.copy() for node in graph if node.name not in gone]
    for node in nodes:
        node.inputs = [rewired.get(tensor, tensor) for tensor in node.inputs]
        node.control = [before for before in node.control if before not in gone]
    kept = {tensor: spec for tensor, spec in graph.specs.items() if tensor.node not in gone}
    return WorkingCopy([*nodes, *added], kept | specs, graph.constants, graph.functions)
