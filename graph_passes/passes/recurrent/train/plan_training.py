"""Replaces recurrences together with their gradients: pairs of loops, or a `CudnnRNN` with its `CudnnRNNBackprop`.

The forward op is read as in inference, and then launched with the forward cell of its gradient, which keeps what the
backward cell needs. `Gradients` differentiates all that the match inserts: hoisted products, the recurrence and casts
alike. The new gradient ops read the gradients that the old gradient op read, and replace what it made; so gradients
of other parts, before or after, do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from custom_ops.errors import CellError
from custom_ops.recurrent.differentiate import differentiate
from graph_passes.errors import GraphError
from graph_passes.graph.dead_code import dead_code
from graph_passes.graph.ir import DataType, Graph, TensorId
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.passes.recurrent.faults import attempt
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.find.step_gradients import RolledGradient
from graph_passes.passes.recurrent.lower.bidirectional import paired
from graph_passes.passes.recurrent.match import Direction, Match, RecurrentNode, RecurrentPlan, Unmatched
from graph_passes.passes.recurrent.train.inner_steps import with_inner_steps
from graph_passes.passes.recurrent.train.loop_pairs import Pair, gradient_loops, read_pair
from graph_passes.passes.recurrent.train.trained import Trained, cudnn_pairs, trained_cudnn, trained_loop, trained_steps
from graph_passes.refusals import Reason, Refusal

# How new nodes are differentiated: graph, nodes, (result, its gradient) ..., inputs, what these stand for, what gives
# names, a prefix -> new nodes, the gradient of each input or None. This takes TensorFlow
# (`tfmem/capture/inserted_gradients.py`), so it is handed in.
Gradients = Callable[
    [
        Graph,
        Sequence[NewNode | RecurrentNode],
        Sequence[tuple[TensorId, TensorId]],
        Sequence[TensorId],
        Mapping[TensorId, TensorId],
        Names,
        str,
    ],
    tuple[tuple[NewNode | RecurrentNode, ...], tuple[TensorId | None, ...]],
]

# Why the gradient loop of a pair is not the derivative of its forward loop, or cannot be checked; None if it is. This
# takes TensorFlow, too (`tfmem/capture/gradient_check.py`).
Check = Callable[[Graph, Pair], Refusal | None]

# Why a match would be slower than what it replaces, where it is to be trained or not; None if it would not be.
Slow = Callable[[Match, bool], Refusal | None]


@dataclass(frozen=True)
class Training:
    """What `plan_training` found.

    Attributes:
        plan: what to replace.
        nodes: the forward and gradient ops, replaced or not: they are no inference.
    """

    plan: RecurrentPlan
    nodes: frozenset[str]


def plan_training(
    graph: Graph,
    keep: Collection[str],
    gradients: Gradients,
    check: Check,
    names: Names,
    rolled: Sequence[RolledGradient] = (),
    slow: Slow | None = None,
) -> Training:
    """Find every recurrence that is there with its gradient.

    Args:
        graph: the graph, with functions.
        keep: names of the nodes that the caller reads or runs.
        gradients: see `Gradients`.
        check: see `Check`.
        names: gives names to new nodes.
        rolled: loops that stand for unrolled steps, and their gradients.
        slow: see `Slow`; asked before a gradient is made, which takes seconds where a step has thousands of ops.
    """
    groups: dict[str, list[str]] = {}
    recurrences, matches = dict[str, Trained](), list[Match]()
    unmatched: list[Unmatched] = []
    for kind, pairs in (("loop", gradient_loops), ("CudnnRNN", cudnn_pairs)):
        with attempt(unmatched, f"every {kind} with its gradient from here on", kind):
            for forward, backward in pairs(graph):
                groups.setdefault(forward, []).append(backward)
    steps = {each.forward: each for each in rolled}
    groups |= {each.forward: [each.backward] for each in rolled}
    inner = {backward for backwards in groups.values() for backward in backwards}

    def carrier(forward: str) -> str:
        return f"{'unrolled' if forward in steps else graph[forward].op} and its gradient"

    for forward, backwards in groups.items():
        if forward in inner or any(backward in groups for backward in backwards):
            unmatched.append(Unmatched(forward, carrier(forward), Reason.SECOND_GRADIENT()))
            continue
        with attempt(unmatched, forward, carrier(forward)):
            if forward in steps:
                recurrences[forward] = trained_steps(graph, steps[forward], names, keep)
            elif (forward, "body") in graph.functions:
                recurrence = trained_loop(graph, forward, backwards, names, keep)
                for pair in (read_pair(graph, forward, backward) for backward in backwards):
                    if (reason := check(with_inner_steps(graph, pair), pair)) is not None:
                        raise Unreadable(reason)
                recurrences[forward] = recurrence
            else:
                recurrences[forward] = trained_cudnn(graph, forward, backwards, names, keep)
    for match in paired(graph, [recurrence.joinable for recurrence in recurrences.values()], names, unmatched):
        parts = [recurrence for recurrence in recurrences.values() if recurrence.forward in match.removed]
        kind = carrier(parts[0].forward)
        with attempt(unmatched, match.name, kind, GraphError, CellError):
            if slow is not None and (reason := slow(match, True)) is not None:
                raise Unreadable(reason)
            whole = _Whole(graph, names, keep, match, parts, gradients).match()
            matches.append(replace(whole, carrier=kind))
    found = frozenset({*groups, *inner})
    return Training(RecurrentPlan(tuple(matches), tuple(unmatched)), found)


class _Whole:
    """A match of the forward ops of one or two directions, with their gradient ops."""

    def __init__(
        self,
        graph: Graph,
        names: Names,
        keep: Collection[str],
        match: Match,
        recurrences: Sequence[Trained],
        gradients: Gradients,
    ) -> None:
        self.graph = graph
        self.names = names
        self.keep = frozenset(keep)
        self.ahead = differentiable(match)
        self.recurrences = recurrences
        self.gradients = gradients

    def match(self) -> Match:
        """
        Raises:
            Unreadable, GraphError, CellError: why there is none.
        """
        ahead = self.ahead
        new = dict(ahead.rewired)
        for recurrence in self.recurrences:
            new = dict(recurrence.unchanged) | new
        nodes: list[NewNode | RecurrentNode] = list(ahead.nodes)
        for number in range(max(len(recurrence.backwards) for recurrence in self.recurrences)):
            made, rewired = self.backward(new, number)
            nodes += made
            new |= rewired
        old = [name for recurrence in self.recurrences for name in recurrence.nodes]
        removed = dead_code(self.graph, old, nodes, new, self.keep)
        alive = {old: tensor for old, tensor in new.items() if any(u.node not in removed for u in self.graph.uses(old))}
        self.require_nothing_lost(removed, alive)
        return replace(ahead, nodes=tuple(nodes), rewired=tuple(alive.items()), removed=tuple(sorted(removed)))

    def require_nothing_lost(self, removed: Collection[str], new: Mapping[TensorId, TensorId]) -> None:
        for name in sorted(removed):
            for tensor in self.graph.tensors(self.graph[name]):
                reader = next((use.node for use in self.graph.uses(tensor) if use.node not in removed), None)
                if reader is not None and tensor not in new:
                    raise Unreadable(Reason.GRADIENT_LOST(reader=reader, tensor=tensor))

    def backward(
        self, new: Mapping[TensorId, TensorId], number: int
    ) -> tuple[list[NewNode | RecurrentNode], dict[TensorId, TensorId]]:
        """The new gradient ops, and what takes the place of the tensors that the old ones made.

        Each direction has its own name for what it reads: the gradients of one sequence that both read are two.
        """
        chosen = [
            (place, recurrence.backwards[number])
            for place, recurrence in enumerate(self.recurrences)
            if number < len(recurrence.backwards)
        ]
        stand_ins: dict[tuple[int, TensorId], TensorId] = {}
        given: list[tuple[TensorId, TensorId]] = []
        for place, backward in chosen:
            for item in backward.wanted:
                if item.old.node in self.keep:
                    raise Unreadable(Reason.GRADIENT_FETCHED(tensor=item.old))
                stand_ins[place, item.x] = TensorId(f"{item.x.node}/tfmem_entry_{place}", item.x.index)
            for old, gradient in backward.given:
                if old not in new:
                    raise Unreadable(Reason.GRADIENT_WITHOUT_RESULT(tensor=old))
                given.append((new[old], gradient))
        nodes = [self.with_stand_ins(node, stand_ins) for node in self.ahead.nodes]
        outside = {entry: x for (_, x), entry in stand_ins.items()}
        prefix = f"{chosen[0][1].name}/tfmem"
        made, found = self.gradients(self.graph, nodes, given, list(outside), outside, self.names, prefix)
        gradient_of = dict(zip(outside, found, strict=True))
        added, rewired = list[NewNode | RecurrentNode](made), dict[TensorId, TensorId]()
        for place, backward in chosen:
            for item in backward.wanted:
                found_gradient = gradient_of[stand_ins[place, item.x]]
                again = [*item.moves, item.listed] if item.listed else item.moves
                if found_gradient is None and item.zero is not None:
                    found_gradient, again = item.zero, ()
                if found_gradient is None:
                    zeros = self.names.fresh(f"{prefix}/zeros")
                    added.append(NewNode(zeros, "ZerosLike", (item.x,), {"T": self.dtype(item.x)}))
                    found_gradient = TensorId(added[-1].name)
                for name in again:
                    node, label = self.graph[name], self.names.fresh(f"{prefix}/{self.graph[name].op}")
                    added.append(NewNode(label, node.op, (found_gradient, node.inputs[1]), dict(node.attrs)))
                    found_gradient = TensorId(label)
                rewired[item.old] = found_gradient
        return added, rewired

    def dtype(self, tensor: TensorId) -> DataType:
        return DataType(self.graph.specs[tensor].dtype)

    def with_stand_ins(
        self, node: NewNode | RecurrentNode, stand_ins: Mapping[tuple[int, TensorId], TensorId]
    ) -> NewNode | RecurrentNode:
        def renamed(place: int, tensors: Sequence[TensorId]) -> tuple[TensorId, ...]:
            return tuple(stand_ins.get((place, tensor), tensor) for tensor in tensors)

        if isinstance(node, NewNode):
            among = (place for place, recurrence in enumerate(self.recurrences) if node.name in recurrence.new_nodes)
            return replace(node, inputs=renamed(next(among, 0), node.inputs))
        order = [
            next((p for p, recurrence in enumerate(self.recurrences) if recurrence.reverse == d.reverse), 0)
            for d in node.directions
        ]
        directions = [
            Direction(
                renamed(place, direction.sequences),
                renamed(place, direction.invariants),
                renamed(place, direction.vectors),
                renamed(place, direction.matrices),
                renamed(place, direction.states),
                direction.reverse,
            )
            for place, direction in zip(order, node.directions, strict=True)
        ]
        return replace(node, directions=tuple(directions))


def differentiable(match: Match) -> Match:
    """The match with launches that keep what their gradients need."""
    moved: dict[TensorId, TensorId] = {}
    nodes: list[NewNode | RecurrentNode] = []
    for node in match.nodes:
        if isinstance(node, RecurrentNode) and not node.counts:
            new = replace(node, cell=differentiate(node.cell).forward, base=node.cell)
            moved |= node.results_in(new)
            nodes.append(new)
        elif isinstance(node, RecurrentNode):
            nodes.append(node)
        else:
            nodes.append(replace(node, inputs=tuple(moved.get(tensor, tensor) for tensor in node.inputs)))
    rewired = tuple((old, moved.get(new, new)) for old, new in match.rewired)
    return replace(match, nodes=tuple(nodes), rewired=rewired)
