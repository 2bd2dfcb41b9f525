"""Loops in one normal form, whatever carried them, and what their variables are for.

A variable is known by what a step makes of it: an *invariant* stays, a *counter* goes from 0 up by 1, an output *list*
is written at one place a step, and everything else is a *state*. The condition has to be a conjunction of
`counter < bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graph_passes.ir import Function, Graph, Node, TensorId

LOOPS = frozenset({"While", "StatelessWhile"})
PASSING = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "Snapshot"})


class Unreadable(Exception):  # noqa: N818  not an error: the loop stays as it is, and the report says why
    """What a cell cannot express; the message says what was found, and names the op."""


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
class Write:
    """An output list: which value is written, and where: at the step's number, or always at 0."""

    value: TensorId
    every_step: bool


@dataclass(frozen=True)
class Variables:
    """What each variable of a loop is, by its position; bounds are tensors around the loop."""

    invariants: frozenset[int]
    counters: frozenset[int]
    states: tuple[int, ...]
    writes: dict[int, Write]
    bounds: tuple[TensorId, ...]
    limits: tuple[int, ...] = field(default=())


def functional_loops(graph: Graph) -> Iterator[Loop]:
    """Every `While` and `StatelessWhile` whose functions could be read.

    Raises nothing: one that could not be read is given with an empty body by `unread_loops`.
    """
    for node in graph:
        if node.op in LOOPS and (node.name, "body") in graph.functions and (node.name, "cond") in graph.functions:
            yield Loop(
                name=node.name,
                carrier=node.op,
                body=graph.functions[node.name, "body"],
                condition=graph.functions[node.name, "cond"],
                initial=tuple(node.inputs),
                finals=tuple(TensorId(node.name, index) for index in range(node.outputs)),
                nodes=(node.name,),
                device=node.device,
                control=tuple(node.control),
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

    invariants, counters, states, writes = set(), set(), [], {}
    for place, result in enumerate(loop.body.results):
        source = passed(body, result)
        node = body[source.node]
        spec = body.specs.get(TensorId(loop.body.arguments[place]))
        if argument(result) == place:
            invariants.add(place)
        elif _is_increment(body, node, loop.body.arguments[place]) and scalar_value(graph, loop.initial[place]) == 0:
            counters.add(place)
        elif spec is not None and spec.dtype == "variant":
            writes[place] = (node, source)
        else:
            states.append(place)
    bounds, limits = _bounds(graph, loop, invariants, counters)
    found = {place: _write(graph, loop, place, node, argument, counters) for place, (node, _) in writes.items()}
    return Variables(frozenset(invariants), frozenset(counters), tuple(states), found, bounds, limits)


def passed(graph: Graph, tensor: TensorId) -> TensorId:
    """What `tensor` is a copy of."""
    while graph[tensor.node].op in PASSING:
        tensor = graph[tensor.node].inputs[tensor.index]
    return tensor


def scalar_value(graph: Graph, tensor: TensorId) -> int | float | bool | None:
    """The number that a tensor of one element holds, if it is a constant."""
    found = graph.constants.get(passed(graph, tensor).node)
    if found is None or found.size != 1:
        return None
    value: int | float | bool = found.reshape(()).item()
    return value


def _is_increment(body: Graph, node: Node, argument: str) -> bool:
    if node.op not in ("Add", "AddV2"):
        return False
    sides = [passed(body, tensor) for tensor in node.inputs]
    steps = [scalar_value(body, tensor) for tensor in sides]
    return any(
        sides[here] == TensorId(argument) and isinstance(steps[1 - here], int) and steps[1 - here] == 1
        for here in (0, 1)
    )


def _write(graph: Graph, loop: Loop, place: int, node: Node, argument, counters) -> Write:  # type: ignore[no-untyped-def]
    if node.op != "TensorListSetItem" or argument(node.inputs[0]) != place:
        raise Unreadable(
            f"the tensor list '{loop.body.arguments[place]}' is changed by '{node.name}' ({node.op}), not written at "
            "one place a step"
        )
    body = loop.body.graph
    if argument(node.inputs[1]) in counters:
        return Write(node.inputs[2], True)
    if scalar_value(body, node.inputs[1]) == 0:
        return Write(node.inputs[2], False)
    raise Unreadable(f"'{node.name}' writes at an index that is neither the step's number nor 0")


def _bounds(
    graph: Graph, loop: Loop, invariants: set[int], counters: set[int]
) -> tuple[tuple[TensorId, ...], tuple[int, ...]]:
    """The conjuncts `counter < bound` of the condition: tensors around the loop, and numbers in the condition."""
    condition = loop.condition.graph
    places = {name: place for place, name in enumerate(loop.condition.arguments)}
    tensors: list[TensorId] = []
    numbers: list[int] = []
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
            raise Unreadable(
                f"the loop goes on while '{node.name}' ({node.op}), which is not a count of steps below a bound"
            )
        place, number = places.get(ends[1].node), scalar_value(condition, ends[1])
        if place in invariants:
            tensors.append(loop.initial[place])
        elif isinstance(number, int):
            numbers.append(number)
        else:
            raise Unreadable(f"the loop's bound in '{node.name}' ({node.op}) changes while it runs")
    if not tensors and not numbers:
        raise Unreadable("the loop has no bound")
    return tuple(tensors), tuple(numbers)
