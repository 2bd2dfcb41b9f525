"""Where a step's items come from and go to: TensorLists, TensorFlow 1's TensorArrays, and whole tensors.

A TensorArray is a resource; what orders its reads and writes is a float, the *flow*, which stands for it here.

                       TensorList                 TensorArray
    of a tensor        TensorListFromTensor       TensorArrayScatterV3
    empty              TensorListReserve          TensorArrayV3
    one item           TensorListGetItem          TensorArrayReadV3
    changed            TensorListSetItem          TensorArrayWriteV3
    to a tensor        TensorListStack            TensorArrayGatherV3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graph_passes.graph import slices
from graph_passes.graph.ir import Graph, Node, TensorId, integer
from graph_passes.graph.ops import passed, scalar_value
from graph_passes.passes.recurrent.find.counting import Linear, StepNumber, linear

_READ = {"TensorListGetItem": (0, 1), "TensorArrayReadV3": (2, 1)}
_WRITE = {"TensorListSetItem": (0, 1, 2), "TensorArrayWriteV3": (3, 1, 2)}
_STACK = {"TensorListStack": 0, "TensorArrayGatherV3": 2}


@dataclass(frozen=True)
class ListItem:
    """One read or write: the list (its flow), the index, and the value that is written."""

    handle: TensorId
    index: TensorId
    value: TensorId | None = None


def read_item(node: Node) -> ListItem | None:
    """What `node` reads, if it reads an item."""
    return ListItem(*(node.inputs[place] for place in _READ[node.op])) if node.op in _READ else None


def written_item(node: Node) -> ListItem | None:
    """What `node` writes, if it writes an item."""
    return ListItem(*(node.inputs[place] for place in _WRITE[node.op])) if node.op in _WRITE else None


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


def item_of(
    body: Graph, node: Node, place_of: Callable[[TensorId], StepNumber | None]
) -> tuple[TensorId, int, StepNumber] | None:
    """The tensor, the axis and the place at which `node` takes an item, as in `x[t]`, `x[:, t]` and `tf.gather(x, t)`.

    None if it does something else, or takes the same item in every step.
    """
    if node.op == "GatherV2":
        axis, place = scalar_value(body, node.inputs[2]), place_of(node.inputs[1])
        plain = integer(node.attrs.get("batch_dims", 0)) == 0 and place is not None and place.step != 0
        return (node.inputs[0], int(axis), place) if axis is not None and axis >= 0 and plain and place else None
    axes = slices.axes(body, node) if node.op == "StridedSlice" else None
    taken = [place for place, axis in enumerate(axes or ()) if not axis.whole]
    if axes is None or len(taken) != 1:
        return None
    item = axes[taken[0]]
    place = place_of(item.begin) if isinstance(item.begin, TensorId) else None
    counted = place is not None and place.step != 0 and item.single and item.step == 1 and not item.new
    return (node.inputs[0], taken[0], place) if counted and place is not None else None


def list_written_before(graph: Graph, handle: TensorId) -> tuple[TensorId, Linear, TensorId] | None:
    """The list before one item was written outside of the loop, the index of the item, and the item."""
    maker = graph[passed(graph, handle).node]
    item = written_item(maker)
    if item is None or item.value is None:
        return None
    return item.handle, linear(graph, item.index), item.value
