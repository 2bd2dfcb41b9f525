"""Lists that loops fill: what a gradient will read of each step. An edge of the graph holds a list, and no shape says
how much that is.

    while:6 = [item of step 0, item of step 1, ...]     as many bytes as steps times an item
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graph_passes.graph import ops
from graph_passes.graph.ir import Function, Graph, Node, TensorId

PARTS = ("body", "f", "then_branch", "else_branch")  # attributes that name what a node runs
MOST_STEPS = 20_000  # of a loop that are counted: one takes some 20 us
_VARIANT = "variant"

ADDS = {"TensorListPushBack": 1, "TensorListSetItem": 2, "TensorListPushBackBatch": 1}  # which input is the item
_EMPTY = frozenset({"EmptyTensorList", "TensorListReserve", "OptionalNone"})
_SCALARS: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "AddV2": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "Minimum": min,
    "Maximum": max,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
    "LogicalAnd": operator.and_,
    "LogicalOr": operator.or_,
    "LogicalNot": operator.not_,
}


@dataclass(frozen=True)
class ListSize:
    """What a list holds.

    Attributes:
        nbytes: bytes of all its elements.
        element: bytes of one of them.
    """

    nbytes: int = 0
    element: int = 0


def list_sizes(graph: Graph, position: Mapping[str, int] | None = None) -> dict[TensorId, ListSize | None]:
    """What each list holds that a loop or another called function returns; None where that cannot be counted.

    What the caller put in before is not part of it, nor is what lives outside of the function: a variable's value. A
    buffer that several lists of a loop hold counts in the one that is read last.

    Args:
        graph: the graph, with the functions that it calls.
        position: when each node runs; not known in a function.
    """

    def read_last(tensor: TensorId) -> int:
        return max((position[use.node] for use in graph.uses(tensor)), default=0) if position else 0

    found: dict[TensorId, ListSize | None] = {}
    for node in graph:
        lists = [tensor for tensor in graph.tensors(node) if _is_list(graph, tensor)]
        lists.sort(key=read_last, reverse=True)
        if lists and node.op in ops.LOOPS:
            found |= _of_loop(graph, node, lists, found)
        elif lists and any((node.name, part) in graph.functions for part in PARTS):
            found |= _of_call(graph, node, lists)
        elif node.op in ("Case", "StatelessCase"):
            found |= dict.fromkeys(lists)
        elif lists and node.op == "ZerosLike" and (size := _whole(graph, node.inputs[0], found)):
            found[lists[0]] = size
    return found


def steps_of(graph: Graph, node: Node) -> int | None:
    """How many steps a loop makes, where that depends on constants alone; None if it does not, or if they are many."""
    values = list(_values(graph, node))
    return len(values) - 1 if values and values[-1] is not None else None


def scalars_at(graph: Graph, node: Node, steps: Sequence[int]) -> list[dict[int, Any]]:
    """The scalars that tell when a loop ends, by their places, before each of these steps; empty if not all are known.

    The loop makes so many steps, as `steps_of` says.
    """
    values = list(_values(graph, node))
    return [values[step] or {} for step in steps]


def _values(graph: Graph, node: Node, asked: Collection[int] = ()) -> Iterator[dict[int, Any] | None]:
    """The scalars that tell when a loop ends, and others that are asked for: before each step, and at last after all;
    at last None if it is not known when the loop ends."""
    cond, body = (graph.functions.get((node.name, part)) for part in ("cond", "body"))
    if cond is None or body is None:
        yield None
        return
    wanted = _arguments(cond, [cond.results[0]]) | set(asked)
    while (more := wanted | _arguments(body, [body.results[place] for place in wanted])) != wanted:
        wanted = more
    values = {place: _scalar(graph, node.inputs[place]) for place in wanted}
    for _ in range(MOST_STEPS):
        goes_on = _Scalars(cond, values)[cond.results[0]]
        if goes_on is None:
            break
        yield values
        if not goes_on:
            return
        scalars = _Scalars(body, values)
        values = {place: scalars[body.results[place]] for place in wanted}
    yield None


def _scalar(graph: Graph, tensor: TensorId) -> Any:
    """A constant's number, or what a loop leaves behind that counts steps; None if that is not known."""
    tensor = ops.passed(graph, tensor)
    node = graph[tensor.node]
    if node.op not in ops.LOOPS:
        return ops.scalar_value(graph, tensor)
    spec = graph.specs.get(tensor)
    if spec is None or spec.shape != ():
        return None
    *_, last = _values(graph, node, [tensor.index])
    return None if last is None else last[tensor.index]


def _is_list(graph: Graph, tensor: TensorId) -> bool:
    spec = graph.specs.get(tensor)
    return spec is not None and spec.dtype == _VARIANT


def _whole(graph: Graph, tensor: TensorId, found: Mapping[TensorId, ListSize | None]) -> ListSize | None:
    """All that a list holds, where it was made of a tensor, or a loop filled it; None where that is not known."""
    while True:
        tensor = ops.passed(graph, tensor)
        node = graph[tensor.node]
        if tensor in found:
            return found[tensor]
        if node.op == "TensorListFromTensor":
            sizes, nbytes = graph.sizes(node.inputs[0]), graph.nbytes(node.inputs[0])
            return ListSize(nbytes, nbytes // sizes[0]) if nbytes and sizes else None
        body = graph.functions.get((node.name, "body"))
        if node.op == "ZerosLike":
            tensor = node.inputs[0]
        elif body is not None and _is_argument(body, body.results[tensor.index], tensor.index):
            tensor = node.inputs[tensor.index]
        else:
            return None


def _is_argument(body: Function, tensor: TensorId, place: int) -> bool:
    return ops.passed(body.graph, tensor).node == body.arguments[place]


def is_sum(body: Function, place: int) -> bool:
    """Whether a list is added to in each step element by element, as gradients of what a loop reads are."""
    node = body.graph[ops.passed(body.graph, body.results[place]).node]
    return node.op in ("AddN", "AddV2") and any(_is_argument(body, tensor, place) for tensor in node.inputs)


def _of_loop(
    graph: Graph, node: Node, lists: Iterable[TensorId], before: Mapping[TensorId, ListSize | None]
) -> Mapping[TensorId, ListSize | None]:
    body = graph.functions.get((node.name, "body"))
    if body is None:
        return dict.fromkeys(lists)
    inside = Inside(body, carries=True)
    sums = {tensor for tensor in lists if is_sum(body, tensor.index)}
    each = {tensor: inside.added(body.results[tensor.index]) for tensor in lists if tensor not in sums}
    filled = {tensor: size for tensor, size in each.items() if size is None or size.nbytes}
    steps = steps_of(graph, node) if any(filled.values()) else None
    return {tensor: _whole(graph, node.inputs[tensor.index], before) for tensor in sums} | {
        tensor: None if size is None or steps is None else ListSize(size.nbytes * steps, size.element)
        for tensor, size in filled.items()
    }


def _of_call(graph: Graph, node: Node, lists: Sequence[TensorId]) -> dict[TensorId, ListSize | None]:
    """The most that one of its branches puts into each list.

    One branch runs, so where the same ops read all lists they hold what the fullest branch puts in, and no more.
    """
    inside = [Inside(graph.functions[node.name, part]) for part in PARTS if (node.name, part) in graph.functions]
    branches = [{each: branch.added(branch.body.results[each.index]) for each in lists} for branch in inside]
    sizes = [[size for size in branch.values() if size is not None] for branch in branches]
    together = len({frozenset(use.node for use in graph.uses(each)) for each in lists}) == 1
    if together and all(len(known) == len(lists) for known in sizes):
        totals = [sum(size.nbytes for size in known) for known in sizes]
        return branches[totals.index(max(totals))]
    return {each: _largest([branch[each] for branch in branches]) for each in lists}


def _largest(sizes: Sequence[ListSize | None]) -> ListSize | None:
    known = [size for size in sizes if size is not None]
    return max(known, key=lambda size: size.nbytes) if len(known) == len(sizes) else None


@dataclass
class Inside:
    """What one run of a body puts into lists. A buffer that goes into several counts in the first alone.

    Attributes:
        body: what runs.
        carries: whether it is a loop's, whose results are the next step's arguments.
    """

    body: Function
    carries: bool = False
    counted: set[TensorId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.within = list_sizes(self.body.graph)

    def added(self, tensor: TensorId) -> ListSize | None:
        """What is put into a list on its way from the arguments to `tensor`; None if that is not known."""
        graph, found = self.body.graph, ListSize()
        item: ListSize | None
        while True:
            tensor = ops.passed(graph, tensor)
            node = graph[tensor.node]
            if tensor.node in self.body.arguments or node.op in _EMPTY:
                return found
            if node.op == "TensorListPopBack" and tensor.index == 0:
                item, before = ListSize(), node.inputs[0]
            elif node.op in ADDS:
                item, before = self.item(node.inputs[ADDS[node.op]]), node.inputs[0]
            elif node.op == "OptionalFromValue":
                return self.items(node.inputs)
            elif node.op in ops.LOOPS and tensor in self.within:
                item, before = self.within[tensor], node.inputs[tensor.index]
            else:
                return None
            if item is None:
                return None
            found, tensor = ListSize(found.nbytes + item.nbytes, max(found.element, item.element)), before

    def items(self, tensors: Iterable[TensorId]) -> ListSize | None:
        """What several tensors take together; None if that is not known of one."""
        found = [self.item(tensor) for tensor in tensors]
        known = [size for size in found if size is not None]
        if len(known) < len(found):
            return None
        return ListSize(sum(size.nbytes for size in known), max((size.element for size in known), default=0))

    def item(self, tensor: TensorId) -> ListSize | None:
        """What a list holds longer because of an element; None if that is not known."""
        owner = self.owner(tensor)
        if owner is None or owner in self.counted:
            return ListSize()
        self.counted.add(owner)
        if _is_list(self.body.graph, owner):
            return self.within.get(owner)
        spec = self.body.graph.specs.get(owner)
        nbytes = spec.nbytes if spec is not None and spec.itemsize else None
        return None if nbytes is None else ListSize(nbytes, nbytes)

    def owner(self, tensor: TensorId) -> TensorId | None:
        """The tensor of the body that allocated a buffer; None if it lives outside of the loop or function."""
        tensor = ops.passed(self.body.graph, tensor, ops.VIEWS)
        if tensor.node in self.body.arguments and self.carries:
            before = ops.passed(self.body.graph, self.body.results[self.body.arguments.index(tensor.node)], ops.VIEWS)
            if before == tensor:
                return None  # the same in every step
            tensor = before  # the step before made it
            if tensor.node in self.body.arguments:
                return tensor
        return None if self.body.graph[tensor.node].op in ops.EXTERNAL else tensor


def _arguments(function: Function, results: Iterable[TensorId]) -> set[int]:
    """The places of the arguments that results are computed from."""
    graph = function.graph
    read = graph.reached({tensor.node for tensor in results}, lambda node: (tensor.node for tensor in node.inputs))
    return {place for place, name in enumerate(function.arguments) if name in read}


class _Scalars(dict[TensorId, Any]):
    """Values of the scalars of a function, found as they are asked for; None where one is not known."""

    def __init__(self, function: Function, arguments: Mapping[int, Any]) -> None:
        super().__init__({TensorId(function.arguments[place]): value for place, value in arguments.items()})
        self._graph = function.graph

    def __missing__(self, tensor: TensorId) -> Any:
        node = self._graph[tensor.node]
        if node.op in ops.IDENTITIES:
            self[tensor] = self[node.inputs[tensor.index]]
        elif node.op in _SCALARS:
            given = [self[each] for each in node.inputs]
            self[tensor] = None if None in given else _computed(node.op, given)
        else:
            self[tensor] = ops.scalar_value(self._graph, tensor)
        return self[tensor]


def _computed(op: str, given: Iterable[Any]) -> Any:
    try:
        return _SCALARS[op](*given)
    except (ZeroDivisionError, TypeError):
        return None
