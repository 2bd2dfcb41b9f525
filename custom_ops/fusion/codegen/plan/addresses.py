"""Where values lie in tensors: index arithmetic as C++, and what can be loaded several elements at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

from custom_ops.expr.nodes import AxisTerm, Index, Input, Random
from custom_ops.fusion.codegen.plan.pattern import Pattern, Root

At: TypeAlias = Callable[[int], str]  # the position along an axis, as C++ has it
ValueOf: TypeAlias = Callable[[int], str]  # a node's value, as C++ has it


def product(sizes: Sequence[int | str]) -> str:
    """The product of numbers and names, as C++ has it."""
    known = prod(size for size in sizes if isinstance(size, int))
    names = [size for size in sizes if isinstance(size, str)]
    return " * ".join([str(known)] * (known != 1 or not names) + names)


def linear(parts: Sequence[tuple[str, int | str]]) -> str:
    """The place in a row-major tensor: of each dimension the index, a sum without parentheses, and the size."""
    terms = []
    for number, (index, _) in enumerate(parts):
        stride = product([size for _, size in parts[number + 1 :]])
        if index != "0":
            terms.append(index if stride == "1" else f"({index}) * {stride}" if " " in index else f"{index} * {stride}")
    return " + ".join(terms) or "0"


def offset_of(pattern: Pattern, node: Input, at: At, value: ValueOf) -> str:
    """The offset of the element that an input reads."""
    sizes = pattern.dimensions[node.tensor]
    return linear([(index_text(index, at, value), size) for index, size in zip(node.index, sizes, strict=True)])


def index_text(index: Index, at: At, value: ValueOf, integer: str = "Index") -> str:
    """One dimension's index, in arithmetic of type `integer`."""
    terms = []
    for term in index.terms:
        text = at(term.axis)
        text = f"{text} / {term.divisor}" if term.divisor != 1 else text
        text = f"{text} % {term.modulus}" if term.modulus else text
        if term.factor != 1:
            text = f"{term.factor} * ({text})" if " " in text else f"{term.factor} * {text}"
        terms.append(text)
    terms += [f"static_cast<{integer}>({value(node)})" for node in index.nodes]
    if index.offset or not terms:
        terms.append(str(index.offset))
    return " + ".join(terms)


def offset_along(pattern: Pattern, axes: Sequence[int], at: At) -> str:
    """The offset in a tensor whose dimensions are these axes."""
    return linear([(at(axis), pattern.size(axis)) for axis in axes])


def lies_along(pattern: Pattern, node: Input, axis: int) -> bool:
    """Whether what an input reads at neighbouring positions along `axis` are neighbours."""
    if not node.index or node.index[-1].axis != axis:
        return False
    others = [term.axis for index in node.index[:-1] for term in index.terms]
    inner = [nodes for index in node.index for nodes in index.nodes]
    return axis not in others and all(axis not in pattern.program.types[place].axes for place in inner)


def aligned(pattern: Pattern, node: Input, width: int) -> bool:
    """Whether `width` neighbours lie at a multiple of `width`, for positions that are one."""
    size = pattern.dimensions[node.tensor][-1]
    return len(node.index) == 1 or (isinstance(size, int) and size % width == 0)


def is_packed(pattern: Pattern, node: Input, axis: int, width: int) -> bool:
    """Whether what an input reads at `width` neighbouring positions along `axis` is loaded at once."""
    alone = not any(index.nodes for index in node.index)
    return width > 1 and alone and lies_along(pattern, node, axis) and aligned(pattern, node, width)


def number_of(node: Random, at: At) -> str:
    """The index of the number that a generator draws, which may exceed an index of the kernel."""
    return index_text(node.index, lambda axis: f"Word({at(axis)})", str, "Word")


def in_step(node: Random, axis: int, width: int) -> bool:
    """Whether the numbers at `width` neighbours along `axis`, from a multiple of `width` on, are neighbours that begin
    at one, too: with a width that divides a group, of one group."""
    along = [term for term in node.index.terms if term.axis == axis]
    others = [term.factor for term in node.index.terms if term.axis != axis]
    return along == [AxisTerm(axis)] and all(number % width == 0 for number in (node.index.offset, *others))


def vector_width(pattern: Pattern, roots: Sequence[Root], axes: Sequence[int], most: int) -> int:
    """How many positions along the last of `axes` a thread can load and store at once, at most `most`: all that lies
    along it has to be aligned."""
    axis, nodes = axes[-1], pattern.program.nodes
    inputs = {place for root in roots for place in pattern.needs(root)}
    along = [node for place in inputs if isinstance(node := nodes[place], Input) and lies_along(pattern, node, axis)]
    outputs = [root for root in roots if root.output is not None and root.axes and root.axes[-1] == axis]
    size = pattern.sizes[axis]
    width = most if along or outputs else 1
    while width > 1:
        # The last elements along one axis alone may be fewer; with several axes a row would begin where no vector may.
        fits = size is not None and size % width == 0
        alone = len(axes) == 1 and all(len(root.axes) == 1 for root in outputs)
        if (fits or alone) and all(aligned(pattern, node, width) for node in along):
            break
        width //= 2
    return width
