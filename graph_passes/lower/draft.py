"""A program that is not finished: nodes, and the tensors that they read, whose axes may still change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from custom_ops.expr.nodes import (
    Constant,
    Input,
    Node,
    Position,
    Random,
    Reduce,
    arguments_of,
    indices_of,
    live_nodes,
    renumbered,
    tensors_of,
)
from custom_ops.expr.program import Output, Program, Tensor

# Negative: not known; equal ones are equal. -3 is some size, and -3 - 9 * _SYMBOLS is ten times that, see `times`.
Shape: TypeAlias = tuple[int, ...]

_SYMBOLS = 1 << 32  # more than there are sizes that are not known


@dataclass(frozen=True)
class Draft:
    """What a program will be.

    Attributes:
        axes: the size of each axis, negative if it is not known.
        dtypes, shapes: of each tensor that is read.
        nodes: in topological order.
        varying: along which axes each node varies.
        outputs: nodes, and the axes that are their dimensions.
    """

    axes: tuple[int, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    nodes: tuple[Node, ...]
    varying: tuple[frozenset[int], ...]
    outputs: tuple[Output, ...]

    def shape_of(self, output: Output) -> Shape:
        """The shape of an output."""
        return tuple(self.axes[axis] for axis in output.axes)


def times(size: int, factor: int) -> int:
    """A multiple of a size; of one that is not known, another that is not known."""
    if size >= 0:
        return size * factor
    before, symbol = divmod(-size, _SYMBOLS)
    return -(symbol + ((before + 1) * factor - 1) * _SYMBOLS)


def with_axes(draft: Draft, become: Mapping[int, int]) -> Draft:
    """The draft with other axes in place of some; nodes that are the same then are one node."""
    if all(old == new for old, new in become.items()):
        return draft

    def axis(old: int) -> int:
        return become.get(old, old)

    nodes: list[Node] = []
    varying: list[frozenset[int]] = []
    places: list[int] = []
    known: dict[object, int] = {}
    for old, along in zip(draft.nodes, draft.varying, strict=True):
        node = renumbered(old, places.__getitem__, axis)
        key = (node.dtype, repr(node.value)) if isinstance(node, Constant) else node  # 0.0 equals -0.0
        places.append(known.setdefault(key, len(nodes)))
        if places[-1] == len(nodes):
            nodes.append(node)
            varying.append(frozenset(map(axis, along)))
    outputs = tuple(Output(places[output.node], tuple(map(axis, output.axes))) for output in draft.outputs)
    return replace(draft, nodes=tuple(nodes), varying=tuple(varying), outputs=outputs)


def compacted(draft: Draft) -> tuple[Draft, tuple[int, ...]]:
    """Only what the outputs need, tensors in the order of reading, axes in that of the dimensions of what has the most.

    Returns:
        The draft, and which of the old tensors the new ones are.
    """
    roots = [output.node for output in draft.outputs]
    live = live_nodes(len(draft.nodes), roots, lambda place: arguments_of(draft.nodes[place]))
    kept = [place for place, is_live in enumerate(live) if is_live]
    place_of = {old: new for new, old in enumerate(kept)}
    named = [list(output.axes) for output in draft.outputs] + [axes_of(draft.nodes[place]) for place in kept]
    axes = tuple(dict.fromkeys(axis for each in sorted(named, key=lambda each: -len(each)) for axis in each))
    read = tuple(dict.fromkeys(tensor for place in kept for tensor in tensors_of(draft.nodes[place])))
    axis_of = {old: new for new, old in enumerate(axes)}
    tensor_of = {old: new for new, old in enumerate(read)}
    nodes = []
    for place in kept:
        node = renumbered(draft.nodes[place], place_of.__getitem__, axis_of.__getitem__)
        if isinstance(node, Input):
            node = Input(tensor_of[node.tensor], node.index)
        elif isinstance(node, Random):
            node = replace(node, key=tensor_of[node.key], counter=tensor_of[node.counter])
        nodes.append(node)
    found = Draft(
        axes=tuple(draft.axes[axis] for axis in axes),
        dtypes=tuple(draft.dtypes[tensor] for tensor in read),
        shapes=tuple(draft.shapes[tensor] for tensor in read),
        nodes=tuple(nodes),
        varying=tuple(frozenset(axis_of[axis] for axis in draft.varying[place]) for place in kept),
        outputs=tuple(
            Output(place_of[each.node], tuple(axis_of[axis] for axis in each.axes)) for each in draft.outputs
        ),
    )
    return found, read


def program_of(draft: Draft) -> Program:
    """The program.

    Raises:
        ProgramError: nothing says how long an axis is.
    """
    tensors = tuple(Tensor(dtype, len(shape)) for dtype, shape in zip(draft.dtypes, draft.shapes, strict=True))
    return Program(tuple(max(size, 0) for size in draft.axes), tensors, draft.nodes, draft.outputs)


def axes_of(node: Node) -> list[int]:
    """The axes that a node names."""
    match node:
        case Input() | Random():
            return [term.axis for each in indices_of(node) for term in each.terms]
        case Position(axis=axis):
            return [axis]
        case Reduce(axes=axes):
            return list(axes)
    return []


def bits(axes: Sequence[int] | frozenset[int]) -> int:
    """A set of axes as a number."""
    return sum(1 << axis for axis in set(axes))
