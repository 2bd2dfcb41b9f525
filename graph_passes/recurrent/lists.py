"""Lists of tensors, in and out of a loop: TensorLists, and TensorFlow 1's TensorArrays.

A TensorArray is a resource; what orders its reads and writes is a float, the *flow*, which stands for it here.

                       TensorList                 TensorArray
    of a tensor        TensorListFromTensor       TensorArrayScatterV3
    empty              TensorListReserve          TensorArrayV3
    one item           TensorListGetItem          TensorArrayReadV3
    changed            TensorListSetItem          TensorArrayWriteV3
    to a tensor        TensorListStack            TensorArrayGatherV3
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir import Graph, Node, TensorId
from graph_passes.recurrent.loops import passed, scalar_value

# Stateful, but of no effect on anything other than their own array.
ARRAYS = frozenset(f"TensorArray{kind}V3" for kind in ("", "Read", "Write", "Gather", "Scatter", "Size", "Close"))
_READ = {"TensorListGetItem": (0, 1), "TensorArrayReadV3": (2, 1)}
_WRITE = {"TensorListSetItem": (0, 1, 2), "TensorArrayWriteV3": (3, 1, 2)}
_STACK = {"TensorListStack": 0, "TensorArrayGatherV3": 2}


@dataclass(frozen=True)
class Item:
    """One read or write: the list (its flow), the index, and the value that is written."""

    handle: TensorId
    index: TensorId
    value: TensorId | None = None


def read_item(node: Node) -> Item | None:
    """What `node` reads, if it reads an item."""
    places = _READ.get(node.op)
    return None if places is None else Item(*(node.inputs[place] for place in places))


def written_item(node: Node) -> Item | None:
    """What `node` writes, if it writes an item."""
    places = _WRITE.get(node.op)
    return None if places is None else Item(*(node.inputs[place] for place in places))


def list_source(graph: Graph, handle: TensorId) -> TensorId | None:
    """The tensor `[time, ...]` whose items a list holds."""
    maker = graph[passed(graph, handle).node]
    if maker.op == "TensorListFromTensor":
        return maker.inputs[0]
    if maker.op == "TensorArrayScatterV3" and _counts_up(graph, maker.inputs[1]):
        return maker.inputs[2]
    return None


def list_size(graph: Graph, handle: TensorId) -> TensorId | None:
    """How many items an empty list was made for."""
    maker = graph[passed(graph, handle).node]
    if maker.op == "TensorListReserve":
        return maker.inputs[1]
    return maker.inputs[0] if maker.op == "TensorArrayV3" else None


def is_stack(graph: Graph, name: str, handle: TensorId) -> bool:
    """Whether the node `name` makes a tensor of all items of `handle`."""
    node = graph[name]
    place = _STACK.get(node.op)
    if place is None or passed(graph, node.inputs[place]) != handle:
        return False
    return node.op == "TensorListStack" or _counts_up(graph, node.inputs[1])


def is_size(graph: Graph, name: str) -> bool:
    """Whether the node `name` asks for the number of items."""
    return graph[name].op in ("TensorListLength", "TensorArraySizeV3")


def _counts_up(graph: Graph, indices: TensorId) -> bool:
    """Whether `indices` are 0, 1, 2 ...; that they are all there, TensorFlow checks when it runs."""
    node = graph[passed(graph, indices).node]
    return node.op == "Range" and scalar_value(graph, node.inputs[0]) == 0 and scalar_value(graph, node.inputs[2]) == 1
