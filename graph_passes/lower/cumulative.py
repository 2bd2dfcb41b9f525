"""Cumulative sums along short dimensions, as one loop over all that may be added up for each result.

The element `[..., i, ...]` of `Cumsum` is the sum over all `j` of `x[..., j, ...]` where `j` is not behind `i`. So each
result looks at all numbers of its row, and the rule is for few. What is not added up is left out, not multiplied by
zero, so NaN and infinity reach later results alone.
"""

from __future__ import annotations

from math import prod

from graph_passes.graph.ir import Graph, Node, boolean
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.known_numbers import integers
from graph_passes.lower.program_writer import LoweringError, ProgramWriter, Steps
from graph_passes.lower.rule import Rule
from graph_passes.lower.segment_sums import MOST_LOOKED_AT, is_cheap
from graph_passes.refusals import Reason, Refusal

MOST = 128  # numbers of a row
_DTYPES = frozenset({"float32", "float64", "int32", "int64"})


def _sum(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, place = node.inputs[0], _place(w.graph, node)
    assert place is not None
    (other,) = w.everywhere(w.shapes[x][place : place + 1])
    element = yield x, (*at[:place], other, *at[place + 1 :])
    if not is_cheap(w, element):
        raise LoweringError(Reason.CUMULATED_AGAIN(tensor=x))
    exclusive, axes = boolean(node.attrs.get("exclusive")), sorted(w.axes_of(other))
    nothing = w.like(element, 0)
    if not axes:
        return nothing if exclusive else element
    last, first = w.position(at[place], "int32"), w.position(other, "int32")
    if boolean(node.attrs.get("reverse")):
        last, first = first, last
    within = w.apply("greater" if exclusive else "greater_equal", last, first)
    return w.reduce("sum", w.apply("select", within, element, nothing), axes)


def _place(graph: Graph, node: Node) -> int | None:
    """The dimension; None if it is no constant."""
    found, shape = integers(graph, node.inputs[1]), graph.specs[node.inputs[0]].shape
    return found[0] % len(shape) if found and shape else None


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    spec, place = graph.specs[node.inputs[0]], _place(graph, node)
    if spec.dtype not in _DTYPES:
        return Reason.OP_DTYPE(op=node.op, dtype=spec.dtype)
    if place is None or spec.shape is None:
        return Reason.REDUCED_AXIS()
    count = spec.shape[place]
    known = prod(size for size in spec.shape if size is not None)
    if count is None or count > MOST or count * known > MOST_LOOKED_AT:
        return Reason.CUMULATED(count=count, most=MOST)
    return None


RULES = {"Cumsum": Rule(_sum, OpPattern.REDUCTION, (0, 1), _refusal)}
