"""Sums of segments, which the gradient of a gather is, as one loop over all that is added up for each result.

The element `[s, ...]` of `UnsortedSegmentSum` is the sum over all `n` of `data[n, ...]` where `ids[n]` is `s`. Ids that
are no segment's match none, as on a GPU; on a CPU TensorFlow's kernel runs, which refuses them. Results are the same in
every run, which those of TensorFlow's atomic additions on a GPU are not. But each result looks at all ids, so the rule
is for few.
"""

from __future__ import annotations

from math import prod

from custom_ops.expr.nodes import Cast, Elementwise, Random, Reduce, arguments_of
from custom_ops.expr.table import TABLE
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.rule import Rule
from graph_passes.lower.writer import LoweringError, Steps, Writer
from graph_passes.refusals import Reason, Refusal

# Numbers that all results together look at: what a GPU does in about as long as the three kernels take in whose place
# this is (zeros, atomic additions, and what reads the sum).
MOST_LOOKED_AT = 1 << 24
MOST_AGAIN = 4  # ops on what is added up, which each segment recomputes: an estimate


def _sum(w: Writer, node: Node, output: int, at: Access) -> Steps:
    data, ids, _ = node.inputs
    segment, *rest = at
    every = w.everywhere(w.shapes[ids])
    own = yield ids, every
    element = yield data, (*every, *rest)
    if not _is_cheap(w, element):
        raise LoweringError(Reason.SEGMENTS_AGAIN(tensor=data))
    hit = w.apply("equal", own, w.position(segment, w.dtype(own)))
    axes = [axis for index in every for axis in w.axes_of(index)]
    return w.reduce("sum", w.apply("select", hit, element, w.like(element, 0)), axes)


def _is_cheap(w: Writer, place: int) -> bool:
    """Whether a value may be computed again for each segment: of what is read, by little arithmetic."""
    waiting, work = [place], 0
    while waiting and work <= MOST_AGAIN:
        node = w.nodes[waiting.pop()]
        if isinstance(node, Reduce | Random) or (isinstance(node, Elementwise) and TABLE[node.op].cost != "arithmetic"):
            return False
        if isinstance(node, Cast | Elementwise):
            work += 1
            waiting += arguments_of(node)
    return work <= MOST_AGAIN


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    result, data, ids = (graph.specs[t] for t in (TensorId(node.name), *node.inputs[:2]))
    if result.sizes is None or data.sizes is None or ids.sizes is None:
        return Reason.SEGMENTS_UNKNOWN()
    looked_at = prod(result.sizes) * prod(ids.sizes)
    if looked_at > MOST_LOOKED_AT:
        return Reason.SEGMENTS(count=f"{looked_at:,}")
    return None if data.dtype != "bool" else Reason.SEGMENTS_BOOL()


RULES = {"UnsortedSegmentSum": Rule(_sum, OpPattern.REDUCTION, (0, 2), _refusal)}
