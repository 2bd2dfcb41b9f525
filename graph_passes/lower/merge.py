"""Axes that may be one: where no value varies along both, one loop serves for two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from custom_ops.expr.nodes import Index, Input, Random, Reduce, indices_of
from graph_passes.lower.draft import Draft, bits, with_axes


def merged(draft: Draft) -> Draft:
    """First axes along which a tensor is read in the same way: then what was two nodes is one, and so is all that is
    computed from it; a sum over a row and what uses each of its elements read the row once. Then, from the last one on,
    the dimensions of outputs that are as long, and such axes as are only reduced over."""
    draft = _merged(draft, _read_alike)
    draft = _merged(draft, _written_alike)
    return _merged(draft, _reduced_alike)


# Pairs of axes that may be one, of a draft; and what became of each axis by now.
_Alike = Callable[[Draft, Mapping[int, int]], Iterable[tuple[int, int]]]


def _merged(draft: Draft, alike: _Alike) -> Draft:
    together = [bits(output.axes) for output in draft.outputs]
    for node, varying in zip(draft.nodes, draft.varying, strict=True):
        together.append(bits(varying))
        if isinstance(node, Reduce):
            together.append(bits(draft.varying[node.operand]) | bits(node.axes))
    together = list(dict.fromkeys(together))
    become = {axis: axis for axis in range(len(draft.axes))}
    apart: set[tuple[int, int]] = set()  # for good: what varies along both axes goes on doing so
    for one, other in alike(draft, become):
        first, second = become[one], become[other]
        kept, gone = (first, second) if first < second else (second, first)
        if kept == gone or (kept, gone) in apart:
            continue
        both = 1 << kept | 1 << gone
        if draft.axes[kept] != draft.axes[gone] or any(mask & both == both for mask in together):
            apart.add((kept, gone))
            continue
        together = list(
            dict.fromkeys(mask & ~(1 << gone) | 1 << kept if mask >> gone & 1 else mask for mask in together)
        )
        for axis, new in become.items():
            if new == gone:
                become[axis] = kept
    return with_axes(draft, become)


def _read_alike(draft: Draft, _: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Axes that have the same part in indices of one dimension of a tensor that are equal but for the axes."""
    found: dict[tuple[object, ...], dict[tuple[int, ...], None]] = {}
    for node in draft.nodes:
        read = (
            node.tensor if isinstance(node, Input) else replace(node, index=Index()) if isinstance(node, Random) else 0
        )
        for dimension, index in enumerate(indices_of(node)):
            if index.terms and not index.nodes:
                parts = tuple((term.factor, term.divisor, term.modulus) for term in index.terms)
                axes = tuple(term.axis for term in index.terms)
                found.setdefault((read, dimension, index.offset, parts), {})[axes] = None
    for alike in found.values():
        for one, other in combinations(alike, 2):
            yield from zip(one, other, strict=True)


def _written_alike(draft: Draft, become: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    longest = sorted(draft.outputs, key=lambda output: -len(output.axes))
    shaped = [(output.axes[::-1], draft.shape_of(output)[::-1]) for output in longest]
    seen: set[tuple[int, ...]] = set()
    for place, (axes, shape) in enumerate(shaped):
        by_now = tuple(become[axis] for axis in axes)
        if by_now in seen:
            continue  # as one before, whose pairs were the same
        seen.add(by_now)
        for other, wanted in shaped[place + 1 :]:
            if wanted and shape[: len(wanted)] == wanted:
                yield from zip(axes, other, strict=False)


def _reduced_alike(draft: Draft, _: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    written = {axis for output in draft.outputs for axis in output.axes}
    reduced = [axis for node in draft.nodes if isinstance(node, Reduce) for axis in node.axes]
    return combinations([axis for axis in dict.fromkeys(reduced) if axis not in written], 2)
