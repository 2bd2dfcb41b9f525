"""What the steps of a loop write to lists, and what else these lists hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graph_passes.graph.ir import DataType, Graph, Node, TensorId, boolean
from graph_passes.graph.ops import passed
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.counting import Linear, Numbers, StepNumber, linear
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable
from graph_passes.passes.recurrent.find.step_items import is_size, list_size, list_written_before, written_item
from graph_passes.passes.recurrent.lower.prologue import Prologue
from graph_passes.refusals import Reason


@dataclass(frozen=True)
class Write:
    """What an output list is given: an item in every step, or always at 0.

    Attributes:
        value: the item.
        place: the index of the item.
        from_end: whether the items are written from the last one to the first.
        grows: whether a write behind the last item makes a TensorList longer.
    """

    value: TensorId
    place: StepNumber
    from_end: bool = False
    grows: bool = False

    @property
    def every_step(self) -> bool:
        """Whether each step writes another item."""
        return self.place.step != 0


@dataclass(frozen=True)
class Items:
    """What a list has besides the items that the steps write.

    Attributes:
        length: how many items it has before the loop, if not known to be as many as there are steps; those that no step
            writes stay zero.
        grows: whether a write behind the last item makes it longer; if not, TensorFlow refuses that.
        before: an item that was written before the loop.
        is_first: whether that is the first one, not the last.
    """

    length: TensorId | None = None
    grows: bool = False
    before: TensorId | None = None
    is_first: bool = False

    def length_behind(self, graph: Graph, prologue: Prologue) -> TensorId | None:
        """How many items it has behind the loop, a scalar of SHAPE_DTYPE; None if as many as there are steps."""
        if self.length is None:
            return None
        length = prologue.cast(self.length, graph.specs[self.length].dtype, SHAPE_DTYPE)
        if not self.grows:
            return length
        return prologue.once("Maximum", [length, prologue.scalar(prologue.time)], {"T": DataType(SHAPE_DTYPE)})


def write_of(loop: Loop, numbers: Numbers, steps: Linear, place: int, node: Node) -> Write:
    """What `node` writes to the list in variable `place`, in a loop of so many steps."""
    argument, body = loop.body.arguments[place], loop.body.graph
    item = written_item(node)
    if item is None or item.value is None or passed(body, item.handle) != TensorId(argument):
        raise Unreadable(Reason.LIST_CHANGED.of(node, other=argument))
    index = numbers.place(item.index)
    last, grows = steps.plus(-1), boolean(node.attrs.get("resize_if_index_out_of_bounds"))
    if index is not None and (index.step == 1 or index == StepNumber(Linear())):
        return Write(item.value, index, grows=grows)
    if index is not None and index.step == -1 and isinstance(index.start.plus(last, -1).key, int):
        return Write(item.value, StepNumber(index.start.plus(last, -1), 1), from_end=True, grows=grows)
    raise Unreadable(Reason.LIST_INDEX.of(node))


def require_single(graph: Graph, handle: TensorId) -> None:
    """Raises Unreadable if a list that is always written at 0 is not known to have one item."""
    size = list_size(graph, handle)
    if size is None or linear(graph, size).key != 1:
        raise Unreadable(Reason.LIST_SIZE.of(graph[passed(graph, handle).node]))


def items_of(graph: Graph, handle: TensorId, write: Write, steps: Linear) -> Items:
    """What a list has besides the items that the steps of a loop write.

    Args:
        graph: the graph around the loop.
        handle: the list before the loop.
        write: what the steps write.
        steps: how many there are.

    Raises:
        Unreadable: its length is not known, or too small, or an item is not written.
    """
    first = write.place.start.key
    maker, before = graph[passed(graph, handle).node], list_written_before(graph, handle)
    if before is not None:
        handle, index, value = before
        size = list_size(graph, handle)
        whole = size is not None and linear(graph, size) == steps.plus(1)
        if (whole and (first, index.key) == (1, 0)) or (whole and first == 0 and index == steps):
            return Items(before=value, is_first=first == 1)
        raise Unreadable(Reason.LIST_SIZE.of(maker))
    size = list_size(graph, handle)
    if first != 0 or size is None:
        raise Unreadable(Reason.LIST_SIZE.of(maker))
    length = linear(graph, size)
    grows = write.grows or boolean(maker.attrs.get("dynamic_size"))
    more = length.plus(steps, -1).key
    if length == steps or (grows and (length.key == 0 or (isinstance(more, int) and more < 0))):
        return Items()
    if isinstance(more, int) and more < 0:
        raise Unreadable(Reason.LIST_SIZE.of(maker))
    return Items(length=size, grows=grows)


def readers_of(graph: Graph, keep: Collection[str], handle: TensorId) -> Iterator[str]:
    """The readers of a list, or of a copy of it: outside functions, TensorFlow copies a loop's results."""
    for use in graph.uses(handle):
        copy = TensorId(use.node)
        if graph[use.node].op == "Identity" and use.node not in keep and graph.uses(copy):
            yield from readers_of(graph, keep, copy)
        else:
            yield use.node


def of_list(
    graph: Graph, keep: Collection[str], prologue: Prologue, handle: TensorId, state: TensorId, dtype: str
) -> Iterator[tuple[TensorId, TensorId]]:
    """The readers of a list whose only item is a state, and what takes the place of what they make."""
    for name in readers_of(graph, keep, handle):
        reader = graph[name]
        if is_size(graph, name):
            yield TensorId(name), prologue.constant(SHAPE_DTYPE, (), [1])
            continue
        if reader.op == "TensorListElementShape":
            kinds = {"T": DataType(dtype), "out_type": DataType(graph.specs[TensorId(name)].dtype)}
            yield TensorId(name), prologue.once("Shape", [state], kinds)
            continue
        if reader.op not in ("TensorListGetItem", "TensorListStack") or name in keep:
            raise Unreadable(Reason.SINGLE_OUTPUT.of(reader))
        whole = reader.op == "TensorListStack"
        yield TensorId(name), prologue.expanded(state, dtype, 0) if whole else state
