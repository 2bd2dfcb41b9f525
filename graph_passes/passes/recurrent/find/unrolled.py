"""Unrolled recurrences: an Unpack, and the same step written once for each item. `roll.py` makes a loop of them,
which is then read as any other.

Step t and step t + 1 are found by walking from the readers of item t and of item t + 1 side by side, along inputs and
outputs, as long as ops, attributes and what enters from outside agree. A node and its likes in all other steps are a
*chain*; one that has a node for each step is part of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph_passes.graph.ir import Graph, Node, TensorId, Use, integer
from graph_passes.graph.ops import READS, copied
from graph_passes.graph.order import topological
from graph_passes.refusals import Reason, Refusal

_PRODUCTS = frozenset({"MatMul", "BatchMatMulV2"})


@dataclass(frozen=True)
class Unrolled:
    """A recurrence found.

    Attributes:
        unpack: the node that gives the items of the first sequence.
        chains: for each chain, its node in every step.
        sequences: Unpack nodes that steps read.
        states: what a step takes from the one before, and what the first step takes instead.
        stacked: Pack nodes of an output of every step.
        last: outputs of the last step that are read by others.
        backwards: whether the first step reads the last item.
        zeros: nodes that make zeros of the shape of something in a step, and what else has that shape.
        gradient: nodes that read single steps, as the gradient of all of them does.
        masks: what the second step reads, and what each reads in its place: comparisons with the number of the step.
    """

    unpack: str
    chains: tuple[tuple[str, ...], ...]
    sequences: tuple[str, ...]
    states: Mapping[TensorId, TensorId]
    stacked: Mapping[str, TensorId]
    last: tuple[TensorId, ...]
    backwards: bool
    zeros: Mapping[str, TensorId]
    gradient: tuple[str, ...] = ()
    masks: Mapping[TensorId, tuple[TensorId, ...]] = field(default_factory=dict)

    @property
    def carried(self) -> list[TensorId]:
        """What a step hands on to the next, or out of the loop when it is the last."""
        return [*self.states, *(tensor for tensor in self.last if tensor not in self.states)]


class RecurrenceSearch:
    """Looks for one recurrence over the items of `unpack`.

    Where `needed` is given, the names of nodes that a result or an effect depends on, the graph may have the gradient
    of the steps. The search then looks at these alone, and takes those that read single steps for that gradient. A step
    reads no later item, and a gradient reads them all, through the steps; so neither is taken for the other.
    """

    def __init__(self, graph: Graph, unpack: Node, backwards: bool, needed: Collection[str] | None = None) -> None:
        self.graph, self.unpack, self.steps, self.backwards = graph, unpack, unpack.outputs, backwards
        self.needed = needed
        self.next: dict[str, str] = {}
        self.previous: dict[str, str] = {}
        unpacked = [node.name for node in graph if node.op == "Unpack" and node.outputs == self.steps]
        self.dependent = graph.reached(unpacked, graph.readers)
        self.latest = {} if needed is None else self._latest(unpacked)
        self.waiting: list[tuple[str, str]] = []
        self.zeros: list[str] = []
        self.masks: dict[TensorId, tuple[TensorId, ...]] = {}
        self.refused: tuple[frozenset[str], Refusal] | None = None  # a recurrence that `find` found and left, and why

    def item(self, step: int) -> int:
        """The item that a step reads."""
        return self.steps - 1 - step if self.backwards else step

    def _latest(self, unpacked: Collection[str]) -> dict[str, int]:
        """The last step whose items each node needs; -1: none."""
        latest: dict[str, int] = {}

        def of(tensor: TensorId) -> int:
            return self.item(tensor.index) if tensor.node in unpacked else latest[tensor.node]

        for name in topological(self.graph):
            latest[name] = max(map(of, self.graph[name].inputs), default=-1)
        return latest

    def _needed_uses(self, tensor: TensorId) -> Iterator[Use]:
        return (use for use in self.graph.uses(tensor) if self.needed is None or use.node in self.needed)

    def find(self, keep: Collection[str]) -> Unrolled | None:
        """The recurrence over the items, if there is one."""
        for step in range(self.steps - 1):
            here, there = (TensorId(self.unpack.name, self.item(place)) for place in (step, step + 1))
            self._pair_uses(here, there)
        while self.waiting:
            self._grow(*self.waiting.pop())
        starts = [name for name in self.next if name not in self.previous]
        chains = [chain for chain in map(self._chain, starts) if len(chain) == self.steps]
        if self.needed is not None:
            chains += self._forms(chains)
        return self._check(chains, keep) if chains else None

    def _chain(self, name: str) -> tuple[str, ...]:
        chain = [name]
        while chain[-1] in self.next and len(chain) <= self.steps:
            chain.append(self.next[chain[-1]])
        return tuple(chain)

    def _forms(self, chains: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Nodes that take a part of a weight, each step for itself: there the gradients of steps are still apart."""
        known = {name for chain in chains for name in chain}
        found: list[tuple[str, ...]] = []
        waiting = list(chains)
        while waiting:
            for inputs in zip(*(self.graph[name].inputs for name in waiting.pop()), strict=True):
                nodes = tuple(tensor.node for tensor in inputs)
                first = self.graph[nodes[0]]
                plain = first.inputs and not first.stateful and first.op not in READS
                if not plain or len({*nodes} - known - self.dependent) < self.steps:
                    continue
                if all(same(self.graph, inputs[0], tensor) for tensor in inputs[1:]):
                    known |= set(nodes)
                    found.append(nodes)
                    waiting.append(nodes)
        return found

    def _pair_uses(self, here: TensorId, there: TensorId) -> None:
        groups: dict[tuple[str, int], list[str]] = {}
        for use in self.graph.uses(there):
            groups.setdefault((self.graph[use.node].op, use.index), []).append(use.node)
        for use in self.graph.uses(here):
            others = groups.get((self.graph[use.node].op, use.index), [])
            if use.node in self.next:
                continue
            partner = next((other for other in others if self._agree(use.node, other)), None)
            if partner is not None:
                others.remove(partner)
                self._pair(use.node, partner)

    def _pair(self, here: str, there: str) -> None:
        if here not in self.next and there not in self.previous and self._agree(here, there):
            self.next[here], self.previous[there] = there, here
            self.waiting.append((here, there))

    def _grow(self, here: str, there: str) -> None:
        one, other = self.graph[here], self.graph[there]
        for left, right in zip(one.inputs, other.inputs, strict=True):
            if right.node in self.dependent and left.index == right.index and self.graph[right.node].op != "Unpack":
                self._pair(left.node, right.node)
        for index in range(one.outputs):
            self._pair_uses(TensorId(here, index), TensorId(there, index))

    def _agree(self, here: str, there: str) -> bool:
        one, other = self.graph[here], self.graph[there]
        if here == there or one.op != other.op or copied(one) != copied(other):
            return False
        if len(one.inputs) != len(other.inputs) or there not in self.dependent:
            return False
        if self.latest and self.latest[there] != self.latest[here] + 1:
            return False
        if here not in self.dependent and not self._is_in_step(here, there):
            return False
        return all(self._agree_in(*pair) for pair in zip(one.inputs, other.inputs, strict=True))

    def _is_in_step(self, here: str, there: str) -> bool:
        """Whether a node that no item enters is part of the first step, and not what that reads instead of a state.

        It is if a state meets something there that all steps share: weights, or a mask.
        """
        one, other = self.graph[here], self.graph[there]
        if one.op != other.op or len(one.inputs) != len(other.inputs) or here in self.dependent:
            return False
        pairs = list(zip(one.inputs, other.inputs, strict=True))
        shared = (same(self.graph, *pair) if one.op in _PRODUCTS else pair[0] == pair[1] for pair in pairs)
        return any(shared) or any(self._is_in_step(left.node, right.node) for left, right in pairs)

    def _agree_in(self, left: TensorId, right: TensorId) -> bool:
        kinds = [self.graph[tensor.node].op == "Unpack" and tensor.node in self.dependent for tensor in (left, right)]
        if any(kinds):
            step = right.index - left.index
            return all(kinds) and left.node == right.node and step == (-1 if self.backwards else 1)
        fixed = [tensor.node not in self.dependent for tensor in (left, right)]
        if not all(fixed):
            return not fixed[1]
        return same(self.graph, left, right) or (self._is_mask(right) and counted(self.graph, left, right))

    def _is_mask(self, tensor: TensorId) -> bool:
        spec = self.graph.specs.get(tensor)
        return self.needed is not None and spec is not None and spec.dtype == "bool" and spec.shape is not None

    def _check(self, chains: list[tuple[str, ...]], keep: Collection[str]) -> Unrolled | None:
        """The recurrence, if the chains are one, in every step alike."""
        step_of = {name: (chain[0], step) for chain in chains for step, name in enumerate(chain)}

        def refuse(reason: Refusal) -> Unrolled | None:
            self.refused = (frozenset(step_of), reason)
            return None

        sequences: dict[str, None] = {self.unpack.name: None}
        states: dict[TensorId, TensorId] = {}
        for chain in chains:
            for place in range(len(self.graph[chain[0]].inputs)):
                inputs = [self.graph[name].inputs[place] for name in chain]
                if self.graph[inputs[1].node].op == "Unpack" and inputs[1].node in self.dependent:
                    wanted = [TensorId(inputs[0].node, self.item(step)) for step in range(self.steps)]
                    if inputs != wanted:
                        return None
                    sequences[inputs[0].node] = None
                elif not self._check_input(inputs, step_of, states):
                    return None
        if not states:
            return None
        fetched = next((name for name in step_of if name in keep), None)
        if fetched is not None:
            return refuse(Reason.STEP_FETCHED(node=fetched))
        stacked: dict[str, TensorId] = {}
        last: dict[TensorId, None] = {}
        gradient: dict[str, None] = {}
        for chain in chains:
            for index in range(self.graph[chain[0]].outputs):
                tensors = [TensorId(name, index) for name in chain]
                reader = self._check_readers(tensors, step_of, stacked, last, gradient)
                if reader is not None:
                    return refuse(Reason.STEP_READ.of(reader, tensor=reader.inputs[0]))
        likes = {name: self._like(name, states) for name in self.zeros}
        zeros = {name: tensor for name, tensor in likes.items() if tensor is not None}
        fetched = next((name for name in stacked if name in keep), None)
        if fetched is not None:
            return refuse(Reason.STEPS_FETCHED(node=fetched))
        if len(zeros) < len(likes):
            name = next(name for name in likes if name not in zeros)
            return refuse(Reason.STEP_ZEROS(node=name))
        return Unrolled(
            self.unpack.name, tuple(chains), tuple(sequences), states, stacked, tuple(last), self.backwards, zeros,
            tuple(gradient), self.masks,
        )  # fmt: skip

    def _like(self, name: str, states: Mapping[TensorId, TensorId]) -> TensorId | None:
        """Something outside of the steps that has the shape of the zeros that the node `name` makes."""
        wanted = self.graph.specs[TensorId(name)]
        found = (tensor for tensor in states.values() if tensor.node not in self.zeros)
        return next((tensor for tensor in found if self.graph.specs[tensor] == wanted), None)

    def _check_input(
        self, inputs: list[TensorId], step_of: dict[str, tuple[str, int]], states: dict[TensorId, TensorId]
    ) -> bool:
        places = [step_of.get(tensor.node) for tensor in inputs]
        second = places[1]
        if second is None:
            if any(place is not None for place in places):
                return False
            if all(same(self.graph, inputs[0], tensor) for tensor in inputs[1:]):
                return True
            if not self._is_mask(inputs[1]) or not all(counted(self.graph, inputs[0], t) for t in inputs[1:]):
                return False
            self.masks[inputs[1]] = tuple(inputs)
            return True
        first, step = second
        if any(tensor.index != inputs[1].index for tensor in inputs[1:]):
            return False
        if step == 1:
            return places == [(first, number) for number in range(self.steps)]
        carried = TensorId(first, inputs[1].index)
        if step != 0 or places[1:] != [(first, number) for number in range(self.steps - 1)] or places[0] is not None:
            return False
        return states.setdefault(carried, inputs[0]) == inputs[0]

    def _way(self, use: Use) -> tuple[str, int, dict[str, Any]]:
        """How a node reads a tensor: a loss that reads the last step does so in another way than a gradient."""
        node = self.graph[use.node]
        return node.op, use.index, copied(node)

    def _axis(self, pack: Node) -> int | None:
        """Where time is in what `pack` makes; None if that is unknown."""
        spec, axis = self.graph.specs.get(TensorId(pack.name)), integer(pack.attrs.get("axis", 0))
        if axis == 0 or spec is None or spec.shape is None:
            return 0 if axis == 0 else None
        return axis % len(spec.shape)

    def _check_readers(
        self,
        tensors: list[TensorId],
        step_of: dict[str, tuple[str, int]],
        stacked: dict[str, TensorId],
        last: dict[TensorId, None],
        gradient: dict[str, None],
    ) -> Node | None:
        """The node that reads what a loop would not give, if there is one."""
        early = [] if self.needed is None else [use for tensor in tensors[:-1] for use in self._needed_uses(tensor)]
        like = [self._way(use) for use in early if use.node not in step_of]
        for step, tensor in enumerate(tensors):
            for use in self._needed_uses(tensor):
                reader = self.graph[use.node]
                if use.node in step_of:
                    continue
                if reader.op == "Pack" and reader.inputs == tensors and self._axis(reader) in (0, 1):
                    stacked[reader.name] = tensors[0]
                elif self._way(use) in like:
                    gradient[reader.name] = None
                elif reader.op == "ZerosLike":
                    self.zeros.append(reader.name)
                elif step == len(tensors) - 1:
                    last[tensors[0]] = None
                else:
                    return reader
        return None


def counted(graph: Graph, one: TensorId, other: TensorId) -> bool:
    """Whether two tensors are the same ops on the same tensors, but for whole numbers: those of two steps, say."""
    return same(graph, one, other, whole_numbers=False)


def same(graph: Graph, one: TensorId, other: TensorId, whole_numbers: bool = True) -> bool:
    """Whether two tensors are surely equal: the same ops on the same tensors, as when a weight is read twice.

    Args:
        graph: the graph of both.
        one, other: the tensors.
        whole_numbers: whether single whole numbers in their place have to be equal, too.
    """
    if one == other:
        return True
    left, right = graph[one.node], graph[other.node]
    if not whole_numbers and left.op == right.op == "Const":
        values = [graph.constants.get(node.name) for node in (left, right)]
        if all(value is not None and value.shape == () and value.dtype.kind == "i" for value in values):
            return True
    plain = left.op == right.op and one.index == other.index and (not left.stateful or left.op in READS)
    if not plain or len(left.inputs) != len(right.inputs) or copied(left) != copied(right):
        return False
    if left.op == "Const":
        value, other_value = graph.constants.get(left.name), graph.constants.get(right.name)
        return value is not None and other_value is not None and np.array_equal(value, other_value)
    if not left.inputs:
        return False
    return all(same(graph, *pair, whole_numbers) for pair in zip(left.inputs, right.inputs, strict=True))
