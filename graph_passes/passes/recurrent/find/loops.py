"""Loops in one normal form, whatever carried them, and what their variables are for.

A variable is known by what a step makes of it: an *invariant* stays, a *counter* goes from 0 up by 1, an output *list*
is written at one place a step, and everything else is a *state*. The condition has to be a conjunction of
`counter < bound`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graph_passes.graph.frames import frames
from graph_passes.graph.ir import Function, Graph, Node, TensorId
from graph_passes.graph.ops import LOOPS, passed, scalar_value
from graph_passes.refusals import Reason, Refusal


class Unreadable(Exception):  # noqa: N818  not an error: the loop stays as it is, and the report says why
    """What a cell cannot express.

    Attributes:
        refusal: what was found.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop, its body read.

    Attributes:
        name: the node, for the report.
        carrier: what kind of node.
        body: one step; `arguments[i]` is variable i before it, `results[i]` after it.
        condition: whether there is a next step, of the same variables.
        initial: the variables before the first step, in the graph around the loop.
        finals: the variables after the last step, in the graph around it; None for one that cannot be had.
        nodes: the nodes around that make up the loop.
        device: the loop's device.
        control: the nodes that the loop waits for.
    """

    name: str
    carrier: str
    body: Function
    condition: Function
    initial: tuple[TensorId, ...]
    finals: tuple[TensorId | None, ...]
    nodes: tuple[str, ...]
    device: str = ""
    control: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variables:
    """What each variable of a loop is, by its position: for a list, the node that changes it.

    Bounds are tensors of the loop's condition.
    """

    invariants: frozenset[int]
    counters: frozenset[int]
    states: tuple[int, ...]
    writes: dict[int, Node]
    bounds: tuple[TensorId, ...]


def functional_loops(graph: Graph) -> Iterator[Loop]:
    """Every `While` and `StatelessWhile` whose functions could be read."""
    for node in graph:
        if node.op in LOOPS and (node.name, "body") in graph.functions and (node.name, "cond") in graph.functions:
            yield Loop(
                name=node.name,
                carrier="unrolled" if node.attrs.get("unrolled") is True else node.op,
                body=graph.functions[node.name, "body"],
                condition=graph.functions[node.name, "cond"],
                initial=tuple(node.inputs),
                finals=tuple(TensorId(node.name, index) for index in range(node.outputs)),
                nodes=(node.name,),
                device=node.device,
                control=tuple(node.control),
            )


def loops_out_of_reach(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Nodes that call functions with loops in them, where nothing is replaced, and one such loop each."""
    for node in graph:
        bodies = [graph.functions.get((node.name, key)) for key in ("f", "then_branch", "else_branch")]
        inner = next((inside for body in bodies if body is not None for inside in _with_loops(body.graph)), None)
        if inner is not None:
            yield node, inner


def _with_loops(graph: Graph) -> Iterator[Node]:
    yield from (node for node in graph if node.op in LOOPS)
    yield from (inner for _, inner in loops_out_of_reach(graph))


def lowered_loops(graph: Graph) -> Iterator[Loop]:
    """Every lowered loop whose body could be read."""
    for frame in frames(graph):
        body, condition = (graph.functions.get((frame.condition, key)) for key in ("body", "cond"))
        if body is None or condition is None:
            continue
        variables = [variable.enter for variable in frame.variables]
        enters = [graph[name] for name in (*variables, *frame.constants)]
        exits = [None if variable.exit is None else TensorId(variable.exit) for variable in frame.variables]
        yield Loop(
            name=frame.name,
            carrier="lowered loop",
            body=body,
            condition=condition,
            initial=tuple(enter.inputs[0] for enter in enters),
            finals=(*exits, *[None] * len(frame.constants)),
            nodes=frame.nodes,
            device=enters[0].device,
            control=tuple(dict.fromkeys(before for enter in enters for before in enter.control)),
        )


def classify(graph: Graph, loop: Loop) -> Variables:
    """What the variables of `loop` are for.

    Raises:
        Unreadable: the condition is no count, or a variable is none of these.
    """
    body = loop.body.graph
    places = {name: place for place, name in enumerate(loop.body.arguments)}

    def argument(tensor: TensorId) -> int | None:
        return places.get(passed(body, tensor).node)

    invariants = {place for place, result in enumerate(loop.body.results) if argument(result) == place}
    counters: set[int] = set()
    states: list[int] = []
    writes: dict[int, Node] = {}
    for place, result in enumerate(loop.body.results):
        node = body[passed(body, result).node]
        spec = body.specs.get(TensorId(loop.body.arguments[place]))
        if place in invariants:
            continue
        if _is_increment(graph, loop, node, place, invariants) and scalar_value(graph, loop.initial[place]) == 0:
            counters.add(place)
        elif (spec is not None and spec.dtype == "variant") or node.op == "TensorArrayWriteV3":
            writes[place] = node
        else:
            states.append(place)
    bounds = _bounds(loop, counters)
    return Variables(frozenset(invariants), frozenset(counters), tuple(states), writes, bounds)


def _is_increment(graph: Graph, loop: Loop, node: Node, place: int, invariants: Collection[int]) -> bool:
    body = loop.body.graph
    places = {name: index for index, name in enumerate(loop.body.arguments)}

    def number(tensor: TensorId) -> int | float | bool | None:
        variable = places.get(tensor.node)
        if variable is not None and variable in invariants:
            return scalar_value(graph, loop.initial[variable])
        return scalar_value(body, tensor)

    if node.op not in ("Add", "AddV2"):
        return False
    sides = [passed(body, tensor) for tensor in node.inputs]
    counted = TensorId(loop.body.arguments[place])
    spec = body.specs.get(counted)
    whole = spec is None or spec.dtype in ("int32", "int64")
    return whole and any(sides[here] == counted and number(sides[1 - here]) == 1 for here in (0, 1))


def _bounds(loop: Loop, counters: Collection[int]) -> tuple[TensorId, ...]:
    """The bounds of the conjuncts `counter < bound` of the condition, as tensors of the condition."""
    condition = loop.condition.graph
    places = {name: place for place, name in enumerate(loop.condition.arguments)}
    bounds: list[TensorId] = []
    waiting = [loop.condition.results[0]]
    while waiting:
        source = passed(condition, waiting.pop())
        node = condition[source.node]
        if node.op == "LogicalAnd":
            waiting += node.inputs
            continue
        if scalar_value(condition, source) is True:
            continue
        sides = list(node.inputs) if node.op == "Less" else list(node.inputs)[::-1] if node.op == "Greater" else []
        ends = [passed(condition, side) for side in sides]
        if not ends or places.get(ends[0].node) not in counters:
            raise Unreadable(Reason.LOOP_CONDITION.of(node))
        bounds.append(ends[1])
    if not bounds:
        raise Unreadable(Reason.LOOP_WITHOUT_BOUND())
    return tuple(bounds)
