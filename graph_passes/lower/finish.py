"""From what was written to a program over as few axes as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from custom_ops.errors import ProgramError
from custom_ops.expr.nodes import Input
from custom_ops.expr.program import MOST_AXES, Output, Program
from graph_passes.lower.access import Access
from graph_passes.lower.draft import Draft, Shape, compacted, program_of
from graph_passes.lower.draft_axes import collapsed
from graph_passes.lower.merge import merged
from graph_passes.lower.program_writer import ProgramWriter, Value
from graph_passes.lower.split import split


@dataclass(frozen=True)
class Finished:
    """A program, what its tensors are, and in which shapes it reads and writes."""

    program: Program
    inputs: tuple[Value, ...]
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]


def finished(w: ProgramWriter, results: Sequence[tuple[int, Access]]) -> Finished:
    """The program whose outputs are these nodes, along the axes of their accesses.

    Raises:
        ProgramError: see `drafted`.
    """
    live, read = drafted(w, results)
    parts = merged(split(live))
    # Axes that were taken apart may be more than a program has; as they were written they are not.
    chosen = (merged(each) for each in (collapsed(parts), parts) if _is_viewable(live, each))
    found = next((each for each in map(compacted, chosen) if len(each[0].axes) <= MOST_AXES), None)
    draft, again = found or compacted(merged(live))
    inputs = tuple(w.tensors[read[tensor]] for tensor in again)
    return Finished(
        program=program_of(draft),
        inputs=inputs,
        input_shapes=draft.shapes,
        output_shapes=tuple(map(draft.shape_of, draft.outputs)),
    )


def drafted(w: ProgramWriter, results: Sequence[tuple[int, Access]]) -> tuple[Draft, tuple[int, ...]]:
    """The program before it is made shorter, less what no output needs; and which of the tensors it still reads.

    Raises:
        ProgramError: the size of an axis is not that of a tensor which is read along all of it, as far as is known.
    """
    live, read = compacted(_written(w, results))
    _require_sizes(live)
    return live, read


def require_valid(w: ProgramWriter, results: Sequence[tuple[int, Access]]) -> None:
    """Require that `finished` can give a program. Mostly all that was written is one; then nothing is numbered again.

    Raises:
        ProgramError: see `drafted`; or it is no program.
    """
    draft = _written(w, results)
    try:
        _require_sizes(draft)
        program_of(draft)
    except ProgramError:
        program_of(drafted(w, results)[0])


def _written(w: ProgramWriter, results: Sequence[tuple[int, Access]]) -> Draft:
    outputs = tuple(Output(place, _dimensions(w, at)) for place, at in results)
    return Draft(
        axes=tuple(map(w.symbol, range(len(w.sizes)))),
        dtypes=tuple(map(w.shapes.dtype, w.tensors)),
        shapes=tuple(w.shapes[value] for value in w.tensors),
        nodes=tuple(w.nodes),
        varying=tuple(map(w.axes, range(len(w.nodes)))),
        outputs=outputs,
    )


def _require_sizes(draft: Draft) -> None:
    """A size that is not known is that of the tensors which are read along all of the axis, once the program runs."""
    for node in draft.nodes:
        for index, size in zip(node.index, draft.shapes[node.tensor], strict=True) if isinstance(node, Input) else ():
            if index.axis is not None and size != draft.axes[index.axis] < 0:
                raise ProgramError("takes a part of a tensor, whose size is unknown statically")


def _is_viewable(given: Draft, draft: Draft) -> bool:
    """Whether tensors that it reads and gives in other shapes are views, of which at most one size is not known."""
    read = zip(given.shapes, draft.shapes, strict=True)
    made = zip(map(draft.shape_of, draft.outputs), map(given.shape_of, given.outputs), strict=True)
    return all(old == new or sum(size < 0 for size in new) < 2 for old, new in (*read, *made))


def _dimensions(w: ProgramWriter, at: Access) -> tuple[int, ...]:
    """The axes of an output; a dimension of size 1 has a new one."""
    return tuple(index.terms[0].axis if index.terms else w.axis(1) for index in at)
