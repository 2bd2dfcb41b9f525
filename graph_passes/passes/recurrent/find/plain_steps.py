"""Loops whose steps are simpler than those of the graph: small inner loops unrolled, states taken out of lists.

`keras.ops.scan` keeps its carry in a list of one item, which every step reads and writes at 0: that is a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graph_passes.graph.ir import Function, Graph, Node, TensorId
from graph_passes.graph.ops import IDENTITIES, passed, scalar_value
from graph_passes.passes.recurrent.find.counting import linear, of_key, steps_until
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, classify, functional_loops
from graph_passes.passes.recurrent.find.step_items import list_size, list_written_before

MOST_INNER_STEPS = 16


def with_plain_steps(graph: Graph, loop: Loop) -> tuple[Loop, frozenset[int]]:
    """`loop` with simpler steps, and the variables that were lists of one item and are states now."""
    body = without_inner_loops(loop.body, inner_counts(loop.body))
    loop = replace(loop, body=body, condition=_without_branches(loop.condition))
    carried = {
        place: value for place in range(len(loop.initial)) if (value := _carried(graph, loop, place)) is not None
    }
    return (_without_lists(loop, carried), frozenset(carried)) if carried else (loop, frozenset())


def inner_counts(step: Function, known: Mapping[TensorId, int] | None = None) -> dict[str, int]:
    """The loops inside of `step` whose number of steps is known and little, and that number.

    Args:
        step: of a loop.
        known: numbers that scalars in it have.
    """
    counts = {inner.name: _steps(step.graph, inner, known or {}) for inner in functional_loops(step.graph)}
    return {name: count for name, count in counts.items() if count is not None}


def without_inner_loops(step: Function, counts: Mapping[str, int]) -> Function:
    """`step` with the steps of the loops in `counts`, so many of each, one after the other."""
    for inner in list(functional_loops(step.graph)):
        if inner.name in counts:
            step = _unrolled(step, inner.name, inner.initial, inner.body, counts[inner.name])
    return step


def _steps(graph: Graph, inner: Loop, known: Mapping[TensorId, int]) -> int | None:
    """How often `inner` runs, if that is known and little."""
    try:
        variables = classify(graph, inner)
    except Unreadable:
        return None
    if variables.going or _has_effects(inner.condition):
        return None
    condition = variables.numbers(graph, inner, inner.condition)
    counts: list[int] = []
    for bound in variables.bounds:
        limit = condition.place(bound.limit)
        if limit is None:
            continue
        start = limit.start.key
        end = of_key(known[start]) if isinstance(start, TensorId) and start in known else limit.start
        steps = steps_until(variables.counters[bound.counter], bound.op, end)
        if steps is not None and isinstance(steps.key, int):
            counts.append(max(steps.key, 0))
    return min(counts) if counts and min(counts) <= MOST_INNER_STEPS else None


def _without_branches(condition: Function) -> Function:
    """`condition` with a LogicalAnd in place of each branch that autograph makes of `and`.

    Such a branch returns what decides about it where that is false.
    """
    for node in list(condition.graph):
        then, other = (condition.graph.functions.get((node.name, key)) for key in ("then_branch", "else_branch"))
        if node.op not in ("If", "StatelessIf") or node.outputs != 1 or then is None or other is None:
            continue
        result = passed(other.graph, other.results[0])
        given = dict(zip(other.arguments, node.inputs[1:], strict=True)).get(result.node)
        decides = passed(condition.graph, node.inputs[0])
        same = given is not None and passed(condition.graph, given) == decides
        if (same or scalar_value(other.graph, result) is False) and not (_has_effects(then) or _has_effects(other)):
            condition = _unrolled(condition, node.name, tuple(node.inputs[1:]), then, 1, decides)
    return condition


def _has_effects(function: Function) -> bool:
    return any(node.stateful for node in function.graph if node.name not in function.arguments)


def _unrolled(
    body: Function, name: str, initial: Sequence[TensorId], steps: Function, count: int, decides: TensorId | None = None
) -> Function:
    """`body` with the steps of its node `name` one after the other; with `decides`, and that, too."""
    graph, inside, inner = body.graph, steps.graph, name
    own = set(steps.arguments)
    values = list(initial)
    nodes: list[Node] = []
    specs, constants, functions = dict(graph.specs), dict(graph.constants), dict(graph.functions)
    for step in range(count):
        given = dict(zip(steps.arguments, values, strict=True))

        def moved(tensor: TensorId, step: int = step, given: Mapping[str, TensorId] = given) -> TensorId:
            known = given.get(tensor.node)
            return TensorId(f"{inner}/{step}/{tensor.node}", tensor.index) if known is None else known

        for node in inside:
            if node.name in own:
                continue
            name = f"{inner}/{step}/{node.name}"
            copy = node.copy()
            control = [f"{inner}/{step}/{before}" for before in node.control if before not in own]
            nodes.append(replace(copy, name=name, inputs=[moved(tensor) for tensor in node.inputs], control=control))
            specs |= {TensorId(name, t.index): inside.specs[t] for t in inside.tensors(node) if t in inside.specs}
            if node.name in inside.constants:
                constants[name] = inside.constants[node.name]
            functions |= {(name, key): f for (owner, key), f in inside.functions.items() if owner == node.name}
        values = [moved(result) for result in steps.results]
    if decides is not None:
        nodes.append(Node(f"{inner}/and", "LogicalAnd", [decides, *values], outputs=1))
        values = [TensorId(nodes[-1].name)]
        specs[values[0]] = specs[decides]
    rewired = {TensorId(inner, place): value for place, value in enumerate(values)}
    return _edited(body, rewired, {inner}, nodes, Graph([], specs, constants, functions))


def _edited(
    body: Function, rewired: Mapping[TensorId, TensorId], gone: set[str], added: list[Node], known: Graph
) -> Function:
    """`body` without the nodes in `gone`, whose readers read what `rewired` says."""

    def end(tensor: TensorId) -> TensorId:
        while tensor in rewired:
            tensor = rewired[tensor]
        return tensor

    nodes = [node.copy() for node in [*body.graph, *added] if node.name not in gone]
    for node in nodes:
        node.inputs = [end(tensor) for tensor in node.inputs]
        node.control = [before for before in node.control if before not in gone]
    graph = Graph(nodes, known.specs, known.constants, known.functions)
    return replace(body, graph=graph, results=tuple(map(end, body.results)))


def _carried(graph: Graph, loop: Loop, place: int) -> TensorId | None:
    """What the only item of a list is before the loop, if each step reads and writes just that."""
    body, argument = loop.body.graph, TensorId(loop.body.arguments[place])
    before = list_written_before(graph, loop.initial[place])
    size = None if before is None else list_size(graph, before[0])
    if before is None or before[1].key != 0 or size is None or linear(graph, size).key != 1:
        return None
    written = body[passed(body, loop.body.results[place]).node]
    if written.op != "TensorListSetItem" or scalar_value(body, written.inputs[1]) != 0:
        return None
    needed = _needed(loop.body)
    for use in body.uses(argument):
        node = body[use.node]
        if node.name not in needed:
            continue
        reads = node.op == "TensorListGetItem" and scalar_value(body, node.inputs[1]) == 0
        if not reads and node.name != written.name:
            return None
    return before[2] if passed(body, written.inputs[0]) == argument else None


def _needed(function: Function) -> set[str]:
    """The nodes that a result depends on, and the arguments."""
    results = {result.node for result in function.results}
    return function.graph.reached(results, function.graph.predecessors) | set(function.arguments)


def _without_lists(loop: Loop, carried: Mapping[int, TensorId]) -> Loop:
    body = loop.body
    specs = dict(body.graph.specs)
    rewired: dict[TensorId, TensorId] = {}
    gone = {node.name for node in body.graph if node.name not in _needed(body) and not node.stateful}
    for place in carried:
        argument = TensorId(body.arguments[place])
        written = passed(body.graph, body.results[place], IDENTITIES)
        rewired[written] = body.graph[written.node].inputs[2]
        gone.add(written.node)
        specs[argument] = specs[rewired[written]]
        for use in body.graph.uses(argument):
            if use.node not in gone:
                rewired[TensorId(use.node)] = argument
                gone.add(use.node)
    known = Graph([], specs, body.graph.constants, body.graph.functions)
    initial = tuple(carried.get(place, tensor) for place, tensor in enumerate(loop.initial))
    return replace(loop, body=_edited(body, rewired, gone, [], known), initial=initial)
