"""Random programs over tensors, and tensors for them: for the definition in NumPy, the CPU's op and GPU kernels.

Their numbers are small integers, or wrap: floating-point values are clamped wherever they could grow. So sums are exact
in any order, and two readers of a program agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from custom_ops.expr.nodes import AxisTerm, Cast, Constant, Elementwise, Index, Input, Node, Position, Random, Reduce
from custom_ops.expr.program import DTYPES, REDUCTIONS, Output, Program, Tensor, Type
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import BOOL, FLOATS, INTEGERS

Array = NDArray[Any]


@dataclass(frozen=True)
class Kinds:
    """The programs that are drawn.

    Attributes:
        sizes: of axes.
        counts: how many axes a program has.
        dtypes: of tensors and casts; bool comes of comparisons, too.
        beyond: whether a value may be an index that is out of bounds, which is an error.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    dtypes: tuple[str, ...] = DTYPES
    beyond: bool = True

    def of(self, dtypes: Iterable[str]) -> list[str]:
        """The ops of some dtypes that programs may have."""
        return [dtype for dtype in dtypes if dtype in self.dtypes]


ON_CPU = Kinds((1, 2, 3, 5, 8, 17, 33, 64, 70, 130, 1100), (0, 1, 2, 2, 3, 3, 3, 4, 4))
# Kernels take seconds to compile, and run on the CPU thread by thread.
ON_GPU = Kinds((1, 2, 3, 5, 8, 12, 33), (2, 3), ("int32", "int64"), beyond=False)
MOST_POSITIONS = 1 << 15
MOST_FACTORS = 8  # of a product
LARGEST = 4
OPS = ("add", "subtract", "multiply", "maximum", "minimum", "negate", "absolute", "square", "select", "logical_and")
OPS += ("logical_or", "logical_not", "greater", "greater_equal", "equal", "sign")


@dataclass
class Draft:
    """A program that grows: its nodes, with their types, and the tensors that they read."""

    kinds: Kinds
    sizes: list[int]
    nodes: list[Node]
    types: list[Type]
    tensors: list[Array]
    unused: set[int]  # values that may be large

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        program = Program(tuple(self.sizes), self.declared, tuple(self.nodes), ())
        self.types = list(program.types)
        return len(self.nodes) - 1

    @property
    def declared(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(str(tensor.dtype), tensor.ndim) for tensor in self.tensors)

    def of(self, *dtypes: str) -> list[int]:
        return [place for place in self.any() if self.types[place].dtype in dtypes]

    def constant(self, dtype: str, number: int) -> int:
        return self.add(Constant(dtype, float(number) if dtype in FLOATS else number))

    def clamp(self, place: int) -> None:
        """Brings a floating-point value to a small one."""
        dtype = self.types[place].dtype
        if dtype in FLOATS:
            above = self.add(Elementwise("minimum", (place, self.constant(dtype, LARGEST))))
            self.add(Elementwise("maximum", (above, self.constant(dtype, -LARGEST))))
            self.unused.add(place)

    def bounded(self, place: int) -> int:
        """An integer brought to -2 to 2."""
        dtype = self.types[place].dtype
        above = self.add(Elementwise("minimum", (place, self.constant(dtype, 2))))
        return self.add(Elementwise("maximum", (above, self.constant(dtype, -2))))

    def any(self) -> list[int]:
        return [place for place in range(len(self.nodes)) if place not in self.unused]


def values(draw: st.DrawFn, dtype: str, shape: list[int]) -> Array:
    """Small integers, so that sums of them are exact in any order."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    if dtype == "bool":
        return np.asarray(random.random(shape) < 0.5)
    return np.asarray(random.integers(-2, 3, shape).astype(numpy_dtype(dtype)))


def _input(draw: st.DrawFn, draft: Draft) -> None:
    """A tensor whose dimensions are axes in any order, halved, reversed, shifted or taken apart; some are gathered."""
    count = len(draft.sizes)
    axes = draw(st.permutations(range(count)))[: draw(st.sampled_from((count, count, *range(count + 1))))]
    index, shape = [], []
    for axis in axes:
        size = draft.sizes[axis]
        form = draw(st.sampled_from(("plain", "plain", "plain", "apart", "reversed", "strided", "gather", "ragged")))
        divisor = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        gathers = [place for place in draft.of(*INTEGERS) if set(draft.types[place].axes) <= {axis}]
        if form == "apart":
            index += [Index(terms=(AxisTerm(axis, 1, divisor),)), Index(terms=(AxisTerm(axis, 1, 1, divisor),))]
            shape += [size // divisor, divisor]
        elif form == "reversed":
            index.append(Index(size - 1, (AxisTerm(axis, -1),)))
            shape.append(size)
        elif form == "strided":
            index.append(Index(1, (AxisTerm(axis, 2),)))
            shape.append(2 * size + 1)
        elif form == "ragged":
            index.append(Index(0, (AxisTerm(axis, 2, 3), AxisTerm(axis, 1, 2, 2))))
            shape.append(2 * ((size - 1) // 3) + 3)
        elif form == "gather" and gathers:
            # Values are of -2 to 2 if nothing was computed; others may be out of bounds, which is an error in both.
            gathered = draw(st.sampled_from(gathers))
            index.append(Index(3, (AxisTerm(axis),), (gathered if draft.kinds.beyond else draft.bounded(gathered),)))
            shape.append(size + 6)
        else:
            index.append(Index(terms=(AxisTerm(axis),)))
            shape.append(size)
    dtype = draw(st.sampled_from(draft.kinds.dtypes))
    draft.tensors.append(values(draw, dtype, shape))
    draft.add(Input(len(draft.tensors) - 1, tuple(index)))


def _random(draw: st.DrawFn, draft: Draft) -> None:
    """Where numbers of a generator are large, since sums of them are not exact; axes in any order, halved, reversed."""
    axes = draw(st.permutations(range(len(draft.sizes))))[: draw(st.integers(0, len(draft.sizes)))]
    offset, terms, size = draw(st.sampled_from((0, 0, 1, 4))), [], draw(st.sampled_from((1, 1, 3)))
    for axis in axes[::-1]:
        form = draw(st.sampled_from(("plain", "plain", "plain", "reversed", "divided")))
        factor = -size if form == "reversed" else size
        offset += size * (draft.sizes[axis] - 1) * (form == "reversed")
        terms.append(AxisTerm(axis, factor, *((2, 2) if form == "divided" else ())))
        size *= draft.sizes[axis]
    state = np.random.default_rng(draw(st.integers(0, 1 << 16))).integers(0, 1 << 64, 3, np.uint64)
    key, counter = len(draft.tensors), len(draft.tensors) + 1
    draft.tensors += [state[:1], state[1:]]
    dtype = draw(st.sampled_from(draft.kinds.of((*FLOATS, *INTEGERS))))
    number = draft.add(Random(dtype, key, counter, Index(offset, tuple(terms[::-1]))))
    middle = draft.add(Constant(dtype, 0.5 if dtype in FLOATS else 0))
    draft.unused |= {number, middle}
    draft.add(Elementwise("greater", (number, middle)))


def _reduce(draw: st.DrawFn, draft: Draft) -> None:
    operand = draw(st.sampled_from(draft.any()))
    dtype = draft.types[operand].dtype
    among = draft.types[operand].axes or tuple(range(len(draft.sizes)))
    axes = draw(st.lists(st.sampled_from(among), min_size=1, max_size=3, unique=True))
    few = np.prod([draft.sizes[axis] for axis in axes]) <= MOST_FACTORS
    kinds = [kind for kind, dtypes in REDUCTIONS.items() if dtype in dtypes]
    kind = draw(st.sampled_from([kind for kind in kinds if few or kind != "product" or dtype in INTEGERS]))
    reduced = draft.add(Reduce(kind, operand, tuple(axes)))
    if kind == "mean":  # no integer
        draft.add(Elementwise("sign", (reduced,)))
        draft.unused.add(reduced)
    else:
        draft.clamp(reduced)


def _elementwise(draw: st.DrawFn, draft: Draft) -> None:
    first = draw(st.sampled_from(draft.any()))
    dtype = draft.types[first].dtype
    names = [name for name in OPS if dtype in TABLE[name].dtypes]
    if not names:
        return
    op = TABLE[draw(st.sampled_from(names))]
    arguments = [first] + [draw(st.sampled_from(draft.of(dtype))) for _ in range(op.arity - 1)]
    if op.name == "select":
        if not draft.of(*BOOL):
            return
        arguments[0] = draw(st.sampled_from(draft.of(*BOOL)))
        arguments[1:] = [draw(st.sampled_from(draft.of(dtype))) for _ in range(2)]
    draft.clamp(draft.add(Elementwise(op.name, tuple(arguments))))


@st.composite
def programs(draw: st.DrawFn, kinds: Kinds = ON_CPU) -> tuple[Program, list[Array]]:
    """A program of fixed sizes, and tensors for it."""
    sizes: list[int] = []
    for _ in range(draw(st.sampled_from(kinds.counts))):
        fit = [size for size in kinds.sizes if size * int(np.prod(sizes)) <= MOST_POSITIONS]
        sizes.append(draw(st.sampled_from(fit)))
    draft = Draft(kinds, sizes, [], [], [], set())
    _input(draw, draft)
    for _ in range(draw(st.integers(1, 14))):
        form = draw(
            st.sampled_from(
                ("input", "reduce", "reduce", "reduce", "apply", "apply", "apply", "cast", "leaf", "random")
            )
        )
        if form == "input":
            _input(draw, draft)
        elif form == "random":
            _random(draw, draft)
        elif form == "reduce" and sizes:
            _reduce(draw, draft)
        elif form == "apply":
            _elementwise(draw, draft)
        elif form == "cast":
            dtype = draw(st.sampled_from(kinds.dtypes))
            draft.clamp(draft.add(Cast(dtype, draw(st.sampled_from(draft.any())))))
        elif sizes and draw(st.booleans()):
            draft.add(Position(draw(st.sampled_from(kinds.of(INTEGERS))), draw(st.integers(0, len(sizes) - 1))))
        else:
            dtype = draw(st.sampled_from(kinds.of((*FLOATS, *INTEGERS))))
            draft.constant(dtype, draw(st.integers(-2, 2)))
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(draft.any()))
        axes = set(draft.types[node].axes)
        axes |= {axis for axis in range(len(sizes)) if draw(st.integers(0, 4)) == 0}
        outputs.append(Output(node, tuple(draw(st.permutations(sorted(axes))))))
    return Program(tuple(sizes), draft.declared, tuple(draft.nodes), tuple(outputs)), draft.tensors
