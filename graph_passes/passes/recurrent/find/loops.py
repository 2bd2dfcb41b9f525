"""Loops in one normal form, whatever carried them, and what their variables are for.

A variable is known by what a step makes of it: an *invariant* stays, a *counter* changes by the same whole number, an
output *list* is written at one place a step, and everything else is a *state*. The condition has to be a conjunction,
of comparisons of a counter with a bound and, perhaps, of what else has to hold of the states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from graph_passes.graph.frames import frames
from graph_passes.graph.ir import Function, Graph, Node, TensorId
from graph_passes.graph.ops import IDENTITIES, LOOPS, passed, scalar_value
from graph_passes.passes.recurrent.find.counting import Numbers, StepNumber, linear
from graph_passes.passes.recurrent.find.stepped_variables import Stepped, stepped_variables
from graph_passes.refusal import RefusedError
from graph_passes.refusals import Reason

COMPLEX = ("complex64", "complex128")
_WHOLE = ("int32", "int64")
_MIRRORED = {"Less": "Greater", "LessEqual": "GreaterEqual", "Greater": "Less", "GreaterEqual": "LessEqual"}
_MIRRORED |= {"NotEqual": "NotEqual"}


class Unreadable(RefusedError):  # noqa: N818  not an error: the loop stays as it is, and the report says why
    """What a cell cannot express."""


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
class Bound:
    """A comparison that holds as long as the loop goes on.

    Attributes:
        counter: the variable that counts.
        op: "Less", "LessEqual", "Greater", "GreaterEqual" or "NotEqual": how the counter is compared.
        limit: with what, a tensor of the loop's condition.
        node: the comparison.
    """

    counter: int
    op: str
    limit: TensorId
    node: Node


@dataclass(frozen=True)
class Variables:
    """What each variable of a loop is, by its position.

    Attributes:
        invariants: what stays.
        counters: for each, its number in each step.
        states: all others that are no lists.
        writes: for a list, the node that changes it.
        bounds: how long the loop goes on.
        stepped: of the invariants, resources to whose values each step adds the same.
        going: what else has to hold for the loop to go on, tensors of its condition.
    """

    invariants: frozenset[int]
    counters: Mapping[int, StepNumber]
    states: tuple[int, ...]
    writes: dict[int, Node]
    bounds: tuple[Bound, ...]
    stepped: tuple[Stepped, ...] = ()
    going: tuple[TensorId, ...] = ()

    def numbers(self, graph: Graph, loop: Loop, function: Function) -> Numbers:
        """Reads whole numbers of `function`, the body or the condition of `loop`."""
        names = function.arguments
        fixed = {names[place]: loop.initial[place] for place in self.invariants}
        return Numbers(graph, function.graph, fixed, {names[place]: self.counters[place] for place in self.counters})


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
    fixed = {loop.body.arguments[place]: loop.initial[place] for place in invariants}
    numbers = Numbers(graph, body, fixed, {})
    counters: dict[int, StepNumber] = {}
    states: list[int] = []
    writes: dict[int, Node] = {}
    for place, result in enumerate(loop.body.results):
        node = body[passed(body, result).node]
        spec = body.specs.get(TensorId(loop.body.arguments[place]))
        if place in invariants:
            continue
        step = _increment(numbers, loop, node, place)
        if step:
            counters[place] = StepNumber(linear(graph, loop.initial[place]), step)
        elif (spec is not None and spec.dtype == "variant") or node.op == "TensorArrayWriteV3":
            writes[place] = node
        else:
            states.append(place)
    bounds, going = _bounds(loop, counters)
    stepped = stepped_variables(graph, loop.initial, invariants, loop.body, loop.condition)
    return Variables(frozenset(invariants), counters, tuple(states), writes, bounds, stepped, going)


def _increment(numbers: Numbers, loop: Loop, node: Node, place: int) -> int | None:
    """What `node` adds to variable `place` in every step, if that is all it does."""
    body = loop.body.graph
    counted = TensorId(loop.body.arguments[place])
    spec = body.specs.get(counted)
    if node.op not in ("Add", "AddV2", "Sub") or (spec is not None and (spec.dtype not in _WHOLE or spec.shape)):
        return None
    sides = [passed(body, tensor) for tensor in node.inputs]
    here = next((here for here, side in enumerate(sides) if side == counted), None)
    if here is None or (here == 1 and node.op == "Sub"):
        return None
    other = numbers.place(sides[1 - here])
    step = None if other is None else other.start.key
    return None if not isinstance(step, int) else -step if node.op == "Sub" else step


def _bounds(loop: Loop, counters: Collection[int]) -> tuple[tuple[Bound, ...], tuple[TensorId, ...]]:
    """The conjuncts of the condition: those that compare a counter with a bound, at least one, and the others."""
    condition = loop.condition.graph
    places = {name: place for place, name in enumerate(loop.condition.arguments)}
    bounds: list[Bound] = []
    going: list[TensorId] = []
    waiting = [loop.condition.results[0]]
    while waiting:
        source = passed(condition, waiting.pop())
        node = condition[source.node]
        if node.op == "LogicalAnd":
            waiting += node.inputs
            continue
        if scalar_value(condition, source) is True:
            continue
        ends = [passed(condition, side) for side in node.inputs] if node.op in _MIRRORED else []
        here = next((here for here, end in enumerate(ends) if places.get(end.node) in counters), None)
        if here is None:
            going.append(source)
            continue
        bounds.append(Bound(places[ends[here].node], _MIRRORED[node.op] if here else node.op, ends[1 - here], node))
    if not bounds:
        raise Unreadable(Reason.LOOP_CONDITION.of(condition[going[0].node]) if going else Reason.LOOP_WITHOUT_BOUND())
    return tuple(bounds), tuple(going)


def without_sums(graph: Graph, loop: Loop, variables: Variables) -> tuple[Variables, dict[int, TensorId]]:
    """`variables` without whole numbers that a step adds to and reads for nothing else; what it adds to each."""
    body, found = loop.body.graph, dict[int, TensorId]()
    for place in variables.states:
        spec, argument = graph.specs.get(loop.initial[place]), TensorId(loop.body.arguments[place])
        node = body[passed(body, loop.body.results[place]).node]
        if spec is None or spec.dtype not in _WHOLE or node.op not in ("Add", "AddV2"):
            continue
        sides = [passed(body, tensor) for tensor in node.inputs]
        if sides.count(argument) == 1 and _readers(body, argument) == {node.name}:
            found[place] = node.inputs[1 - sides.index(argument)]
    states = tuple(place for place in variables.states if place not in found)
    return replace(variables, states=states), found


def _readers(body: Graph, tensor: TensorId) -> set[str]:
    """The nodes that read `tensor` or a copy of it, copies left out."""
    found: set[str] = set()
    for use in body.uses(tensor):
        if body[use.node].op in IDENTITIES:
            found |= _readers(body, TensorId(use.node, use.index))
        else:
            found.add(use.node)
    return found
