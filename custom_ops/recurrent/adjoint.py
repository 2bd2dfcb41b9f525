"""Reverse-mode differentiation of one step of a cell, node by node.

The result may read the value of any forward node; `custom_ops.recurrent.differentiate` decides which of them are kept,
which are recomputed. The derivative of each elementwise op is in its entry in the table (`custom_ops.expr`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import Derivation
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
)
from custom_ops.recurrent.cell_builder import CellBuilder


@dataclass(frozen=True)
class Request:
    """What there is to differentiate, and by what. None: all; an empty tuple: none.

    Attributes:
        outputs: the output tensors whose gradients are given.
        finals: the states whose gradients after the last step are given.
        sequences: the sequence tensors whose gradients are wanted; leave out masks that are multiplied, whose gradient
            would cost a sum over units, a synchronisation, in every step.
        invariants: the invariant tensors whose gradients are wanted.
        vectors: the parameter vectors whose gradients are wanted.
        matrices: the matrices whose gradients are wanted.
    """

    outputs: tuple[int, ...] | None = None
    finals: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    invariants: tuple[int, ...] | None = None
    vectors: tuple[int, ...] | None = None
    matrices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Adjoint:
    """One step backward, in which every forward value can be read.

    Attributes:
        builder: its nodes. Sequence tensor k stands for the value of forward node k, one column or a scalar; sequence
            tensor `forward nodes + k` for the gradient of the forward output k.
        states: the forward states whose adjoints are not always zero, in order: states of the builder.
        state_adjoints: what each of these becomes.
        accumulators: for a vector's or an invariant's column, the state that sums up its gradient, in order: the
            builder's further states. Each becomes the given node.
        sequences: (tensor, column) of a forward sequence -> its gradient.
        products: forward product -> its gradient, if one of its matrices' is wanted.
    """

    builder: CellBuilder
    states: tuple[int, ...]
    state_adjoints: list[int]
    accumulators: dict[Vector | Invariant, int]
    sequences: dict[tuple[int, int], int]
    products: dict[int, int]


def adjoint_of(cell: Cell, request: Request) -> Adjoint:
    """Differentiates a step of `cell`, in which no value is computed twice.

    Raises:
        CellError: the request names a tensor or a state that the cell does not have.
    """
    wanted = _Wanted(cell, request)
    outputs = _within("output", request.outputs, len(cell.outputs))
    states = _within("final", request.finals, len(cell.states))
    while True:
        sweep = _Sweep(cell, wanted, outputs, tuple(sorted(states)))
        sweep.run()
        if sweep.states_reached <= states:
            return sweep.result()
        states |= sweep.states_reached


def _within(kind: str, chosen: tuple[int, ...] | None, count: int) -> set[int]:
    result = set(range(count) if chosen is None else chosen)
    if result and not 0 <= min(result) <= max(result) < count:
        raise CellError(f"the request names {kind} {chosen}; the cell has {count}")
    return result


class _Wanted:
    """The nodes that depend on something whose gradient is wanted."""

    def __init__(self, cell: Cell, request: Request) -> None:
        self.sequences = _within("sequence", request.sequences, len(cell.sequences))
        self.invariants = _within("invariant", request.invariants, len(cell.invariants))
        self.vectors = _within("vector", request.vectors, len(cell.vectors))
        self.matrices = _within("matrix", request.matrices, len(cell.matrices))
        self.nodes: list[bool] = []
        for node in cell.nodes:
            self.nodes.append(self._leaf(node) or any(self.nodes[argument] for argument in arguments_of(node)))

    def _leaf(self, node: Node) -> bool:
        match node:
            case State():
                return True
            case Sequence(tensor=tensor):
                return tensor in self.sequences
            case Invariant(tensor=tensor):
                return tensor in self.invariants
            case Vector(tensor=tensor):
                return tensor in self.vectors
            case _:
                return self.weighs(node)

    def weighs(self, node: Node) -> bool:
        """Whether it multiplies with a matrix whose gradient is wanted."""
        return isinstance(node, Product) and any(term.matrix in self.matrices for term in node.terms)


@dataclass
class _Sweep:
    """One walk over the nodes of a step, last to first."""

    cell: Cell
    wanted: _Wanted
    outputs: Collection[int]
    states: tuple[int, ...]
    builder: CellBuilder = field(init=False)
    contributions: dict[int, list[int]] = field(default_factory=dict)
    terms: dict[int, list[Term]] = field(default_factory=dict)
    state_adjoints: dict[int, int] = field(default_factory=dict)
    parameters: dict[Vector | Invariant, int] = field(default_factory=dict)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    products: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cell = self.cell
        self.builder = CellBuilder(
            [*(0 if scalar else 1 for scalar in cell.scalar), *cell.output_columns],
            cell.invariants,
            cell.vectors,
            cell.matrices,
            len(self.states),
        )

    @property
    def states_reached(self) -> set[int]:
        return set(self.state_adjoints)

    def run(self) -> None:
        cell = self.cell
        for tensor in sorted(self.outputs):
            for column, place in enumerate(cell.outputs[tensor]):
                self._give(place, self.builder.add(Sequence(len(cell.nodes) + tensor, column)), place)
        for position, index in enumerate(self.states):
            self._give(cell.states[index], self.builder.add(State(position)), cell.states[index])
        for place in reversed(range(len(cell.nodes))):
            total = self._total(place)
            if total is not None:
                self._pass_on(place, total)

    def result(self) -> Adjoint:
        zero = self.builder.constant(0)
        adjoints = [self.state_adjoints.get(index, zero) for index in self.states]
        parameters = [node for node in self.cell.nodes if isinstance(node, Vector | Invariant)]
        parameters = [node for node in parameters if node in self.parameters]
        accumulators = {
            node: self.builder.apply("add", self.builder.state(), self.parameters[node]) for node in parameters
        }
        return Adjoint(
            self.builder,
            self.states,
            [self._widened(adjoint, self.cell.states[0]) for adjoint in adjoints],
            accumulators,
            self.sequences,
            self.products,
        )

    def _value(self, place: int) -> int:
        """A forward value."""
        node = self.cell.nodes[place]
        return self.builder.add(node if isinstance(node, CellConstant | Vector | Invariant) else Sequence(place))

    def _widened(self, adjoint: int, place: int) -> int:
        """An adjoint of node `place` as one number for each unit: all the same, if it is a scalar."""
        if not self.builder.scalar[adjoint]:
            return adjoint
        wide = self.builder.add(State(0)) if self.states else self._value(place)
        return self.builder.apply("select", self.builder.constant(0), wide, adjoint)

    def _give(self, place: int, adjoint: int, user: int) -> None:
        """What flows from `user` back to `place`. A scalar that was broadcast gets something from every unit."""
        if self.wanted.nodes[place]:
            if self.cell.scalar[place] and not self.cell.scalar[user]:
                adjoint = self._widened(adjoint, user)
            self.contributions.setdefault(place, []).append(adjoint)

    def _total(self, place: int) -> int | None:
        parts = self.contributions.pop(place, [])
        if self.cell.scalar[place]:
            from_units = [part for part in parts if not self.builder.scalar[part]]
            parts = [part for part in parts if self.builder.scalar[part]]
            if from_units:
                parts.append(self.builder.row_sum(self.builder.sum(*from_units)))
        if place in self.terms:
            # one product for all uses, so that it is one GEMM; in the order of the weights
            terms = sorted(self.terms.pop(place), key=lambda term: (term.matrix, term.row, term.column))
            parts.append(self.builder.add(Product(tuple(terms))))
        return self.builder.sum(*parts) if parts else None

    def _pass_on(self, place: int, adjoint: int) -> None:
        match node := self.cell.nodes[place]:
            case Elementwise(op=op, arguments=arguments):
                values = [self._value(argument) for argument in arguments]
                parts = derivatives(self.builder, op, adjoint, self._value(place), values)
                for argument, part in zip(arguments, parts, strict=True):
                    if part is not None:
                        self._give(argument, part, place)
            case RowSum(operand=operand):
                self._give(operand, adjoint, place)
            case Product(terms=terms):
                adjoint = self._widened(adjoint, place)
                if self.wanted.weighs(node):
                    self.products[place] = adjoint
                for term in terms:
                    if self.wanted.nodes[term.operand]:
                        back = Term(adjoint, term.matrix, term.row, term.column, not term.transposed)
                        self.terms.setdefault(term.operand, []).append(back)
            case State(index=index):
                self.state_adjoints[index] = adjoint
            case Sequence(tensor=tensor, column=column):
                scalar = self.cell.scalar[place]
                self.sequences[tensor, column] = adjoint if scalar else self._widened(adjoint, place)
            case Vector() | Invariant():
                self.parameters[node] = adjoint


def derivatives(
    builder: CellBuilder, op: str, adjoint: int, result: int, arguments: Iterable[int]
) -> tuple[int | None, ...]:
    """What the adjoint of `result = op(arguments)` contributes to that of each argument; None: nothing, ever."""
    return TABLE[op].derivative(Derivation(builder.apply, builder.constant, adjoint, result, tuple(arguments)))
