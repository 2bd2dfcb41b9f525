"""Writes a cell node by node, as the library of cells, the matchers and `differentiate` do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise, live_nodes
from custom_ops.expr.table import TABLE
from custom_ops.recurrent.cell import (
    Cell,
    CellConstant,
    Invariant,
    Node,
    Product,
    RowSum,
    Sequence,
    State,
    Term,
    Vector,
    arguments_of,
    is_scalar,
)


class CellBuilder:
    """Numbers values: what is asked for twice is one node. What nothing reads is left out of the cell.

    Sizes are those of `Cell`. Tensors can be given at the start, and be declared one by one later.
    """

    def __init__(
        self,
        sequences: Iterable[int] = (),
        invariants: Iterable[int] = (),
        vectors: Iterable[int] = (),
        matrices: Iterable[tuple[int, int]] = (),
        states: int = 0,
    ) -> None:
        self.nodes: list[Node] = []
        self.scalar: list[bool] = []
        self._sequences = tuple(sequences)
        self._invariants = tuple(invariants)
        self._vectors = tuple(vectors)
        self._matrices = tuple(matrices)
        self._states = states
        self._places: dict[object, int] = {}

    def add(self, node: Node) -> int:
        """The place of `node`, which is new unless there is one that computes the same.

        Raises:
            CellError: it reads a node or a sequence tensor that does not exist.
        """
        if isinstance(node, CellConstant):
            node = CellConstant(float(node.value))
        place = self._places.setdefault(_key(node), len(self.nodes))
        if place == len(self.nodes):
            if any(not 0 <= argument < place for argument in arguments_of(node)):
                raise CellError(f"{node} reads a node that does not exist; there are {place}")
            if isinstance(node, Sequence) and not 0 <= node.tensor < len(self._sequences):
                raise CellError(f"{node}: there are {len(self._sequences)} sequence tensors; declare it first")
            self.scalar.append(is_scalar(node, self.scalar, self._sequences))
            self.nodes.append(node)
        return place

    def sequence(self, columns: int) -> tuple[int, ...]:
        """Declares a tensor `[time, batch, columns * units]`, or `[time, batch]` for 0; its columns."""
        self._sequences += (columns,)
        return tuple(self.add(Sequence(len(self._sequences) - 1, column)) for column in range(max(columns, 1)))

    def invariant(self, columns: int) -> tuple[int, ...]:
        """Declares a tensor `[batch, columns * units]`; its columns."""
        self._invariants += (columns,)
        return tuple(self.add(Invariant(len(self._invariants) - 1, column)) for column in range(columns))

    def vector(self, columns: int) -> tuple[int, ...]:
        """Declares a parameter `[columns * units]`; its columns."""
        self._vectors += (columns,)
        return tuple(self.add(Vector(len(self._vectors) - 1, column)) for column in range(columns))

    def matrix(self, rows: int, columns: int) -> int:
        """Declares a matrix of that many blocks; its index."""
        self._matrices += ((rows, columns),)
        return len(self._matrices) - 1

    def state(self) -> int:
        """Declares a state; its value before the step."""
        self._states += 1
        return self.add(State(self._states - 1))

    def state_before(self, index: int) -> int:
        """The value before the step of a state that was declared."""
        return self.add(State(index))

    def constant(self, value: float) -> int:
        return self.add(CellConstant(value))

    def product(self, operand: int, matrix: int, row: int = 0, column: int = 0, transposed: bool = False) -> int:
        """`operand @ block`; for a sum of those, `add` a `Product` of several terms."""
        return self.add(Product((Term(operand, matrix, row, column, transposed),)))

    def row_sum(self, operand: int) -> int:
        return self.add(RowSum(operand))

    def apply(self, op: str, *arguments: int) -> int:
        """One of the ops of `custom_ops.expr.table.FLOAT_OPS`."""
        return self.add(Elementwise(op, arguments))

    def sum(self, first: int, *others: int) -> int:
        """All of them added, from left to right."""
        for other in others:
            first = self.apply("add", first, other)
        return first

    def build(self, states: Iterable[int], outputs: Iterable[Iterable[int]]) -> Cell:
        """The cell: what each state becomes, and the columns of each output tensor.

        Raises:
            CellError: it is no cell that could be run.
        """
        states, outputs = tuple(states), tuple(map(tuple, outputs))
        if len(states) != self._states:
            raise CellError(f"{self._states} states were declared, and {len(states)} given a next value")
        roots = [*states, *chain.from_iterable(outputs)]
        live = live_nodes(len(self.nodes), roots, lambda place: arguments_of(self.nodes[place]))
        kept = [place for place, used in enumerate(live) if used]
        new = {place: number for number, place in enumerate(kept)}
        return Cell(
            nodes=tuple(with_arguments(self.nodes[place], new) for place in kept),
            states=tuple(new[place] for place in states),
            outputs=tuple(tuple(new[place] for place in output) for output in outputs),
            sequences=self._sequences,
            invariants=self._invariants,
            vectors=self._vectors,
            matrices=self._matrices,
        )


def with_arguments(node: Node, new: Mapping[int, int]) -> Node:
    """`node`, reading `new[argument]` for each argument."""
    match node:
        case Product(terms=terms):
            return Product(tuple(replace(term, operand=new[term.operand]) for term in terms))
        case RowSum(operand=operand):
            return RowSum(new[operand])
        case Elementwise(op=op, arguments=arguments):
            return Elementwise(op, tuple(new[argument] for argument in arguments))
        case _:
            return node


def _key(node: Node) -> object:
    match node:
        case CellConstant(value=value):
            return repr(value)  # 0.0 and -0.0 are equal, yet not the same number
        case Elementwise(op=op, arguments=arguments) if op in TABLE and TABLE[op].commutative:
            return op, *sorted(arguments)
        case _:
            return node
