"""The gradient of a recurrence: a second cell, which walks time the other way, and GEMMs after it.

The forward cell stores some values of every step. The backward cell's states are the gradients of the forward states;
it reads what was stored and puts out the gradients of the sequences and of the products. The gradient of a matrix is
one large GEMM for each operand over all steps at once; biases and other vectors are summed in further states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise
from custom_ops.recurrent.adjoint import Adjoint, Request, adjoint_of
from custom_ops.recurrent.cell import Cell, Invariant, Product, Sequence, Vector, arguments_of
from custom_ops.recurrent.cell_builder import CellBuilder, with_arguments
from custom_ops.recurrent.recompute import cheapest

__all__ = ["BackwardInput", "Column", "Gradient", "Request", "WeightGradient", "differentiate"]


@dataclass(frozen=True)
class BackwardInput:
    """A tensor that the backward cell reads: a forward sequence, a forward output, or the gradient of one."""

    kind: Literal["sequence", "output", "gradient"]
    tensor: int


@dataclass(frozen=True)
class Column:
    """`tensor[..., column * units : (column + 1) * units]`; all of it, if it is a scalar."""

    tensor: int
    column: int = 0


@dataclass(frozen=True)
class WeightGradient:
    """A GEMM over time and batch at once, added to the gradient of some blocks of a matrix.

    With `operand` `[time * batch, units]` and `adjoint` `[time * batch, blocks * units]`: the blocks at `row` and
    `column`, `column + 1`, ... get `operand^T @ adjoint`, or, where the product took them transposed, the blocks at
    `row`, `row + 1`, ... and `column` get `adjoint^T @ operand`.

    Attributes:
        matrix: the forward matrix.
        row: of the first block.
        column: of the first block.
        blocks: how many.
        transposed: which of the two.
        operand: of the outputs of the forward cell.
        adjoint: the first column, of the outputs of the backward cell.
    """

    matrix: int
    row: int
    column: int
    blocks: int
    transposed: bool
    operand: Column
    adjoint: Column


@dataclass(frozen=True)
class Gradient:
    """What to run, and what is where. The gradient of what is not named is zero, or was not wanted.

    Attributes:
        forward: the cell, with outputs appended; its first ones, its states and its tensors are the same.
        backward: to run against the direction of `forward`, with the same invariants, vectors and matrices.
        sequences: what each sequence tensor of `backward` is.
        states: for each state of `backward` the forward state whose final value's gradient it starts from, or None: it
            starts from zeros.
        sequence_gradients: for each forward sequence tensor, for each of its columns (one, if it is a scalar), where in
            the outputs of `backward` its gradient is.
        state_gradients: for each forward state, the state of `backward` whose final value is the gradient of the
            initial one.
        invariant_gradients: for each tensor, for each column, the state of `backward` whose final value it is.
        vector_gradients: the same; to be summed over the batch.
        weight_gradients: what to compute afterwards. Several may add to one block.
    """

    forward: Cell
    backward: Cell
    sequences: tuple[BackwardInput, ...]
    states: tuple[int | None, ...]
    sequence_gradients: tuple[tuple[Column | None, ...], ...]
    state_gradients: tuple[int | None, ...]
    invariant_gradients: tuple[tuple[int | None, ...], ...]
    vector_gradients: tuple[tuple[int | None, ...], ...]
    weight_gradients: tuple[WeightGradient, ...]


def differentiate(cell: Cell, request: Request | None = None) -> Gradient:
    """The gradient of everything that `cell` reads, given those of what it puts out.

    Args:
        cell: any cell; that of a gradient too.
        request: which gradients are given and wanted; all by default.

    Raises:
        CellError: the cell has no sequence or no state, so it is no recurrence; or the request names a tensor or a
            state that it does not have.
    """
    if not cell.sequences or not cell.states:
        raise CellError(f"a recurrence has sequences and states; this cell has {cell.sequences} and {cell.states}")
    request = request or Request()
    cell = _rebuilt(cell)
    adjoint = adjoint_of(cell, request)
    groups = _weight_groups(cell, adjoint, request)
    stored = _Stored(cell)
    operands = {group.operand: stored.alone(group.operand) for group in groups}
    step, roots = _trimmed(adjoint)
    needed = {node.tensor for node in step.nodes if isinstance(node, Sequence) and node.tensor < len(cell.nodes)}
    read = cheapest(cell, needed, stored.columns.keys())
    stored.together(sorted(place for place in read if not isinstance(cell.nodes[place], Sequence)))
    writer = _Writer(cell, stored, read, len(adjoint.states) + len(adjoint.accumulators))
    places = writer.write(step)
    new = {old: places[place] for old, place in roots.items()}

    layout = _Layout()
    sequence_gradients = layout.sequences(cell, {key: new[place] for key, place in adjoint.sequences.items()})
    weight_gradients = [
        WeightGradient(
            group.matrix,
            group.row,
            group.column,
            len(group.products),
            group.transposed,
            operands[group.operand],
            layout.find(tuple(new[adjoint.products[product]] for product in group.products)),
        )
        for group in groups
    ]
    states = [new[place] for place in (*adjoint.state_adjoints, *adjoint.accumulators.values())]
    given = range(len(cell.states)) if request.finals is None else request.finals
    position = {index: place for place, index in enumerate(adjoint.states)}
    accumulator = {leaf: len(adjoint.states) + place for place, leaf in enumerate(adjoint.accumulators)}
    return Gradient(
        forward=replace(cell, outputs=tuple(stored.outputs)),
        backward=writer.builder.build(states, layout.tensors),
        sequences=writer.sources,
        states=(*(index if index in given else None for index in adjoint.states), *(None for _ in accumulator)),
        sequence_gradients=sequence_gradients,
        state_gradients=tuple(position.get(index) for index in range(len(cell.states))),
        invariant_gradients=_table(accumulator, Invariant, cell.invariants),
        vector_gradients=_table(accumulator, Vector, cell.vectors),
        weight_gradients=tuple(weight_gradients),
    )


def _rebuilt(cell: Cell) -> Cell:
    """`cell` with one node for every value, so that each leaf has one adjoint."""
    builder = CellBuilder(cell.sequences, cell.invariants, cell.vectors, cell.matrices, len(cell.states))
    new: dict[int, int] = {}
    for place, node in enumerate(cell.nodes):
        new[place] = builder.add(with_arguments(node, new))
    return builder.build(
        [new[place] for place in cell.states], [[new[place] for place in output] for output in cell.outputs]
    )


def _trimmed(adjoint: Adjoint) -> tuple[Cell, dict[int, int]]:
    """The step backward without what nothing reads, and the new places of its results."""
    states = [*adjoint.state_adjoints, *adjoint.accumulators.values()]
    results = list(dict.fromkeys([*adjoint.sequences.values(), *adjoint.products.values()]))
    step = adjoint.builder.build(states, [[place] for place in results])
    roots = dict(zip(states, step.states, strict=True))
    roots |= {place: output[0] for place, output in zip(results, step.outputs, strict=True)}
    return step, roots


def _table(
    accumulator: dict[Vector | Invariant, int], leaf: type[Vector] | type[Invariant], sizes: tuple[int, ...]
) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(accumulator.get(leaf(tensor, column)) for column in range(size)) for tensor, size in enumerate(sizes)
    )


@dataclass
class _WeightGroup:
    """Adjacent blocks, all multiplied with one operand, and the product that took each."""

    operand: int
    matrix: int
    row: int
    column: int
    transposed: bool
    products: list[int]


def _weight_groups(cell: Cell, adjoint: Adjoint, request: Request) -> list[_WeightGroup]:
    uses = [
        (term.operand, term.matrix, term.transposed, term.column if term.transposed else term.row, along, product)
        for product in adjoint.products
        for node in (cell.nodes[product],)
        if isinstance(node, Product)
        for term in node.terms
        if request.matrices is None or term.matrix in request.matrices
        for along in (term.row if term.transposed else term.column,)
    ]
    groups: list[_WeightGroup] = []
    last: tuple[int, ...] = ()
    for operand, matrix, transposed, across, along, product in sorted(uses):
        if last == (operand, matrix, transposed, across, along - 1):
            groups[-1].products.append(product)
        else:
            row, column = (along, across) if transposed else (across, along)
            groups.append(_WeightGroup(operand, matrix, row, column, transposed, [product]))
        last = (operand, matrix, transposed, across, along)
    return groups


class _Stored:
    """The forward cell's outputs, to which those that the gradient needs are appended."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.outputs = list(cell.outputs)
        self.columns: dict[int, Column] = {}
        for tensor in range(len(self.outputs)):
            self._note(tensor)

    def alone(self, place: int) -> Column:
        """A tensor of this node only: what a GEMM takes without a copy."""
        if (place,) not in self.outputs:
            self._append((place,))
        return Column(self.outputs.index((place,)))

    def together(self, places: list[int]) -> None:
        """One tensor with all that is not stored yet, and one for each scalar."""
        missing = [place for place in places if place not in self.columns]
        wide = tuple(place for place in missing if not self.cell.scalar[place])
        for columns in ([wide] if wide else []) + [(place,) for place in missing if self.cell.scalar[place]]:
            self._append(columns)

    def _append(self, columns: tuple[int, ...]) -> None:
        self.outputs.append(columns)
        self._note(len(self.outputs) - 1)

    def _note(self, tensor: int) -> None:
        for column, place in enumerate(self.outputs[tensor]):
            self.columns.setdefault(place, Column(tensor, column))


class _Writer:
    """Writes the backward cell: forward values are read where they lie, or recomputed from such."""

    def __init__(self, cell: Cell, stored: _Stored, read: set[int], states: int) -> None:
        self.cell = cell
        self.stored = stored
        self.read = read
        self.builder = CellBuilder((), cell.invariants, cell.vectors, cell.matrices, states)
        self._sources: dict[BackwardInput, tuple[int, ...]] = {}
        self._values: dict[int, int] = {}

    @property
    def sources(self) -> tuple[BackwardInput, ...]:
        return tuple(self._sources)

    def write(self, step: Cell) -> dict[int, int]:
        """Every node of `step`, whose sequences stand for forward values and gradients; its new place."""
        new: dict[int, int] = {}
        count = len(self.cell.nodes)
        for place, node in enumerate(step.nodes):
            match node:
                case Sequence(tensor=tensor) if tensor < count:
                    new[place] = self._value(tensor)
                case Sequence(tensor=tensor, column=column):
                    new[place] = self._column(BackwardInput("gradient", tensor - count), column)
                case _:
                    new[place] = self.builder.add(with_arguments(node, new))
        if not self._sources:  # something has to say how many steps there are
            self._column(BackwardInput("sequence", 0), 0)
        return new

    def _value(self, place: int) -> int:
        """A forward value; each is written once, and its arguments before it, however many of them there are."""
        waiting = [place]
        while waiting:
            node = self.cell.nodes[waiting[-1]]
            recomputed = isinstance(node, Elementwise) and waiting[-1] not in self.read
            missing = [each for each in arguments_of(node) if each not in self._values] if recomputed else []
            if missing:
                waiting += missing
            else:
                latest = waiting.pop()
                self._values[latest] = self._written(latest)
        return self._values[place]

    def _written(self, place: int) -> int:
        """A forward value whose arguments are written."""
        node = self.cell.nodes[place]
        match node:
            case Sequence(tensor=tensor, column=column) if place in self.read:
                return self._column(BackwardInput("sequence", tensor), column)
            case _ if place in self.read:
                kept = self.stored.columns[place]
                return self._column(BackwardInput("output", kept.tensor), kept.column)
            case Elementwise(op=op, arguments=arguments):
                return self.builder.apply(op, *(self._values[argument] for argument in arguments))
            case _:
                return self.builder.add(node)

    def _column(self, source: BackwardInput, column: int) -> int:
        if source not in self._sources:
            if source.kind == "sequence":
                columns = self.cell.sequences[source.tensor]
            else:
                output = self.stored.outputs[source.tensor]
                columns = 0 if self.cell.scalar[output[0]] else len(output)
            self._sources[source] = self.builder.sequence(columns)
        return self._sources[source][column]


class _Layout:
    """The backward cell's output tensors.

    A node may be written twice, where two tensors that are used as a whole have it: that costs less than cutting one
    tensor out of another afterwards.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[int, ...]] = []

    def sequences(self, cell: Cell, gradients: dict[tuple[int, int], int]) -> tuple[tuple[Column | None, ...], ...]:
        """Places for the gradients of the forward sequences: for each tensor one of the same columns."""
        result = []
        for tensor, size in enumerate(cell.sequences):
            keys = [(tensor, column) for column in range(max(size, 1))]
            present = [key for key in keys if key in gradients]
            first = self.find(tuple(gradients[key] for key in present)) if present else Column(0)
            result.append(
                tuple(
                    Column(first.tensor, first.column + present.index(key)) if key in gradients else None
                    for key in keys
                )
            )
        return tuple(result)

    def find(self, columns: tuple[int, ...]) -> Column:
        """Where these are, adjacent; in a new tensor, if nowhere yet."""
        for tensor, there in enumerate(self.tensors):
            for column in range(len(there) - len(columns) + 1):
                if there[column : column + len(columns)] == columns:
                    return Column(tensor, column)
        self.tensors.append(columns)
        return Column(len(self.tensors) - 1)
