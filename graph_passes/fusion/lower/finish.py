"""From what was written to a program over as few axes as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from custom_ops.expr.program import Output, Program
from graph_passes.fusion.lower.access import Access
from graph_passes.fusion.lower.collapse import collapsed
from graph_passes.fusion.lower.draft import Draft, Shape, compacted, program_of
from graph_passes.fusion.lower.merge import merged
from graph_passes.fusion.lower.split import split
from graph_passes.fusion.lower.writer import Value, Writer

_SOME = 1 << 10  # stands for a size that is not known


@dataclass(frozen=True)
class Finished:
    """A program, what its tensors are, in which shapes it reads and writes, and which values it computes repeatedly."""

    program: Program
    inputs: tuple[Value, ...]
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    repeated: tuple[Value, ...]


def finished(w: Writer, results: Sequence[tuple[int, Access]]) -> Finished:
    """The program whose outputs are these nodes, along the axes of their accesses."""
    outputs = tuple(Output(place, _dimensions(w, at)) for place, at in results)
    written = Draft(
        axes=tuple(map(w.symbol, range(len(w.sizes)))),
        dtypes=tuple(map(w.shapes.dtype, w.tensors)),
        shapes=tuple(w.shapes[value] for value in w.tensors),
        nodes=tuple(w.nodes),
        varying=tuple(map(w.axes, range(len(w.nodes)))),
        outputs=outputs,
        origins=tuple(range(len(w.nodes))),
    )
    live, read = compacted(written)
    draft, again = compacted(merged(_viewable(merged(split(live)))))
    inputs = tuple(w.tensors[read[tensor]] for tensor in again)
    return Finished(
        program=program_of(draft),
        inputs=inputs,
        input_shapes=draft.shapes,
        output_shapes=tuple(map(draft.shape_of, draft.outputs)),
        repeated=tuple(value for value in w.demanded if _is_repeated(w, draft, value)),
    )


def _viewable(draft: Draft) -> Draft:
    """Over fewer axes, unless a tensor in another shape would have two sizes that are not known: no view has."""
    fewer = collapsed(draft)
    pairs = list(zip(draft.shapes, fewer.shapes, strict=True))
    pairs += zip(map(draft.shape_of, draft.outputs), map(fewer.shape_of, fewer.outputs), strict=True)
    return fewer if all(old == new or sum(size < 0 for size in new) < 2 for old, new in pairs) else draft


def _is_repeated(w: Writer, draft: Draft, value: Value) -> bool:
    """Whether more numbers are computed than there are."""
    nodes = {draft.origins[place] for place in w.places_of(value)} - {-1}
    if len(nodes) < 2:
        return False
    computed = sum(
        prod(_SOME if draft.axes[axis] < 0 else draft.axes[axis] for axis in draft.varying[node]) for node in nodes
    )
    return computed > prod(_SOME if size < 0 else size for size in w.shapes[value])


def _dimensions(w: Writer, at: Access) -> tuple[int, ...]:
    """The axes of an output; a dimension of size 1 has one of its own."""
    return tuple(index.terms[0].axis if index.terms else w.axis(1) for index in at)
