"""A draft over fewer axes (`custom_ops/expr/collapse.py`), without dimensions of size 1.

Reading and writing tensors in another shape costs nothing, so a dimension that becomes one with the next is one of a
view.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from custom_ops.expr.collapse import collapse, joined, one_for_two
from custom_ops.expr.nodes import Index, Input
from graph_passes.lower.draft import Draft, times


def collapsed(draft: Draft) -> Draft:
    """An equal draft in as few dimensions as can be."""
    return collapse(_without_ones(draft), _joined)


def _without_ones(draft: Draft) -> Draft:
    """Leave out dimensions of size 1 of tensors and outputs."""
    kept = [[place for place, size in enumerate(shape) if size != 1] for shape in draft.shapes]
    nodes = [
        Input(node.tensor, tuple(node.index[place] for place in kept[node.tensor])) if isinstance(node, Input) else node
        for node in draft.nodes
    ]
    shapes = [tuple(shape[place] for place in places) for shape, places in zip(draft.shapes, kept, strict=True)]
    outputs = [replace(each, axes=tuple(axis for axis in each.axes if draft.axes[axis] != 1)) for each in draft.outputs]
    return replace(draft, nodes=tuple(nodes), shapes=tuple(shapes), outputs=tuple(outputs))


def _joined(draft: Draft, outer: int, inner: int) -> Draft | None:
    """Join two axes, of which the inner one has a size that is known."""
    size = draft.axes[inner]
    if size < 0:
        return None
    found = joined(draft, outer, inner, size, partial(_has_all_of_the_inner, draft, size))
    if found is None:
        return None
    axes = list(draft.axes)
    axes[outer] = times(axes[outer], size)
    shapes = [one_for_two(shape, found.places.get(tensor), times) for tensor, shape in enumerate(draft.shapes)]
    varying = tuple(each - {inner} for each in draft.varying)
    return replace(
        draft, axes=tuple(axes), shapes=tuple(shapes), nodes=found.nodes, varying=varying, outputs=found.outputs
    )


def _has_all_of_the_inner(draft: Draft, size: int, tensor: int, dimension: int, _outer: Index, _inner: Index) -> bool:
    return draft.shapes[tensor][dimension + 1] == size
