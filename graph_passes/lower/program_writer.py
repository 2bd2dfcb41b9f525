"""Writes a program from what its readers demand: elements of the outputs demand elements of the ops before them.

A rule (`rule.py`) says what one op's element is. It is a generator: it yields what it needs, a tensor and where, and is
sent the number of the node that computes it. So the element `[i, j]` of a sum of `a` and a row `b` is

    x = yield a, (i, j)
    y = yield b, (j,)
    return w.apply("add", x, y)

and the depth of a graph is no depth of Python's stack. An element is computed once, whatever demands it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from custom_ops.expr import nodes as expr
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import INTEGER_RANGES
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.lower.access import FIRST, Access, along, bounds
from graph_passes.lower.shapes import Shapes
from graph_passes.refusal import RefusedError
from graph_passes.refusals import Reason


class LoweringError(RefusedError, GraphError):
    """These ops are no one program."""


@dataclass(frozen=True)
class VariableValue:
    """What a variable holds whose handle is input `index` of `node`: before that node, or after it if `updated`."""

    node: str
    index: int
    updated: bool = False


Value: TypeAlias = TensorId | VariableValue
Demand: TypeAlias = tuple[Value, Access]
Steps: TypeAlias = Generator[Demand, int, int]

MOST_NODES = 10_000  # of a program: more of them are computed again and again at ever other places


class ProgramWriter:
    """A program as it grows.

    Attributes:
        graph: the ops.
        shapes: the sizes of tensors.
        nodes: what was written, each node once.
        sizes: of each axis; 0 where it is not known.
        tensors: what the inputs read, in the order of their numbers.
        states: those that random numbers are drawn with.
        demanded: where each value was demanded, in order.
    """

    def __init__(self, graph: Graph, shapes: Shapes, start: Callable[[ProgramWriter, Value, Access], Steps]) -> None:
        self.graph = graph
        self.shapes = shapes
        self.nodes: list[expr.Node] = []
        self.sizes: list[int] = []
        self.tensors: list[Value] = []
        self._numbers: dict[Value, int] = {}  # of `tensors`
        self.states: list[TensorId] = []
        self.demanded: dict[Value, list[Access]] = {}
        self._start = start
        self._symbols: list[int] = []
        self._types: list[tuple[str, frozenset[int]]] = []
        self._places: dict[object, int] = {}
        self._elements: dict[Demand, int] = {}

    def element(self, value: Value, at: Access) -> int:
        """The node that computes one element of a value, and all before it."""
        pending: list[tuple[Demand, Steps]] = []
        demand, found = (value, at), None
        while True:
            found = self._elements.get(demand)
            if found is None:
                self.demanded.setdefault(demand[0], []).append(demand[1])
                pending.append((demand, self._start(self, *demand)))
            while pending:
                try:
                    demand = pending[-1][1].send(found)  # type: ignore[arg-type]  # None starts it
                    break
                except StopIteration as done:
                    finished, _ = pending.pop()
                    found = self._elements[finished] = done.value
            else:
                assert found is not None
                return found

    def axis(self, size: int) -> int:
        """A new axis; a negative size is not known."""
        self.sizes.append(max(size, 0))
        self._symbols.append(size)
        return len(self.sizes) - 1

    def symbol(self, axis: int) -> int:
        """The size of an axis, negative if it is not known."""
        return self._symbols[axis]

    def everywhere(self, shape: Sequence[int]) -> Access:
        """New axes, one along each dimension."""
        return tuple(FIRST if size == 1 else along(self.axis(size)) for size in shape)

    def over(self, value: Value, dimensions: Sequence[int], at: Access) -> tuple[Access, tuple[int, ...]]:
        """Where to read a value in order to reduce it: `at`, but along axes that are not in `at` in `dimensions`.

        An axis is used again along which the value was read before, so that it is one value that is reduced and used
        elsewhere.

        Returns:
            the access, and the axes to reduce over.
        """
        shape = self.shapes[value]
        kept = [index for place, index in enumerate(at) if place not in dimensions]
        used = {axis for index in kept for axis in self.axes_of(index)}
        chosen: dict[int, int] = {}
        for place in dimensions:
            if shape[place] != 1:
                seen = [earlier[place].axis for earlier in (at, *self.demanded.get(value, ()))]
                free = [axis for axis in seen if axis is not None and axis not in used]
                same = [axis for axis in free if self.symbol(axis) == shape[place]]
                chosen[place] = same[0] if same else self.axis(shape[place])
                used.add(chosen[place])
        access = list(at)
        for place in dimensions:
            access[place] = along(chosen[place]) if place in chosen else FIRST
        return tuple(access), tuple(sorted(chosen.values()))

    def axes_of(self, index: expr.Index) -> frozenset[int]:
        """The axes along which an index varies."""
        own = frozenset([term.axis for term in index.terms])
        return own.union(*(self._types[place][1] for place in index.nodes)) if index.nodes else own

    def dtype(self, place: int) -> str:
        """The dtype of a node."""
        return self._types[place][0]

    def axes(self, place: int) -> frozenset[int]:
        """The axes along which a node varies."""
        return self._types[place][1]

    def read(self, value: Value, at: Access) -> int:
        """An element of a tensor that is given."""
        return self._add(
            expr.Input(self._tensor(value), at),
            self.shapes.dtype(value),
            frozenset().union(*map(self.axes_of, at)),
        )

    def random(self, dtype: str, key: TensorId, counter: TensorId, number: expr.Index) -> int:
        """One of a stateless generator's numbers."""
        self.states += [key, counter]
        node = expr.Random(dtype, self._tensor(key), self._tensor(counter), number)
        return self._add(node, dtype, self.axes_of(number))

    def apply(self, op: str, *arguments: int) -> int:
        """One op of the table."""
        dtype = "bool" if TABLE[op].comparison else self.dtype(arguments[-1])
        axes = self.axes(arguments[0]).union(*(self.axes(place) for place in arguments[1:]))
        return self._add(expr.Elementwise(op, arguments), dtype, axes)

    def number(self, dtype: str, value: float) -> int:
        """A constant of a dtype.

        Raises:
            LoweringError: it is an integer that the dtype does not hold.
        """
        kind: Callable[[Any], Any] = bool if dtype == "bool" else int if dtype in INTEGER_RANGES else float
        constant = expr.Constant(dtype, kind(value))
        if dtype in INTEGER_RANGES:
            self._require_range(dtype, constant.value, constant.value)
        return self._add(constant, dtype, frozenset(), key=(dtype, repr(constant.value)))

    def like(self, place: int, value: float) -> int:
        """A constant of the dtype of a node."""
        return self.number(self.dtype(place), value)

    def cast(self, dtype: str, operand: int) -> int:
        """A node in another dtype."""
        return (
            operand if self.dtype(operand) == dtype else self._add(expr.Cast(dtype, operand), dtype, self.axes(operand))
        )

    def reduce(self, kind: str, operand: int, axes: Sequence[int]) -> int:
        """One number for all along some axes; for none of them the number itself."""
        if not axes:
            return operand
        dtype = self.dtype(operand)
        return self._add(expr.Reduce(kind, operand, tuple(sorted(axes))), dtype, self.axes(operand) - set(axes))

    def position(self, index: expr.Index, dtype: str = "int32") -> int:
        """The number that an index is.

        Raises:
            LoweringError: the dtype does not hold all of its values.
        """
        self._require_range(dtype, *(bounds(index, self.sizes) or (0, 0)))
        total: int | None = None
        parts = [self._term(term, dtype) for term in index.terms]
        parts += [self.cast(dtype, place) for place in index.nodes]
        if index.offset or not parts:
            parts.append(self.number(dtype, index.offset))
        for part in parts:
            total = part if total is None else self.apply("add", total, part)
        assert total is not None
        return total

    def _term(self, term: expr.AxisTerm, dtype: str) -> int:
        place = self._add(expr.Position(dtype, term.axis), dtype, frozenset({term.axis}))
        if term.divisor != 1:
            place = self.quotient(place, term.divisor)
        if term.modulus:
            place = self.remainder(place, term.modulus)
        return place if term.factor == 1 else self.apply("multiply", place, self.like(place, term.factor))

    @staticmethod
    def _require_range(dtype: str, low: float, high: float) -> None:
        least, most = INTEGER_RANGES[dtype]
        if not least <= low <= high <= most:
            raise LoweringError(Reason.NUMBERS(low=low, high=high, dtype=dtype))

    def quotient(self, place: int, divisor: int) -> int:
        """An integer divided by a number and rounded towards zero: exact below 2^31, positions below 2^53."""
        wide = self.cast("float64", place)
        return self.cast(self.dtype(place), self.apply("divide", wide, self.like(wide, divisor)))

    def remainder(self, place: int, divisor: int) -> int:
        """What `quotient` leaves, of the sign of the integer."""
        whole = self.apply("multiply", self.quotient(place, divisor), self.like(place, divisor))
        return self.apply("subtract", place, whole)

    def _tensor(self, value: Value) -> int:
        number = self._numbers.setdefault(value, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def _add(self, node: expr.Node, dtype: str, axes: frozenset[int], key: object = None) -> int:
        key = node if key is None else key
        found = self._places.get(key)
        if found is None:
            if len(self.nodes) >= MOST_NODES:
                raise LoweringError(Reason.NODES(count=MOST_NODES))
            found = self._places[key] = len(self.nodes)
            self.nodes.append(node)
            self._types.append((dtype, axes))
        return found
