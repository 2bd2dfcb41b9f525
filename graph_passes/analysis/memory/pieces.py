"""Loops that can run in pieces, each with separate lists: then one piece's lists can wait elsewhere, or be made again
from the loop's state between two pieces (gradient checkpointing), while another's are in use.

    h0 -> [40 steps] -> h40                       one pair of lists of 40 tensors, until the gradient's loop has ended
    h0 -> [6] -> h6 -> [6] -> h12 ... -> h40      seven pairs; from h6 the second pair can be made again
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isqrt

from graph_passes.analysis.memory.lists import list_sizes, scalars_at, steps_of
from graph_passes.analysis.memory.loop_lists import filled, lists_together, only_reads
from graph_passes.graph import ops
from graph_passes.graph.ir import Function, Graph, Node, TensorId

FEWEST_STEPS = 4
MOST_PIECES = 16


@dataclass(frozen=True)
class PiecewiseLoop:
    """A loop that is to run in pieces.

    Attributes:
        node: its name.
        counter: the place of an argument that grows by one in each step.
        begins: its value at the first step.
        fixed: places of arguments that no step changes.
        known: for each piece but the first, (place, value before the piece) of the scalars that tell when it ends.
    """

    node: str
    counter: int
    begins: int
    fixed: frozenset[int]
    known: tuple[tuple[tuple[int, bool | int | float], ...], ...] = ()


@dataclass(frozen=True)
class Split:
    """A loop, and its gradient's, which takes the lists of the first one apart.

    Attributes:
        forward, backward: the two.
        ends: the step before which each piece of the first one ends, ascending; the last is the number of steps.
        lists: (place among the first one's results, place among the second one's arguments) of each list.
    """

    forward: PiecewiseLoop
    backward: PiecewiseLoop
    ends: tuple[int, ...]
    lists: tuple[tuple[int, int], ...]


def splits(graph: Graph, least: int, fetched: Collection[TensorId] = ()) -> tuple[Split, ...]:
    """The loops whose lists hold at least so many bytes, and that can run in pieces."""
    sizes = list_sizes(graph)
    large = [lists[0].node for lists, size in lists_together(graph, sizes) if size.nbytes >= least]
    names = {tensor.node for tensor in fetched}
    found = (_split(graph, graph[name]) for name in large if name not in names)
    return tuple(each for each in found if each is not None and each.backward.node not in names)


def _split(graph: Graph, node: Node) -> Split | None:
    lists = filled(graph, node, shared=True)
    uses = [graph.uses(tensor) for tensor in lists]
    readers = {use.node for each in uses for use in each}
    steps, first = steps_of(graph, node), _loop(graph, node)
    if len(readers) != 1 or any(len(each) != 1 for each in uses) or first is None or (steps or 0) < FEWEST_STEPS:
        return None
    back = graph[readers.pop()]
    body, second = graph.functions[node.name, "body"], _loop(graph, back) if back.op in ops.LOOPS else None
    pairs = tuple((tensor.index, each[0].index) for tensor, each in zip(lists, uses, strict=True))
    taken = second is not None and all(_is_popped(graph, back, there) for _, there in pairs)
    alone = all(len(body.graph.uses(TensorId(body.arguments[here]))) == 1 for here, _ in pairs)
    if second is None or steps is None or not (taken and alone) or steps_of(graph, back) != steps:
        return None
    count = min(MOST_PIECES, isqrt(steps - 1) + 1)
    ends = tuple(steps * piece // count for piece in range(1, count + 1))
    known = scalars_at(graph, node, ends[:-1])
    known_back = scalars_at(graph, back, [steps - end for end in reversed(ends[:-1])])
    return Split(
        _with_known(first, known),
        _with_known(second, known_back),
        ends,
        pairs,
    )


def _with_known(loop: PiecewiseLoop, known: list[dict[int, bool | int | float]]) -> PiecewiseLoop:
    kept = tuple(tuple((place, each[place]) for place in sorted(each) if place not in loop.fixed) for each in known)
    return PiecewiseLoop(loop.node, loop.counter, loop.begins, loop.fixed, kept)


def _loop(graph: Graph, node: Node) -> PiecewiseLoop | None:
    """None where a loop has effects besides reading variables, or counts no steps."""
    body = graph.functions.get((node.name, "body"))
    if body is None or not only_reads(graph, node):
        return None
    fixed = frozenset(place for place in range(len(body.results)) if _is_fixed(body, place))
    for place, given in enumerate(node.inputs):
        begins = ops.scalar_value(graph, given)
        if type(begins) is int and _counts(body, place):
            return PiecewiseLoop(node.name, place, begins, fixed)
    return None


def _is_fixed(body: Function, place: int) -> bool:
    return ops.passed(body.graph, body.results[place]).node == body.arguments[place]


def _counts(body: Function, place: int) -> bool:
    node = body.graph[ops.passed(body.graph, body.results[place]).node]
    if node.op not in ("Add", "AddV2"):
        return False
    numbers = [ops.scalar_value(body.graph, tensor) for tensor in node.inputs]
    names = [ops.passed(body.graph, tensor).node for tensor in node.inputs]
    return 1 in numbers and body.arguments[place] in names


def _is_popped(graph: Graph, back: Node, place: int) -> bool:
    """Whether each step takes one element off a list, and nothing else is done with it."""
    body, cond = graph.functions[back.name, "body"], graph.functions[back.name, "cond"]
    argument, result = TensorId(body.arguments[place]), ops.passed(body.graph, body.results[place])
    uses = body.graph.uses(argument)
    asked = cond.graph.uses(TensorId(cond.arguments[place])) if cond.arguments[place] in cond.graph.nodes else ()
    return (
        len(uses) == 1
        and body.graph[uses[0].node].op == "TensorListPopBack"
        and result == TensorId(uses[0].node)
        and not asked
        and not graph.uses(TensorId(back.name, place))
    )
