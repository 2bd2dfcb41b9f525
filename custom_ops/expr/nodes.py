"""The nodes of a `Program`, of which each computes a value of the ones before it; see `program.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias


# Planning makes, compares and hashes these two more often than all else: as tuples that takes a third of the time.
class AxisTerm(NamedTuple):
    """`factor * (position along axis // divisor % modulus)`; a modulus of 0 is none."""

    axis: int
    factor: int = 1
    divisor: int = 1
    modulus: int = 0


class Index(NamedTuple):
    """The position to read along one dimension of a tensor: `offset`, plus all terms, plus the values of the nodes."""

    offset: int = 0
    terms: tuple[AxisTerm, ...] = ()
    nodes: tuple[int, ...] = ()

    @property
    def axis(self) -> int | None:
        """The axis along which a dimension lies as it is; None if it does not."""
        if len(self.terms) != 1 or self.offset or self.nodes:
            return None
        term = self.terms[0]
        return term.axis if term.factor == term.divisor == 1 and not term.modulus else None


@dataclass(frozen=True)
class Input:
    """The elements of tensor `tensor` at one index for each of its dimensions."""

    tensor: int
    index: tuple[Index, ...]


@dataclass(frozen=True)
class Constant:
    """A number, or a truth value."""

    dtype: str
    value: float | int | bool


@dataclass(frozen=True)
class Position:
    """0, 1, 2, ... along an axis."""

    dtype: str
    axis: int


@dataclass(frozen=True)
class Random:
    """Numbers of a stateless generator, whose state are tensors `key` and `counter`; `index` numbers them. If both are
    one tensor, it is a seed, of which the state is made."""

    dtype: str
    key: int
    counter: int
    index: Index


@dataclass(frozen=True)
class Cast:
    """A value in another dtype."""

    dtype: str
    operand: int


@dataclass(frozen=True)
class Reduce:
    """One of `REDUCTIONS` over all positions along some axes."""

    kind: str
    operand: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Elementwise:
    """One of the ops of `custom_ops.expr.table`."""

    op: str
    arguments: tuple[int, ...]


Node: TypeAlias = Input | Constant | Position | Random | Cast | Reduce | Elementwise


def indices_of(node: Node) -> tuple[Index, ...]:
    """The indices that `node` has."""
    match node:
        case Input(index=index):
            return index
        case Random(index=index):
            return (index,)
    return ()


def tensors_of(node: Node) -> tuple[int, ...]:
    """The tensors that `node` reads."""
    match node:
        case Input(tensor=tensor):
            return (tensor,)
        case Random(key=key, counter=counter):
            return (key, counter)
    return ()


def arguments_of(node: Node) -> Iterator[int]:
    """The nodes that `node` reads."""
    match node:
        case Input(index=index):
            for dimension in index:
                yield from dimension.nodes
        case Cast(operand=operand) | Reduce(operand=operand):
            yield operand
        case Elementwise(arguments=arguments):
            yield from arguments


def live_nodes(count: int, roots: Iterable[int], arguments: Callable[[int], Iterable[int]]) -> tuple[bool, ...]:
    """Flags, for `count` nodes, whether a root is or needs the node; `arguments` says what a node reads."""
    live = [False] * count
    waiting = list(roots)
    while waiting:
        place = waiting.pop()
        if not live[place]:
            live[place] = True
            waiting += arguments(place)
    return tuple(live)


def renumbered(node: Node, place: Callable[[int], int], axis: Callable[[int], int]) -> Node:
    """A node with other numbers for the nodes and axes that it names."""
    match node:
        case Input(tensor=tensor, index=index):
            return Input(tensor, tuple(_renumbered_index(each, place, axis) for each in index))
        case Random(index=number):
            return replace(node, index=_renumbered_index(number, place, axis))
        case Position(dtype=dtype, axis=own):
            return Position(dtype, axis(own))
        case Cast(dtype=dtype, operand=operand):
            return Cast(dtype, place(operand))
        case Reduce(kind=kind, operand=operand, axes=axes):
            return Reduce(kind, place(operand), tuple(sorted(map(axis, axes))))
        case Elementwise(op=op, arguments=arguments):
            return Elementwise(op, tuple(map(place, arguments)))
    return node


def _renumbered_index(index: Index, place: Callable[[int], int], axis: Callable[[int], int]) -> Index:
    if not index.terms and not index.nodes:
        return index
    terms = tuple(AxisTerm(axis(term.axis), term.factor, term.divisor, term.modulus) for term in index.terms)
    return Index(index.offset, terms, tuple(map(place, index.nodes)))
