"""A recurrent cell as data: a small DAG over one step.

Everything that knows cells speaks this language: matchers write it, `differentiate` derives the backward cell from it,
the code generator, the CPU op and the NumPy reference read it. LSTM is one instance; so is a cell without a name.

Every value is one number for each row of the batch and each hidden unit, `[batch, units]`, or one for each row (a
*scalar*), and all are of one floating-point dtype: a comparison gives 1 or 0, a condition holds where it is not 0. The
hidden size is not part of a cell. Tensors are cut into columns of `units` numbers: column 2 of an LSTM's input gates is
`gates[..., 2 * units : 3 * units]`.

A product with a weight matrix needs all units of its operand, which live on many processors. So does a sum over units.
Each is a synchronisation point; `stages` says how many a step needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.text_lines import joined, line, read_lines

FORMAT = "cell 1"
_SIZES = ("sequences", "invariants", "vectors", "states")


@dataclass(frozen=True)
class Sequence:
    """A column of a tensor `[time, batch, columns * units]`, or of `[time, batch]` (a scalar)."""

    tensor: int
    column: int = 0


@dataclass(frozen=True)
class Invariant:
    """A column of a tensor `[batch, columns * units]`, the same at every step."""

    tensor: int
    column: int = 0


@dataclass(frozen=True)
class Vector:
    """A column of a parameter `[columns * units]`: a bias, a peephole, a gain."""

    tensor: int
    column: int = 0


@dataclass(frozen=True)
class CellConstant:
    """A number (a scalar)."""

    value: float


@dataclass(frozen=True)
class State:
    """State `index` before the step, `[batch, units]`."""

    index: int


@dataclass(frozen=True)
class Term:
    """`operand @ block`: the `[units, units]` block at (row, column) of a matrix, or that block transposed."""

    operand: int
    matrix: int
    row: int = 0
    column: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Product:
    """The sum of its terms, `[batch, units]`."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class RowSum:
    """The sum over all units of an operand that is not a scalar (a scalar)."""

    operand: int


Node: TypeAlias = Sequence | Invariant | Vector | CellConstant | State | Product | RowSum | Elementwise


@dataclass(frozen=True)
class Cell:
    """One step: nodes in topological order, what the states become, what is kept of every step.

    Attributes:
        nodes: each refers to earlier ones by position.
        states: for each state, the node that it becomes; never a scalar.
        outputs: for each output tensor its columns, as nodes: `[time, batch, columns * units]`, or `[time, batch]` for
            one column that is a scalar. An output may be a `State`: then it holds the value before each step.
        sequences: the columns of each sequence tensor; 0 for `[time, batch]`.
        invariants: the columns of each invariant tensor.
        vectors: the columns of each parameter vector.
        matrices: rows and columns of each matrix, in blocks of `units`.
    """

    nodes: tuple[Node, ...]
    states: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...] = ()
    invariants: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    matrices: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # hashes differ between processes

    @cached_property
    def _hash(self) -> int:
        """The hash of all nodes, computed once: a search looks up thousands of layouts of one cell."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def scalar(self) -> tuple[bool, ...]:
        """Flags, for each node, whether it is one number a row."""
        result: list[bool] = []
        for node in self.nodes:
            result.append(is_scalar(node, result, self.sequences))
        return tuple(result)

    @cached_property
    def output_columns(self) -> tuple[int, ...]:
        """The columns of each output tensor, as `sequences` has them: 0 for `[time, batch]`."""
        return tuple(0 if self.scalar[columns[0]] else len(columns) for columns in self.outputs)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of the step in which each node can be computed.

        Between two stages the processors exchange what the later one's products and row sums need, and wait for each
        other; states that products of stage 0 read are exchanged at the end of the step. So a step has as many
        synchronisations as stages (GRNN, section 5: LSTM one, canonical GRU two), unless no product reads a state.
        """
        result: list[int] = []
        for node in self.nodes:
            match node:
                case Product(terms=terms):
                    waits = [
                        result[term.operand] + 1 for term in terms if not isinstance(self.nodes[term.operand], State)
                    ]
                    result.append(max(waits, default=0))
                case RowSum(operand=operand):
                    result.append(result[operand] + 1)
                case _:
                    result.append(max((result[argument] for argument in arguments_of(node)), default=0))
        return tuple(result)

    @cached_property
    def blocks(self) -> int:
        """How many distinct `[units, units]` weight blocks a step multiplies with."""
        terms = [term for node in self.nodes if isinstance(node, Product) for term in node.terms]
        return len({(term.matrix, term.row, term.column, term.transposed) for term in terms})

    def to_text(self) -> str:
        """One line for the sizes and one for each node; `from_text` reads it, and so does the op library."""
        lines = [
            line("sequences", *self.sequences),
            line("invariants", *self.invariants),
            line("vectors", *self.vectors),
            line("matrices", *chain(*self.matrices)),
        ]
        lines += [_line(node) for node in self.nodes]
        lines.append(line("states", *self.states))
        lines += [line("output", *output) for output in self.outputs]
        return joined(FORMAT, lines)


def is_scalar(node: Node, earlier: list[bool], sequences: tuple[int, ...]) -> bool:
    """Whether `node` is one number a row, when it is known of all earlier nodes."""
    match node:
        case CellConstant() | RowSum():
            return True
        case Sequence(tensor=tensor):
            return sequences[tensor] == 0
        case Elementwise(arguments=arguments):
            return all(earlier[argument] for argument in arguments)
        case _:
            return False


def arguments_of(node: Node) -> Iterator[int]:
    """The nodes that `node` reads."""
    match node:
        case Product(terms=terms):
            yield from (term.operand for term in terms)
        case RowSum(operand=operand):
            yield operand
        case Elementwise(arguments=arguments):
            yield from arguments


def from_text(text: str) -> Cell:
    """Read what `Cell.to_text` wrote.

    Raises:
        CellError: the text is not a cell of this format.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    outputs: list[tuple[int, ...]] = []
    matrices: list[tuple[int, int]] = []
    declared: set[str] = set()

    def read(text: str) -> None:
        word, *rest = text.split()
        if word in declared:
            raise CellError(f"declares {word} a second time")
        if word in (*_SIZES, "matrices"):
            declared.add(word)
        if word in _SIZES:
            sizes[word] = tuple(map(int, rest))
        elif word == "matrices":
            matrices.extend(zip(map(int, rest[::2]), map(int, rest[1::2]), strict=True))
        elif word == "output":
            outputs.append(tuple(map(int, rest)))
        else:
            nodes.append(_node(word, rest))

    read_lines(text, FORMAT, "a cell", CellError, read)
    return Cell(
        nodes=tuple(nodes),
        states=sizes.get("states", ()),
        outputs=tuple(outputs),
        sequences=sizes.get("sequences", ()),
        invariants=sizes.get("invariants", ()),
        vectors=sizes.get("vectors", ()),
        matrices=tuple(matrices),
    )


def _line(node: Node) -> str:
    match node:
        case CellConstant(value=value):
            return f"constant {value!r}"
        case Product(terms=terms):
            return line("product", *(int(getattr(term, field.name)) for term in terms for field in fields(term)))
        case RowSum(operand=operand):
            return f"row_sum {operand}"
        case Elementwise(op=op, arguments=arguments):
            return line(op, *arguments)
        case State(index=index):
            return f"state {index}"
        case Sequence(tensor=tensor, column=column):
            return f"sequence {tensor} {column}"
        case Invariant(tensor=tensor, column=column):
            return f"invariant {tensor} {column}"
        case Vector(tensor=tensor, column=column):
            return f"vector {tensor} {column}"


def _node(word: str, rest: list[str]) -> Node:
    if word == "constant":
        return CellConstant(float(rest[0]))
    numbers = tuple(map(int, rest))
    if word in FLOAT_OPS:
        return Elementwise(word, numbers)
    if word == "product":
        groups = zip(*[iter(numbers)] * 5, strict=True)
        return Product(tuple(Term(a, b, c, d, bool(e)) for a, b, c, d, e in groups))
    leaves = {"sequence": Sequence, "invariant": Invariant, "vector": Vector, "state": State, "row_sum": RowSum}
    return leaves[word](*numbers)


def _check(cell: Cell) -> None:
    """Raises CellError for a cell that no reader could run."""
    for place, node in enumerate(cell.nodes):
        for argument in arguments_of(node):
            if not 0 <= argument < place:
                raise CellError(f"node {place} ({_line(node)}) reads node {argument}; nodes may read earlier ones only")
        _check_leaf(cell, place, node)
    for name, found in (("state", cell.states), *(("output", output) for output in cell.outputs)):
        for place in found:
            if not 0 <= place < len(cell.nodes):
                raise CellError(f"{name} refers to node {place}; there are {len(cell.nodes)}")
    if any(cell.scalar[place] for place in cell.states):
        raise CellError("a state became a scalar; states are [batch, units]")
    for place, node in enumerate(cell.nodes):
        operands = [term.operand for term in node.terms] if isinstance(node, Product) else []
        operands += [node.operand] if isinstance(node, RowSum) else []
        if any(cell.scalar[operand] for operand in operands):
            raise CellError(f"node {place} ({_line(node)}) needs an operand [batch, units], not a scalar")
    for output in cell.outputs:
        if not output or (len(output) > 1 and any(cell.scalar[place] for place in output)):
            raise CellError(f"output {output}: one scalar, or columns [batch, units]")


def _check_leaf(cell: Cell, place: int, node: Node) -> None:
    def within(kind: str, index: int, limit: int) -> None:
        if not 0 <= index < limit:
            raise CellError(f"node {place} ({_line(node)}): {kind} {index} of {limit}")

    match node:
        case Sequence(tensor=tensor, column=column):
            within("sequence", tensor, len(cell.sequences))
            within("column", column, max(cell.sequences[tensor], 1))
        case Invariant(tensor=tensor, column=column):
            within("invariant", tensor, len(cell.invariants))
            within("column", column, cell.invariants[tensor])
        case Vector(tensor=tensor, column=column):
            within("vector", tensor, len(cell.vectors))
            within("column", column, cell.vectors[tensor])
        case State(index=index):
            within("state", index, len(cell.states))
        case Product(terms=terms):
            if not terms:
                raise CellError(f"node {place}: a product without terms")
            for term in terms:
                within("matrix", term.matrix, len(cell.matrices))
                within("row", term.row, cell.matrices[term.matrix][0])
                within("column", term.column, cell.matrices[term.matrix][1])
        case Elementwise(op=op, arguments=arguments):
            if op not in FLOAT_OPS or FLOAT_OPS[op].arity != len(arguments):
                raise CellError(f"node {place}: unknown op '{op}', or not with {len(arguments)} arguments")
