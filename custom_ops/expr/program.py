"""Programs over tensors: elementwise ops, reductions and casts, without loops or shapes that depend on values.

A program has *axes*, and a value is one number for each position along some of them: `[rows, classes]` logits vary
along both axes, their maximum in each row along the first only. An op's result varies along all axes of its arguments,
so broadcasting needs no node. An input says for each dimension of its tensor which position to read, as a sum over
axes: that is its *access*. What a value varies along, and its dtype, is all there is to its type; sizes are given when
the program runs, or fixed.

Softmax cross-entropy of logits `[rows, classes]` and labels `[rows]`, and its gradient, as text (which `text.py` reads
and writes):

    program 1
    axes 0 10                   # two axes: any number of rows, and 10 classes
    tensor float32 2            # tensor 0, of two dimensions: the logits
    tensor int32 1              # tensor 1: the labels
    input 0 a0 a1               # node 0: logits[row, class]
    reduce max 0 1              # node 1: the maximum of node 0 over axis 1
    subtract 0 1                # node 2, and so on
    exp 2
    reduce sum 3 1
    log 4
    subtract 2 5                # node 6: log of the softmax
    input 1 a0                  # node 7: labels[row]
    position int32 1            # node 8: the position along axis 1, which is the class
    equal 7 8                   # node 9: bool
    constant float32 0.0
    select 9 6 10
    reduce sum 11 1
    negate 12                   # node 13: the loss of each row
    reduce mean 13 0            # node 14: the mean over rows
    divide 3 4                  # node 15: softmax
    cast float32 9
    subtract 15 16              # node 17: the gradient of the sum of the losses
    output 14                   # output 0, a scalar
    output 17 0 1               # output 1, [rows, classes]

The text, a line each, words separated by a space, no comments:

    program 1                   first
    axes SIZE...                second; 0: known when the program runs
    tensor DTYPE RANK           of each tensor that is read, in order
    NODE                        in topological order, numbered from 0
    output NODE AXIS...         of each output, in order: the axes that are its dimensions, among them all that the node
                                varies along

    NODE is one of
    input TENSOR INDEX...       one INDEX for each of the tensor's dimensions
    constant DTYPE VALUE        as Python's repr: 0.5, -inf, nan, 3, True; integers are exact
    position DTYPE AXIS         0, 1, 2, ... along an axis; an integer dtype
    random DTYPE KEY COUNTER INDEX
                                numbers of a stateless generator (`philox.py`), numbered by one INDEX without nodes: in
                                [0, 1), or all bits of an integer dtype; tensors KEY and COUNTER, of dtype uint64 and of
                                1 and 2 numbers, are its state, which nothing else reads; if both are one tensor, it is
                                of int64 and 2 numbers, the seed of which the state is made
    cast DTYPE NODE             as TensorFlow casts
    reduce KIND NODE AXIS...    sum, mean, max, min, product (of numbers), any, all (of bool), over one axis or more;
                                dot: a sum, of what a product of matrices adds up
    OP NODE...                  an op of the table, with its arguments

    INDEX is terms joined by "+", without spaces. A term is one of
    3  -1                       a constant
    a1  2*a1  -1*a1             a position along axis 1, times a factor
    a1/4  3*a1/4%2              the same of the position divided by 4 (rounded down), modulo 2
    n5                          the value of node 5, of an integer dtype: a gather

So a transpose is `input 0 a1 a0`, a slice `input 0 2*a0+3`, a reversal of 10 positions `input 0 -1*a0+9`, a broadcast
leaves an axis out, and a reshape of `[6, 4]` to `[24]` is `input 0 a0/4 a0%4`. An index that is out of bounds for some
position is an error when the program runs.

DTYPE is float64, float32, float16, bfloat16, int64, int32 or bool. Half types are computed in float32 and rounded after
each op; a sum or product of them is accumulated in float32 and rounded once. Factors of float32 under a `dot` may be
rounded as TensorFlow rounds those of its products: to TensorFloat-32 on a GPU, where it allows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from custom_ops.errors import ProgramError
from custom_ops.expr.nodes import (
    Cast,
    Constant,
    Elementwise,
    Index,
    Input,
    Node,
    Position,
    Random,
    Reduce,
    arguments_of,
    live_nodes,
)
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import BOOL, FLOATS, INTEGER_RANGES, INTEGERS, NUMBERS

DTYPES = NUMBERS + BOOL
# What readers take, see custom_ops/ops/cpu/axis_set.h and custom_ops/ops/cpu/expression.cc.
MOST_AXES = 64  # and dimensions of a tensor
MOST_TERMS = 64  # of an index
MOST_FACTOR = 1 << 40  # of the numbers in an index
STATE = "uint64"  # of the tensors that are a random generator's state, and of nothing else

# For each kind of reduction the dtypes it takes.
REDUCTIONS = {
    "sum": NUMBERS,
    "dot": NUMBERS,
    "mean": FLOATS,
    "max": NUMBERS,
    "min": NUMBERS,
    "product": NUMBERS,
    "any": BOOL,
    "all": BOOL,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor that is read."""

    dtype: str
    rank: int


@dataclass(frozen=True)
class Output:
    """A node as a tensor, whose dimensions are these axes."""

    node: int
    axes: tuple[int, ...]


class Type(NamedTuple):
    """A value's dtype, and the axes along which it varies, in increasing order."""

    dtype: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Nodes in topological order, and which of them are outputs.

    Attributes:
        axes: the size of each axis; 0: the tensors' dimensions that lie along it say so when the program runs.
        tensors: what is read.
        nodes: each refers to earlier ones by position.
        outputs: what is written.

    Raises:
        ProgramError: it is no program that a reader could run; the message names the node and what is wrong with it.
    """

    axes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        if len(self.axes) > MOST_AXES:
            raise ProgramError(f"{len(self.axes)} axes; expected at most {MOST_AXES}")
        for axis, size in enumerate(self.axes):
            if size < 0:
                raise ProgramError(f"axis {axis} has size {size}; expected at least 1, or 0 for one known later")
            if size == 0 and axis not in self._given_axes:
                raise ProgramError(
                    f"no dimension of a tensor lies along axis {axis}, so its size is unknown: give it a fixed size"
                )
        for number, tensor in enumerate(self.tensors):
            known = tensor.dtype in (*DTYPES, STATE)
            _require(known, f"tensor {number}", f"dtype '{tensor.dtype}'; expected one of {(*DTYPES, STATE)}")
            fits = 0 <= tensor.rank <= MOST_AXES
            _require(fits, f"tensor {number}", f"{tensor.rank} dimensions; expected at most {MOST_AXES}")
        types = self.types
        for number, output in enumerate(self.outputs):
            what = f"output {number}"
            _require(0 <= output.node < len(self.nodes), what, f"node {output.node} of {len(self.nodes)}")
            _require(len(set(output.axes)) == len(output.axes), what, f"axes {output.axes} hold one twice")
            _require(all(0 <= axis < len(self.axes) for axis in output.axes), what, f"axes {output.axes}")
            missing = set(types[output.node].axes) - set(output.axes)
            _require(
                not missing, what, f"its node varies along axes {sorted(missing)}, which are none of its dimensions"
            )

    @cached_property
    def types(self) -> tuple[Type, ...]:
        """The type of each node."""
        found: list[Type] = []
        for node in self.nodes:
            found.append(_type(self, node, found))
        return tuple(found)

    @cached_property
    def live(self) -> tuple[bool, ...]:
        """Whether an output depends on each node."""
        outputs = [output.node for output in self.outputs]
        return live_nodes(len(self.nodes), outputs, lambda place: arguments_of(self.nodes[place]))

    @cached_property
    def _given_axes(self) -> set[int | None]:
        return {index.axis for node in self.nodes if isinstance(node, Input) for index in node.index}

    def sizes(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The size of each axis, for tensors of these shapes.

        Raises:
            ProgramError: a rank is not the declared one, two tensors differ in the size of an axis that is not fixed,
                or an index is out of bounds.
        """
        found = [len(shape) for shape in shapes]
        expected = [tensor.rank for tensor in self.tensors]
        if found != expected:
            raise ProgramError(f"expected tensors of ranks {expected}, found {found}")
        sizes = list(self.axes)
        inputs = [node for node in self.nodes if isinstance(node, Input)]
        dimensions = [
            (node.tensor, index, size)
            for node in inputs
            for index, size in zip(node.index, shapes[node.tensor], strict=True)
        ]
        known: dict[int, int] = {}
        for tensor, index, size in dimensions:
            if index.axis is not None and self.axes[index.axis] == 0:
                sizes[index.axis] = known.setdefault(index.axis, size)
                if sizes[index.axis] != size:
                    raise ProgramError(f"axis {index.axis} has size {known[index.axis]}, and {size} in tensor {tensor}")
        for tensor, index, size in dimensions:
            low, high = _range(index, sizes)
            if not index.nodes and not 0 <= low <= high < size and all(sizes[term.axis] for term in index.terms):
                raise ProgramError(f"tensor {tensor} is read at {low} to {high} of a dimension of size {size}")
        for node in self.nodes:
            if isinstance(node, Random):
                key, counter = prod(shapes[node.key]), prod(shapes[node.counter])
                if node.key == node.counter and key != 2:
                    raise ProgramError(f"a seed of {key} numbers; expected 2")
                if node.key != node.counter and (key, counter) != (1, 2):
                    raise ProgramError(f"a key of {key} numbers and a counter of {counter}; expected 1 and 2")
                low, _ = _range(node.index, sizes)
                if low < 0:
                    raise ProgramError(f"random numbers are drawn from number {low} on; expected 0 or more")
        return tuple(sizes)


def _range(index: Index, sizes: Sequence[int]) -> tuple[int, int]:
    """The least and the largest position that `index` gives, without what its nodes add."""
    low = high = index.offset
    for term in index.terms:
        last = max(sizes[term.axis] - 1, 0) // term.divisor
        last = min(last, term.modulus - 1) if term.modulus else last
        low, high = low + min(0, term.factor * last), high + max(0, term.factor * last)
    return low, high


@dataclass(frozen=True)
class _Place:
    """A node in errors. Its text is made where there is one: it takes longer than all checks of the node."""

    number: int
    node: Node

    def __str__(self) -> str:
        return f"node {self.number} ({self.node})"


def _require(holds: bool, what: object, problem: str) -> None:
    if not holds:
        raise ProgramError(f"{what}: {problem}")


def _terms_axes(indices: Iterable[Index], what: object) -> list[int]:
    """The axes of the indices' terms, which have to be sound."""
    axes = []
    for index in indices:
        count, large = len(index.terms) + len(index.nodes) + bool(index.offset), abs(index.offset) > MOST_FACTOR
        _require(count <= MOST_TERMS, what, f"an index of {count} terms; expected at most {MOST_TERMS}")
        for term in index.terms:
            _require(term.divisor > 0 <= term.modulus, what, "a divisor or modulus below 1")
            large |= max(abs(term.factor), term.divisor, term.modulus) > MOST_FACTOR
            axes.append(term.axis)
        _require(not large, what, f"a number in an index that is beyond {MOST_FACTOR}")
    return axes


def _type(program: Program, node: Node, earlier: Sequence[Type]) -> Type:
    what = _Place(len(earlier), node)
    for argument in arguments_of(node):
        if not 0 <= argument < len(earlier):
            _require(False, what, f"reads node {argument}; nodes may read earlier ones only")
    match node:
        case Elementwise(op=name, arguments=arguments):
            return _of_op(name, [earlier[argument] for argument in arguments], what)
        case Input(tensor=tensor, index=index):
            _require(0 <= tensor < len(program.tensors), what, f"there are {len(program.tensors)} tensors")
            _require(program.tensors[tensor].dtype != STATE, what, "reads the state of a random generator")
            rank = program.tensors[tensor].rank
            _require(len(index) == rank, what, f"{len(index)} indices of a tensor of rank {rank}")
            varying = _terms_axes(index, what)
            for place in arguments_of(node):
                _dtype(earlier[place].dtype, INTEGERS, what)
                varying += earlier[place].axes
            return Type(program.tensors[tensor].dtype, _axes(varying, program, what))
        case Random(dtype=name, key=key, counter=counter, index=number):
            states = [tensor for tensor in (key, counter) if 0 <= tensor < len(program.tensors)]
            wanted = "int64" if key == counter else STATE
            of_state = [tensor for tensor in states if program.tensors[tensor].dtype == wanted]
            _require(len(of_state) == 2, what, f"tensors {key} and {counter} are no state of a random generator")
            _require(not number.nodes, what, "an index that is a value")
            return Type(_dtype(name, NUMBERS, what), _axes(_terms_axes([number], what), program, what))
        case Constant(dtype=name, value=value):
            expected = (bool,) if name in BOOL else (int,) if name in INTEGERS else (float,)
            _require(type(value) in expected, what, f"a value of type {type(value).__name__}")
            if name in INTEGER_RANGES:
                low, high = INTEGER_RANGES[name]
                _require(low <= value <= high, what, f"a value that {name} does not hold; expected {low} to {high}")
            return Type(_dtype(name, DTYPES, what), ())
        case Position(dtype=name, axis=axis):
            return Type(_dtype(name, INTEGERS, what), _axes([axis], program, what))
        case Cast(dtype=name, operand=operand):
            return Type(_dtype(name, DTYPES, what), earlier[operand].axes)
        case Reduce(kind=kind, operand=operand, axes=over):
            _require(kind in REDUCTIONS, what, f"unknown reduction; expected one of {', '.join(REDUCTIONS)}")
            distinct = len(_axes(over, program, what)) == len(over) > 0
            _require(distinct, what, "expected axes, each once")
            remaining = set(earlier[operand].axes) - set(over)
            return Type(_dtype(earlier[operand].dtype, REDUCTIONS[kind], what), tuple(sorted(remaining)))
    raise AssertionError(node)


def _of_op(name: str, given: Sequence[Type], what: object) -> Type:
    """What an op of the table makes of values of these types."""
    if name not in TABLE:
        _require(False, what, f"unknown op '{name}'")
    op = TABLE[name]
    if len(given) != op.arity:
        _require(False, what, f"{len(given)} arguments; expected {op.arity}")
    if name == "select":
        _dtype(given[0].dtype, BOOL, what)
    values = given[1:] if name == "select" else given
    dtypes = {value.dtype for value in values}
    if len(dtypes) != 1:
        _require(False, what, f"arguments of dtypes {sorted(dtypes)}; cast them to one")
    _dtype(values[0].dtype, op.dtypes, what)
    widest = max((value.axes for value in given), key=len)
    if any(value.axes != widest and not set(value.axes) <= set(widest) for value in given):
        widest = tuple(sorted({axis for value in given for axis in value.axes}))
    return Type("bool" if op.comparison else values[0].dtype, widest)


def _axes(found: Sequence[int], program: Program, what: object) -> tuple[int, ...]:
    """Axes in order, each once."""
    if not all(0 <= axis < len(program.axes) for axis in found):
        _require(False, what, f"there are {len(program.axes)} axes")
    return tuple(sorted(set(found)))


def _dtype(found: str, expected: tuple[str, ...], what: object) -> str:
    if found not in expected:
        _require(False, what, f"dtype '{found}'; expected one of {', '.join(expected)}")
    return found
