"""What one node of a dynamic net computes, as straight-line code over vectors. Knows no batches and no TensorFlow.

A *kind* of node is a program: from the states of its children and its integer arguments (a word, a label) it computes
its own state, a tuple of vectors, and perhaps a loss. A graph is then no more than a list of kinds and children.

The code of a kind is a tuple of `Instruction`. An instruction that has a width computes a vector of so many numbers and
is referred to by its position; one of width 0 puts a value somewhere. `numbers` are positions of children, parameters
and the like:

    child            slot, state             a vector of a child's state
    lookup           parameter, argument, first column
    row              parameter, first column a vector of parameters
    constant                                 `number`, of width 1; ops of the table take it for a vector of any width
    one_hot          argument                1 at the argument's position, else 0
    random           stream                  uniform in [0, 1), by seed, stream, node and position
    product          parameter, first row, first column, transposed
                                             values[0] times a block of a matrix, or times that block's transpose; plus
                                             values[1], if there are two
    broadcast                                values[0], of width 1, in each position
    concat                                   all values
    slice            first                   a part of values[0]
    reduce_sum       0                       of width 1
    reduce_max       1: without a gradient
    OP                                       an op of `custom_ops.expr.table`, with floating-point truth values
    adjoint          state                   the gradient of the loss with respect to the node's state
    loss_adjoint                             the same of the node's loss, of width 1

    put_state        state                   values[0] is this vector of the node's state
    put_loss                                 values[0] is the node's loss
    put_output       number                  values[0] is given to the user
    put_child        slot, state             values[0] is part of the adjoint of that child's state
    outer            parameter, first row, first column
                                             the outer product of both values is part of the parameter's gradient
    column_sum       parameter, first column values[0] is part of a vector of parameters' gradient
    put_lookup       parameter, argument, first column
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import copysign

from custom_ops.errors import DynamicError
from custom_ops.expr.table import FLOAT_OPS

Part = tuple[int, int, int]  # of a value: its position, the first number and how many

MOST_WIDTH = 1 << 20
OPEN_ROWS = 1 << 30  # of a parameter that has other rows in each batch (kOpenRows of ops/dynamic/execute.h)


@dataclass(frozen=True)
class Instruction:
    """One line of a kind's code."""

    op: str
    width: int
    values: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    number: float = 0.0


@dataclass(frozen=True)
class Parameter:
    """A matrix or a vector that is trained.

    Attributes:
        name: for messages.
        shape: of one dimension or two.
        trained: whether its gradient is computed.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True


@dataclass(frozen=True)
class Kind:
    """A kind of node.

    Attributes:
        name: for messages.
        children: for each child the widths of its state.
        arguments: for each integer argument the numbers below which it has to be; each is at least 0.
        state: the widths of the node's own state.
        outputs: the widths of what else it gives.
        code: the forward pass.
    """

    name: str
    children: tuple[tuple[int, ...], ...]
    arguments: tuple[int, ...]
    state: tuple[int, ...]
    outputs: tuple[int, ...]
    code: tuple[Instruction, ...]


def _alike(instruction: Instruction) -> tuple[Instruction, float]:
    """What instructions that compute the same have in common: 0 and -0 are equal, and compute other values."""
    return instruction, copysign(1, instruction.number)


class Builder:
    """Writes the code of one kind. What an instruction of it would compute twice, or copy only, is left out."""

    def __init__(self, parameters: tuple[Parameter, ...], code: Iterable[Instruction] = ()) -> None:
        """`code` comes first."""
        self.parameters = parameters
        self.code = list(code)
        self._known = {_alike(instruction): place for place, instruction in enumerate(self.code) if instruction.width}
        self._parts: dict[Part, int] = {}  # where parts of values are
        self._starts: dict[int, list[int]] = {}  # of the values of a concatenation

    def add(self, instruction: Instruction) -> int:
        """The position of its value; of the same one, if there is one."""
        if instruction.width > MOST_WIDTH:
            raise DynamicError(f"a vector of {instruction.width} numbers; expected at most {MOST_WIDTH}")
        alike = _alike(instruction)
        if instruction.width and alike in self._known:
            return self._known[alike]
        self.code.append(instruction)
        self._known[alike] = len(self.code) - 1
        return len(self.code) - 1

    def width(self, value: int) -> int:
        """The width of a value."""
        return self.code[value].width

    def constant(self, number: float) -> int:
        return self.add(Instruction("constant", 1, number=float(number)))

    def elementwise(self, op: str, *values: int) -> int:
        """An op of the table; values of width 1 are broadcast."""
        if op not in FLOAT_OPS:
            raise DynamicError(f"there is no elementwise op '{op}'; expected one of {', '.join(FLOAT_OPS)}")
        if len(values) != FLOAT_OPS[op].arity:
            raise DynamicError(f"{op} got {len(values)} values; expected {FLOAT_OPS[op].arity}")
        width = max(map(self.width, values))
        if any(self.width(value) not in {1, width} for value in values):
            widths = " and ".join(str(self.width(value)) for value in values)
            raise DynamicError(f"{op} got vectors of {widths} numbers; expected one width")
        if op == "add":
            for value, other in (values, values[::-1]):
                product = self.code[value]
                alone = product.op == "product" and len(product.values) == 1 and product.width == width
                if alone and self.width(other) == width and self.code[other].op != "constant":
                    return self.add(Instruction("product", width, (*product.values, other), product.numbers))
        return self.add(Instruction(op, width, tuple(self.broadcast(value, width) for value in values)))

    def broadcast(self, value: int, width: int) -> int:
        """A value of width 1 as a vector; a constant and a vector of that width stay what they are."""
        if self.width(value) == width or self.code[value].op == "constant":
            return value
        return self.add(Instruction("broadcast", width, (value,)))

    def slice(self, value: int, first: int, width: int) -> int:
        """A part of a vector, computed alone where that is possible."""
        wanted = (value, first, width)
        waiting = [wanted]  # what it is computed of may be a chain longer than Python's stack
        while waiting:
            part = waiting[-1]
            missing = [needed for needed in self._needed_of(part) if needed not in self._parts]
            if missing:
                waiting += missing
            else:
                self._parts[waiting.pop()] = self._part(part)
        return self._parts[wanted]

    def _needed_of(self, part: Part) -> list[Part]:
        """The parts of other values that a part of a value is computed of."""
        value, first, width = part
        whole = self.code[value]
        if (first, width) == (0, whole.width):
            return []
        if whole.op == "slice":
            return [(whole.values[0], whole.numbers[0] + first, width)]
        if whole.op == "concat":
            if value not in self._starts:
                self._starts[value] = list(itertools.accumulate(map(self.width, whole.values), initial=0))
            number = bisect.bisect_right(self._starts[value], first) - 1
            inside = first + width <= self._starts[value][number + 1]
            return [(whole.values[number], first - self._starts[value][number], width)] if inside else []
        if whole.op == "product":
            return [(other, first, width) for other in whole.values[1:]]
        if whole.op in FLOAT_OPS:
            return [(other, first, width) for other in whole.values if self.width(other) != 1]
        return []

    def _part(self, part: Part) -> int:
        """The value that computes a part, once the parts that it needs have values."""
        value, first, width = part
        whole, numbers = self.code[value], self.code[value].numbers
        needed = [self._parts[other] for other in self._needed_of(part)]
        if (first, width) == (0, whole.width):
            return value
        if whole.op == "slice" or (whole.op == "concat" and needed):
            return needed[0]
        if whole.op == "row":
            return self.add(Instruction("row", width, (), (numbers[0], numbers[1] + first)))
        if whole.op == "lookup":
            return self.add(Instruction("lookup", width, (), (*numbers[:2], numbers[2] + first)))
        if whole.op == "product":
            parameter, row, column, transposed = numbers
            row, column = (row + first, column) if transposed else (row, column + first)
            return self.add(
                Instruction("product", width, (whole.values[0], *needed), (parameter, row, column, transposed))
            )
        if whole.op in FLOAT_OPS:
            parts = iter(needed)
            values = tuple(other if self.width(other) == 1 else next(parts) for other in whole.values)
            return self.add(Instruction(whole.op, width, values))
        return self.add(Instruction("slice", width, (value,), (first,)))

    def concat(self, *values: int) -> int:
        if len(values) == 1:
            return values[0]
        return self.add(Instruction("concat", sum(map(self.width, values)), values))

    def product(self, parameter: int, value: int, transposed: bool) -> int:
        """A vector times a matrix, `value @ parameter`; or times its transpose, `parameter @ value`."""
        rows, columns = self.parameters[parameter].shape
        if rows == OPEN_ROWS:
            raise DynamicError(
                f"input '{self.parameters[parameter].name}' has other rows in each batch; read one of them by "
                "embedding_lookup or tf.gather, with an argument of the node"
            )
        given, width = (columns, rows) if transposed else (rows, columns)
        if self.width(value) != given:
            raise DynamicError(
                f"a vector of {self.width(value)} numbers times parameter '{self.parameters[parameter].name}' of shape "
                f"[{rows}, {columns}]{', transposed' if transposed else ''}: expected {given} numbers"
            )
        return self.product_of_block(parameter, value, 0, 0, transposed, width)

    def product_of_block(self, parameter: int, value: int, row: int, column: int, transposed: bool, width: int) -> int:
        """A product with the block of a matrix that begins at `row` and `column`."""
        parts = self.code[value].values if self.code[value].op == "concat" else (value,)
        sum_of: tuple[int, ...] = ()
        for part in parts:
            numbers = (parameter, row, column, int(transposed))
            sum_of = (self.add(Instruction("product", width, (part, *sum_of), numbers)),)
            row, column = (row, column + self.width(part)) if transposed else (row + self.width(part), column)
        return sum_of[0]

    def reduce_sum(self, value: int) -> int:
        return self.add(Instruction("reduce_sum", 1, (value,)))

    def reduce_max(self, value: int, *, gradient: bool = True) -> int:
        return self.add(Instruction("reduce_max", 1, (value,), (int(not gradient),)))

    def softmax(self, value: int) -> int:
        """exp(x - max) over its sum; the maximum cancels, and so has no gradient."""
        exponentials = self._exponentials(value)[1]
        return self.elementwise("divide", exponentials, self.reduce_sum(exponentials))

    def log_softmax(self, value: int) -> int:
        """x - max - log(sum of exp(x - max))."""
        shifted, exponentials = self._exponentials(value)
        return self.elementwise("subtract", shifted, self.elementwise("log", self.reduce_sum(exponentials)))

    def cross_entropy(self, argument: int, logits: int) -> int:
        """The cross-entropy of a label, as TensorFlow's sparse_softmax_cross_entropy_with_logits."""
        shifted, exponentials = self._exponentials(logits)
        label = self.add(Instruction("one_hot", self.width(logits), (), (argument,)))
        # what is not the label's is left out, infinities too
        chosen = self.reduce_sum(self.elementwise("select", label, shifted, self.constant(0)))
        return self.elementwise("subtract", self.elementwise("log", self.reduce_sum(exponentials)), chosen)

    def _exponentials(self, value: int) -> tuple[int, int]:
        shifted = self.elementwise("subtract", value, self.reduce_max(value, gradient=False))
        return shifted, self.elementwise("exp", shifted)

    def sink(self, op: str, *values: int, numbers: tuple[int, ...] = ()) -> None:
        """Puts values somewhere."""
        self.add(Instruction(op, 0, values, numbers))
