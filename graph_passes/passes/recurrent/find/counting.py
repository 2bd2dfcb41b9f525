"""Whole numbers of a loop as sums: what a counter starts from, which item a step reads, how many steps there are.

A scalar of the graph around a loop is a `Linear`: scalars that are not taken apart, each times a whole number, and a
number. A scalar of a step is a `StepNumber`: a `Linear` and what every step adds to it. So `x[n - 1 - i]` of a
counter i that starts from 0 is read at `StepNumber(n - 1, -1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed, scalar_value
from graph_passes.passes.recurrent.find.equal_scalars import Key, dimension_key, scalar_key

Atom: TypeAlias = tuple[TensorId, int] | TensorId
_WHOLE = ("int32", "int64")
_SUMS = {"Add": 1, "AddV2": 1, "Sub": -1}


@dataclass(frozen=True)
class Linear:
    """A sum: each scalar in `terms` times its factor, which is not 0, and `number`."""

    terms: frozenset[tuple[Atom, int]] = frozenset()
    number: int = 0

    def plus(self, other: Linear | int, factor: int = 1) -> Linear:
        """This and `factor` times the other."""
        if isinstance(other, int):
            return Linear(self.terms, self.number + factor * other)
        found = dict(self.terms)
        for atom, times in other.terms:
            found[atom] = found.get(atom, 0) + factor * times
        left = frozenset((atom, times) for atom, times in found.items() if times)
        return Linear(left, self.number + factor * other.number)

    def times(self, factor: int) -> Linear:
        """This, `factor` times."""
        return Linear().plus(self, factor)

    @property
    def key(self) -> Key | None:
        """The number or the scalar that this is, if it is one."""
        if not self.terms:
            return self.number
        (atom, factor), *more = self.terms
        return atom if not more and factor == 1 and self.number == 0 else None

    @property
    def is_size(self) -> bool:
        """Whether it is surely not negative: a dimension of a tensor, or such a number."""
        key = self.key
        return key >= 0 if isinstance(key, int) else key is not None and not isinstance(key, TensorId)


@dataclass(frozen=True)
class StepNumber:
    """A whole number of each step: `start` in the first one, and `step` more in each that follows."""

    start: Linear
    step: int = 0

    def plus(self, other: StepNumber, factor: int = 1) -> StepNumber:
        """This and `factor` times the other."""
        return StepNumber(self.start.plus(other.start, factor), self.step + factor * other.step)


FORWARDS = StepNumber(Linear(), 1)  # the step's number


def linear(graph: Graph, tensor: TensorId) -> Linear:
    """What a scalar of `graph` is."""
    source = passed(graph, tensor)
    node = graph[source.node]
    number = scalar_value(graph, source)
    if isinstance(number, int):
        return Linear(number=int(number))
    if node.op in _SUMS and _is_whole(graph, source):
        left, right = (linear(graph, side) for side in node.inputs)
        return left.plus(right, _SUMS[node.op])
    return of_key(scalar_key(graph, source))


def of_key(key: Key) -> Linear:
    """A number or a scalar as a sum."""
    return Linear(number=key) if isinstance(key, int) else Linear(frozenset({(key, 1)}))


@dataclass(frozen=True)
class Numbers:
    """Reads whole numbers of a loop's body, or of its condition.

    Attributes:
        around: the graph around the loop.
        graph: that of the body or the condition.
        fixed: its arguments that every step has alike, by name: the tensors around.
        counted: its arguments that count, by name.
    """

    around: Graph
    graph: Graph
    fixed: Mapping[str, TensorId]
    counted: Mapping[str, StepNumber]

    def place(self, tensor: TensorId) -> StepNumber | None:
        """What the scalar `tensor` is in each step; None if that is unknown."""
        graph = self.graph
        source = passed(graph, tensor)
        number = scalar_value(graph, source)
        if isinstance(number, int):
            return StepNumber(Linear(number=int(number)))
        if source.node in self.counted:
            return self.counted[source.node]
        node = graph[source.node]
        if node.op in _SUMS and _is_whole(graph, source):
            left, right = (self.place(side) for side in node.inputs)
            return None if left is None or right is None else left.plus(right, _SUMS[node.op])
        if node.op == "Neg":
            inner = self.place(node.inputs[0])
            return None if inner is None else StepNumber(Linear()).plus(inner, -1)
        if node.op == "Mul":
            sides = [self.place(side) for side in node.inputs]
            factors = [side.start.key for side in sides if side is not None and side.step == 0]
            factor = next((key for key in factors if isinstance(key, int)), None)
            other = next((s for s in sides if s is None or s.step or s.start.key != factor), sides[0])
            return None if factor is None or other is None else StepNumber(Linear()).plus(other, factor)
        if node.op == "Cast" and _is_whole(graph, source) and _is_whole(graph, node.inputs[0]):
            return self.place(node.inputs[0])
        return self._given(scalar_key(graph, source))

    def _given(self, key: Key) -> StepNumber | None:
        """What a scalar is that an argument says: its value, or a size of it."""
        if isinstance(key, int):
            return StepNumber(Linear(number=key))
        source, axis = (key, None) if isinstance(key, TensorId) else key
        outside = self.fixed.get(source.node)
        if outside is None:
            return None
        if axis is not None:
            return StepNumber(of_key(dimension_key(self.around, outside, axis)))
        return StepNumber(linear(self.around, outside))


def _is_whole(graph: Graph, tensor: TensorId) -> bool:
    spec = graph.specs.get(tensor)
    return spec is None or (spec.dtype in _WHOLE and spec.shape in ((), None))


def steps_until(counter: StepNumber, op: str, limit: Linear) -> Linear | None:
    """How many steps pass while `counter op limit` holds, where that is not negative; None if it cannot be told."""
    up = op in ("Less", "LessEqual") or (op == "NotEqual" and counter.step > 0)
    if up != (counter.step > 0):
        return None
    span = limit.plus(counter.start, -1) if up else counter.start.plus(limit, -1)
    span, size = span.plus(int(op.endswith("Equal") and op != "NotEqual")), abs(counter.step)
    number = span.key if isinstance(span.key, int) else None
    if op == "NotEqual" and (number is None or number < 0 or number % size):
        return None
    if size == 1:
        return span
    return None if number is None else Linear(number=-(-number // size))
