"""A training step of a session's graph on pieces of the batch, planned in a copy of the graph.

    the graph of the session        sizes as constants, no gates         what Grappler would do in a function
    the step in it                  split, as any other
    what else reads its tensors     reads what the pieces leave; small results keep their names, and are whole

A session prunes: what it does not fetch does not run. So ops that the pieces replace stay in the graph, and run on the
whole batch if they are fetched after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from graph_passes.analysis.memory.roles import gradient_ops
from graph_passes.graph.gates import with_open_gates
from graph_passes.graph.ir import Graph, Node
from graph_passes.graph.ops import IDENTITIES, writes
from graph_passes.graph.rewrite import Names, NewNode, Rewrite, apply_rewrites
from graph_passes.passes.offload.selection import filled
from graph_passes.passes.split.apply import split_graph, split_rewrites
from graph_passes.passes.split.plan import SplitChoice
from graph_passes.passes.split.split_regions import Users
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason, Refusal
from graph_passes.splitting import SplitStep, split_step
from tfmem.capture.static_sizes import with_static_sizes
from tfmem.runtime.engine import Engine

HELD = 256  # one op in so many budgets is small: its results keep their names


@dataclass(frozen=True, eq=False)
class LiveSplit:
    """How a step in a graph runs on pieces.

    Attributes:
        split: of the step.
        given: the graph without gradients that nothing reads.
        rewrites: of that.
        graph: a copy with these.
        step: the step in that copy.
        evaluated: ops of the copy that ran before any gradient: what an evaluation may fetch.
        budget: bytes of the tensors: what the user's budget leaves for them.
    """

    split: SplitStep
    given: Graph
    rewrites: tuple[Rewrite, ...]
    graph: Graph
    step: Step
    evaluated: frozenset[str]
    budget: int


def divide_live(
    given: Graph, step: Step, read: Callable[[Graph, tuple[str, ...]], Step], engine: Engine
) -> LiveSplit | Refusal:
    """The fastest division of a step that meets the budget, or why there is none.

    Args:
        given: the graph, whose shapes hold whatever is fed; not changed.
        step: the step in it.
        read: the step in an edited graph, whose ops have an order of creation.
        engine: budget, device and options.

    Raises:
        GraphError: the rewrites do not fit together.
    """
    settings, fetched = engine.settings, {tensor.node for tensor in step.fetches}
    assert settings.budget is not None
    given = _without_unread(given, step)
    graph, sizes = with_static_sizes(given, step.order, fetched)
    region = read(graph, step.order)
    graph, gates = with_open_gates(graph, region.order, fetched)
    region = read(graph, region.order)
    late = graph.reached(_backward(graph), graph.successors)
    users = _users(graph, region, late, settings.budget // HELD)
    costs, offload = engine.estimate(workspace=False), settings.options.offload
    budget = filled(region.timeline(costs), settings.budget)
    split = split_step(region, lambda each: each.timeline(costs), engine.link, budget, offload, users=users)
    if isinstance(split, Refusal):
        spare = settings.budget - budget
        return Reason.SPLIT_CHUNKS(spare=f"{spare:,}", why=str(split)) if spare else split
    edited, order = split_graph(split.plan, graph)
    evaluated = frozenset(node.name for node in graph if node.name not in late and node.name in edited.nodes)
    waits = _waits(edited, read(edited, order).graph, evaluated)
    apply_rewrites(waits, edited)
    rewrites = (*sizes, *gates, *split_rewrites(SplitChoice(split.plan), graph), *waits)
    return LiveSplit(split, given, rewrites, edited, read(edited, order), evaluated, budget)


def trains_if_evaluated(found: LiveSplit, ordered: Graph) -> Refusal | None:
    """Why the split cannot stay: an op that ran before the gradients would run an update.

    Args:
        found: the split.
        ordered: its step with the control edges that hold the planned order.
    """
    updates = [node.name for node in ordered if writes(node)]
    updating = ordered.reached(updates, ordered.successors)
    for name in sorted(found.evaluated):
        if name in updating and not writes(ordered[name]):
            return Reason.SPLIT_UPDATES(node=name)
    beside = found.evaluated.difference(ordered.nodes)
    for name in sorted(found.graph.reached(beside, found.graph.predecessors) & updating):
        if not writes(ordered[name]):
            return Reason.SPLIT_UPDATES(node=name)
    return None


def _without_unread(given: Graph, step: Step) -> Graph:
    """A copy without the gradients beside the step that nothing reads, such as the input's: the live graph
    keeps them, and pieces leave no tensor for them."""
    graph = given.copy()
    late = graph.reached(gradient_ops(graph), graph.successors).difference(step.graph.nodes)
    pending = [name for name in late if graph[name].op in IDENTITIES]
    while pending:
        node = graph[pending.pop()]
        if next(graph.successors(node), None) is None:
            before = {name for name in graph.predecessors(node) if name in late and graph[name].op in IDENTITIES}
            graph.remove([node.name])
            pending += before
    return graph


def _backward(graph: Graph) -> list[str]:
    """Ops that make gradients, by their types or by what they multiply, and updates."""
    return [*gradient_ops(graph), *(node.name for node in graph if writes(node))]


def _waits(graph: Graph, step: Graph, evaluated: Collection[str]) -> list[Rewrite]:
    """Updates wait for what an evaluation needs of the step; else the planned order might have that wait for updates.

    Args:
        graph: with the pieces.
        step: the step in it.
        evaluated: ops of the graph.
    """
    updates = [node.name for node in step if writes(node)]
    after = step.reached(updates, step.successors)
    needed = {name for name in graph.reached(evaluated, graph.predecessors) if name in step.nodes and name not in after}
    ends = [name for name in needed if step[name].op != "Const" and needed.isdisjoint(step.successors(step[name]))]
    if not ends or not updates:
        return []
    name = Names(graph).fresh("tfmem/evaluated")
    made = NewNode(name, "NoOp", device=step[updates[0]].device, control=tuple(sorted(ends)))
    return [Rewrite("evaluated", (made,), order=tuple((update, name) for update in updates))]


def _users(graph: Graph, step: Step, late: Collection[str], most: int) -> Users:
    """What reads tensors of the step but the step.

    Args:
        graph: the step's graph.
        step: the step.
        late: ops that make gradients, and those behind them.
        most: bytes of what an op reads and makes, if that is small.
    """
    inside = step.graph.nodes
    small = (node.name for node in step.graph if node.name not in late and _takes(step.graph, node, most))
    beside = (tensor for node in graph if node.name not in inside for tensor in node.inputs)
    return Users(
        held=frozenset((*small, *(tensor.node for tensor in step.fetches))),
        read=frozenset(tensor for tensor in beside if tensor.node in inside),
    )


def _takes(graph: Graph, node: Node, most: int) -> bool:
    """Whether what an op reads and makes is known to take at most so many bytes."""
    tensors = (*node.inputs, *graph.tensors(node))
    return all(graph.sizes(tensor) is not None for tensor in tensors) and sum(map(graph.nbytes, tensors)) <= most
