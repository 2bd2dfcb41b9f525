"""Sums of segments, which the gradient of a gather is, and updates of a variable's rows: loops over what is added up.

The element `[s, ...]` of `UnsortedSegmentSum` is the sum over all `n` of `data[n, ...]` where `ids[n]` is `s`. Ids that
are no segment's match none, as on a GPU; on a CPU TensorFlow's kernel runs, which refuses them. Results are the same in
every run, which those of TensorFlow's atomic additions on a GPU are not. Each result looks at all ids, but a kernel's
threads look at them together (`custom_ops/fusion/codegen/plan/segment_ids.py`), where a result's first dimension is an
axis. Elsewhere the rule is for few.

A row of a variable is given what it holds plus the sum of its segment. A sum of zero leaves it as it is, -0.0 too.
"""

from __future__ import annotations

from collections.abc import Generator
from math import prod

from custom_ops.expr.nodes import Cast, Elementwise, Index, Random, Reduce, arguments_of
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import INTEGER_RANGES
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.program_writer import Demand, LoweringError, ProgramWriter, Steps, VariableValue
from graph_passes.lower.rule import Rule
from graph_passes.lower.shapes import variable_spec
from graph_passes.refusals import Reason, Refusal

# Numbers that all results together look at: what a GPU does in about as long as the three kernels take in whose place
# this is (zeros, atomic additions, and what reads the sum).
MOST_LOOKED_AT = 1 << 24
MOST_TOGETHER = 1 << 37  # the same where threads look at ids together: an estimate by the model of kernels
TYPICAL = 1 << 12  # ids, where it is not known how many there are
MOST_AGAIN = 4  # ops on what is added up, which each segment recomputes: an estimate
MOST_HELD = 1 << 22  # numbers of a variable whose rows are updated: all of them are read and written


def _hits(
    w: ProgramWriter, ids: TensorId, data: TensorId, at: Access, depth: int = 0
) -> Generator[Demand, int, tuple[int, int, list[int]]]:
    """Whether a number counts for a result, the number, and the axes to add up along.

    An id is a number of `ids`, or, with a depth, so many of them, which lie along its last dimension.
    """
    every = w.everywhere(w.shapes[ids][:-1] if depth else w.shapes[ids])
    element = yield data, (*every, *at[max(depth, 1) :])
    if not is_cheap(w, element):
        raise LoweringError(Reason.SEGMENTS_AGAIN(tensor=data))
    if (depth > 1 or at[0].axis is None) and _looked_at(w, ids, at) > MOST_LOOKED_AT:
        raise LoweringError(Reason.SEGMENTS_PLACE(tensor=data))
    hit: int | None = None
    for place, index in enumerate(at[: max(depth, 1)]):
        own = yield ids, (*every, Index(place)) if depth else every
        same = w.apply("equal", own, w.position(index, w.dtype(own)))
        hit = same if hit is None else w.apply("logical_and", hit, same)
    assert hit is not None
    return hit, element, [axis for index in every for axis in w.axes_of(index)]


def _looked_at(w: ProgramWriter, ids: TensorId, at: Access) -> int:
    results = {axis for index in at for axis in w.axes_of(index)}
    return prod(w.sizes[axis] or TYPICAL for axis in results) * prod(max(size, 1) for size in w.shapes[ids])


def _total(w: ProgramWriter, ids: TensorId, data: TensorId, at: Access, depth: int = 0) -> Steps:
    hit, element, axes = yield from _hits(w, ids, data, at, depth)
    return w.reduce("sum", w.apply("select", hit, element, w.like(element, 0)), axes)


def _sum(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    return (yield from _total(w, node.inputs[1], node.inputs[0], at))


def _scatter_nd(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    ids, data = node.inputs[:2]
    return (yield from _total(w, ids, data, at, w.shapes[ids][-1]))


def _scatter(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """What a variable holds afterwards."""
    held = yield VariableValue(node.name, 0), at
    _, ids, data = node.inputs
    if node.op == "ResourceScatterUpdate":
        return (yield from _last(w, ids, data, at, held))
    total = yield from _total(w, ids, data, at)
    moved = w.apply("add" if node.op == "ResourceScatterAdd" else "subtract", held, total)
    return w.apply("select", w.apply("equal", total, w.like(total, 0)), held, moved)


def _last(w: ProgramWriter, ids: TensorId, data: TensorId, at: Access, held: int) -> Steps:
    """The last of the rows that are given, or what the variable held."""
    segment, *rest = at
    (place,) = w.everywhere(w.shapes[ids])
    own = yield ids, (place,)
    hit = w.apply("equal", own, w.position(segment, w.dtype(own)))
    number = w.position(place, "int32")
    last = w.reduce(
        "max", w.apply("select", hit, number, w.like(number, INTEGER_RANGES["int32"][0])), sorted(w.axes_of(place))
    )
    given = yield data, (Index(nodes=(w.apply("maximum", last, w.like(last, 0)),)), *rest)
    return w.apply("select", w.apply("greater_equal", last, w.like(last, 0)), given, held)


def is_cheap(w: ProgramWriter, place: int) -> bool:
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
    if result.sizes is None or data.shape is None or ids.shape is None:
        return Reason.SEGMENTS_UNKNOWN()
    return _too_many(result.sizes, ids.shape) or (None if data.dtype != "bool" else Reason.SEGMENTS_BOOL())


def _scatter_nd_refusal(graph: Graph, node: Node) -> Refusal | None:
    result, (ids, data) = graph.specs[TensorId(node.name)], (graph.specs[tensor] for tensor in node.inputs[:2])
    if result.sizes is None or data.shape is None or not ids.shape or not ids.shape[-1]:
        return Reason.SEGMENTS_UNKNOWN()
    return _too_many(result.sizes, ids.shape[:-1]) or (None if data.dtype != "bool" else Reason.SEGMENTS_BOOL())


def _too_many(result: tuple[int, ...], ids: tuple[int | None, ...]) -> Refusal | None:
    looked_at = prod(result) * (TYPICAL if None in ids else prod(size for size in ids if size is not None))
    return Reason.SEGMENTS(count=f"{looked_at:,}") if looked_at > MOST_TOGETHER else None


def _scatter_refusal(graph: Graph, node: Node) -> Refusal | None:
    """Rows of one variable, of known sizes, and as many rows that are given as there are ids."""
    spec = variable_spec(graph, node.name, 0)
    ids, data = (graph.specs[tensor] for tensor in node.inputs[1:])
    if spec is None or spec.sizes is None or not spec.sizes:
        return Reason.VARIABLE_SHAPE()
    if ids.shape is None or data.shape is None or spec.dtype == "bool":
        return Reason.SEGMENTS_UNKNOWN()
    rows = (*ids.shape, *spec.sizes[1:])
    if data.dtype != spec.dtype or data.shape != rows or (node.op == "ResourceScatterUpdate" and len(ids.shape) != 1):
        return Reason.VARIABLE_TYPE(tensor=node.inputs[2], dtype=data.dtype, shape=data.shape)
    if prod(spec.sizes) > MOST_HELD:
        return Reason.SCATTERED(count=f"{prod(spec.sizes):,}")
    return _too_many(spec.sizes, ids.shape)


_SCATTER = Rule(_scatter, OpPattern.UPDATE, (1, 3), _scatter_refusal, (0,), (0,))

RULES = {
    "UnsortedSegmentSum": Rule(_sum, OpPattern.REDUCTION, (0, 2), _refusal),
    "ScatterNd": Rule(_scatter_nd, OpPattern.REDUCTION, (0, 2), _scatter_nd_refusal),
    "ResourceScatterAdd": _SCATTER,
    "ResourceScatterSub": _SCATTER,
    "ResourceScatterUpdate": _SCATTER,
}
