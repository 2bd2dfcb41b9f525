"""Loops whose lists can move or be made again: what a loop puts in for its gradient, and whether it has other effects.

while:6 = [h of step 0, h of step 1, ...]       two lists of one loop mostly share tensors, so all lists of a
while:8 = [x of step 0, x of step 1, ...]       loop move together, as one buffer, and a second run makes all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from graph_passes.analysis.memory.lists import ADDS, PARTS, Inside, ListSize, is_sum
from graph_passes.graph import ops
from graph_passes.graph.ir import Function, Graph, Node, TensorId

EMPTY = "EmptyTensorList"
VARIANT = "variant"


def lists_together(
    graph: Graph, sizes: Mapping[TensorId, ListSize | None]
) -> Iterator[tuple[tuple[TensorId, ...], ListSize]]:
    """For each loop whose lists can move: the lists, that first which is counted, and what they hold together."""
    for node in graph:
        lists = filled(graph, node) if node.op in ops.LOOPS else ()
        counted = [tensor for tensor in lists if tensor in sizes]
        found = [size for tensor in counted if (size := sizes[tensor])]
        if found and len(found) == len(counted):
            nbytes, element = sum(size.nbytes for size in found), max(size.element for size in found)
            yield (*counted, *(each for each in lists if each not in counted)), ListSize(nbytes, element)


def passed_on(
    graph: Graph, sizes: Mapping[TensorId, ListSize | None], order: Iterable[str]
) -> dict[TensorId, tuple[TensorId, ListSize]]:
    """Lists that a loop gets of another and goes on with: the list that they began as, and what they hold at last.

    What steps add to a list element by element makes it no longer.
    """
    found: dict[TensorId, TensorId] = {}
    held: dict[TensorId, ListSize] = {}
    for name in order:
        node = graph[name]
        for tensor, given in zip(graph.tensors(node), node.inputs, strict=False) if node.op in ops.LOOPS else ():
            before, size = ops.passed(graph, given), sizes.get(tensor)
            if size is None or sizes.get(before) is None or len(graph.uses(before)) != 1:
                continue
            first = found[tensor] = found.get(before, before)
            known = held.get(first) or sizes[before] or size
            more = 0 if is_sum(graph.functions[name, "body"], tensor.index) else size.nbytes
            held[first] = ListSize(known.nbytes + more, max(known.element, size.element))
    return {tensor: (first, held[first]) for tensor, first in found.items()}


def filled(graph: Graph, node: Node, shared: bool = False) -> tuple[TensorId, ...]:
    """The lists that are empty before a loop, and get one tensor of a fixed-size type in each step.

    Args:
        graph: the graph.
        node: a loop.
        shared: whether to name lists whose tensors the loop puts into lists of another kind, too, such as a
            TensorArray. The tensors stay as long as these do.
    """
    body = graph.functions.get((node.name, "body"))
    if body is None:
        return ()
    owner, found, others = Inside(body, carries=True).owner, dict[TensorId, TensorId | None](), set[TensorId | None]()
    for tensor, given in zip(graph.tensors(node), node.inputs, strict=False):
        spec = graph.specs.get(tensor)
        if spec is None or spec.dtype != VARIANT or not graph.uses(tensor):
            continue
        put = body.graph[ops.passed(body.graph, body.results[tensor.index]).node]
        item = owner(put.inputs[ADDS[put.op]]) if put.op in ADDS else None
        if graph[ops.passed(graph, given).node].op == EMPTY and _is_pushed(body, tensor.index):
            found[tensor] = item
        else:
            others.add(item)
    return tuple(tensor for tensor, item in found.items() if shared or item is None or item not in others)


def left_behind(graph: Graph, node: Node, lists: Iterable[TensorId]) -> tuple[TensorId, ...]:
    """The results of a loop that its lists hold as their last element: a move of the lists leaves these where they are.

    Args:
        graph: the graph.
        node: the loop.
        lists: those of its lists that move together.
    """
    body, places = graph.functions[node.name, "body"], {tensor.index for tensor in lists}
    owner = Inside(body).owner
    puts = (body.graph[ops.passed(body.graph, body.results[place]).node] for place in places)
    items = {item for put in puts if put.op in ADDS and (item := owner(put.inputs[ADDS[put.op]])) is not None}
    results = (tensor for tensor in graph.tensors(node) if tensor.index not in places and graph.uses(tensor))
    return tuple(tensor for tensor in results if owner(body.results[tensor.index]) in items)


@dataclass(frozen=True)
class Handed:
    """A tensor that a loop gets, and a list that holds it: the first step puts it in, or each step does.

    Attributes:
        tensor: what the loop gets.
        list: the list.
        counted: whether what each step makes goes into lists one step later: then the list's size, an element for each
            step, has this tensor in it.
    """

    tensor: TensorId
    list: TensorId
    counted: bool


def handed(graph: Graph, node: Node) -> Iterator[Handed]:
    """The tensors that a loop gets and that its lists hold as elements."""
    body = graph.functions.get((node.name, "body"))
    if body is None:
        return
    items: dict[TensorId, TensorId] = {}
    for tensor in graph.tensors(node):
        spec = graph.specs.get(tensor)
        put = body.graph[ops.passed(body.graph, body.results[tensor.index]).node]
        if spec is not None and spec.dtype == VARIANT and graph.uses(tensor) and put.op in ADDS:
            items[tensor] = ops.passed(body.graph, put.inputs[ADDS[put.op]], ops.VIEWS)
    for tensor, item in items.items():
        if item.node in body.arguments:
            place = body.arguments.index(item.node)
            made = ops.passed(body.graph, body.results[place], ops.VIEWS)
            counted = made != item and made not in items.values()
            yield Handed(ops.passed(graph, node.inputs[place], ops.VIEWS), tensor, counted)


def only_reads(graph: Graph, node: Node) -> bool:
    """Whether all that a call does besides computing is to read variables, in all functions that it runs."""
    names = ("cond", *PARTS) if node.op in ops.LOOPS else PARTS
    functions = [function for part in names if (function := graph.functions.get((node.name, part))) is not None]
    if not functions or (node.op in ops.LOOPS and len(functions) < 2):
        return False
    return all(
        not each.stateful or each.op in ops.READS | ops.EXTERNAL or only_reads(function.graph, each)
        for function in functions
        for each in function.graph
    )


def _is_pushed(body: Function, place: int) -> bool:
    push = body.graph[ops.passed(body.graph, body.results[place]).node]
    if push.op != "TensorListPushBack" or ops.passed(body.graph, push.inputs[0]).node != body.arguments[place]:
        return False
    spec = body.graph.specs.get(push.inputs[1])
    return spec is not None and spec.dtype in ops.FIXED_SIZE and spec.dtype != "int32"
