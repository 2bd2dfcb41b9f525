"""The largest numbers of rows, by the rank of each: how many of its row come before it.

A number comes before another if it is larger; of equal ones that which lies first, as TensorFlow says; NaN before all
numbers. So the ranks of a row are its positions in another order, and result `j` is the number whose rank is `j`, to
the bit. All pairs of a row are compared, so the rule is for short rows.
"""

from __future__ import annotations

from collections.abc import Generator
from math import prod

from custom_ops.expr.nodes import Index
from custom_ops.expr.table_entry import FLOATS
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.program_writer import Demand, ProgramWriter, Steps
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal

MOST = 128  # numbers of a row
MOST_PAIRS = 1 << 26  # of all rows: what a GPU compares in as long as TensorFlow's kernel takes, an estimate


def _top(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Outputs: the numbers, and their positions."""
    x = node.inputs[0]
    index_dtype = w.shapes.dtype(TensorId(node.name, 1))
    position = yield from _position(w, x, at, index_dtype)
    return position if output == 1 else (yield x, (*at[:-1], Index(nodes=(position,))))


def _position(w: ProgramWriter, x: TensorId, at: Access, dtype: str) -> Generator[Demand, int, int]:
    """Where the number of rank `at[-1]` lies in its row."""
    *row, rank = at
    own, other = w.everywhere(w.shapes[x][-1:] * 2)
    if not w.axes_of(own):
        return w.number(dtype, 0)
    one = yield x, (*row, own)
    before = yield from _before(w, x, (*row, other), one, w.position(other), w.position(own))
    ranks = w.reduce("sum", w.cast("int32", before), sorted(w.axes_of(other)))
    here = w.apply("equal", ranks, w.position(rank))
    places = w.position(own, dtype)
    return w.reduce("sum", w.apply("select", here, places, w.like(places, 0)), sorted(w.axes_of(own)))


def _before(w: ProgramWriter, x: TensorId, at: Access, one: int, place: int, own: int) -> Generator[Demand, int, int]:
    """Whether the number at `at`, which is at `place` of its row, comes before `one`, which is at `own`."""
    other = yield x, at
    larger, alike = w.apply("greater", other, one), w.apply("equal", other, one)
    if w.dtype(one) in FLOATS:
        number, other_nan = w.apply("equal", one, one), w.apply("logical_not", w.apply("equal", other, other))
        nan = w.apply("logical_not", number)
        larger = w.apply("logical_or", larger, w.apply("logical_and", other_nan, number))
        alike = w.apply("logical_or", alike, w.apply("logical_and", other_nan, nan))
    first = w.apply("greater", own, place)
    return w.apply("logical_or", larger, w.apply("logical_and", alike, first))


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    spec = graph.specs[node.inputs[0]]
    count = spec.shape[-1] if spec.shape else None
    known = prod(size for size in spec.shape or () if size is not None)
    if count is None or count > MOST or count * known > MOST_PAIRS:
        return Reason.RANKED(count=count, most=MOST)
    return None


RULES = dict.fromkeys(("TopK", "TopKV2"), Rule(_top, OpPattern.REDUCTION, (0, 1), _refusal))
