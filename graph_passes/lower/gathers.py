"""Ops that read where another tensor says."""

from __future__ import annotations

from custom_ops.expr.nodes import Index
from graph_passes.graph.ir import Graph, Node, integer
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.known_numbers import integers
from graph_passes.lower.program_writer import ProgramWriter, Steps, VariableValue
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal


def _gather(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """`params[..., indices, ...]`: the dimensions of `params`, one of them replaced by those of `indices`.

    The first dimensions of both may be the same, and are those of a batch.
    """
    params, indices = node.inputs[:2]
    batch = _batch(node, len(w.shapes[indices]))
    axis = (integers(w.graph, node.inputs[2]) or [0])[0] % len(w.shapes[params]) if node.op == "GatherV2" else 0
    end = axis + len(w.shapes[indices]) - batch
    index = yield indices, (*at[:batch], *at[axis:end])
    return (yield params, (*at[:axis], Index(nodes=(index,)), *at[end:]))


def _batch(node: Node, rank: int) -> int:
    """How many dimensions are a batch's; counted from the last of the indices' where negative."""
    found = integer(node.attrs.get("batch_dims", 0))
    return found + rank if found < 0 else found


def _gather_refusal(graph: Graph, node: Node) -> Refusal | None:
    known = node.op != "GatherV2" or integers(graph, node.inputs[2]) is not None
    return None if known else Reason.GATHER_AXIS()


def _gather_nd(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    params, indices = node.inputs
    *outer, depth = w.shapes[indices]
    places = []
    for place in range(depth):
        index = yield indices, (*at[: len(outer)], Index(place))
        places.append(Index(nodes=(index,)))
    return (yield params, (*places, *at[len(outer) :]))


def _gather_nd_refusal(graph: Graph, node: Node) -> Refusal | None:
    shape = graph.specs[node.inputs[1]].shape
    return None if shape and shape[-1] is not None else Reason.GATHER_INDICES()


def _resource_gather(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Rows of a variable; those of a batch are of the variable's own."""
    rank = len(w.shapes[node.inputs[1]])
    index = yield node.inputs[1], at[:rank]
    return (yield VariableValue(node.name, 0), (*at[: _batch(node, rank)], Index(nodes=(index,)), *at[rank:]))


def _one_hot(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    indices, _, on, off = node.inputs
    axis = integer(node.attrs.get("axis", -1)) % len(at)
    index = yield indices, (*at[:axis], *at[axis + 1 :])
    hot = w.apply("equal", index, w.position(at[axis], w.dtype(index)))
    high = yield on, ()
    low = yield off, ()
    return w.apply("select", hot, high, low)


RULES = {
    "Gather": Rule(_gather, OpPattern.GATHER, (0, 2), _gather_refusal),
    "GatherV2": Rule(_gather, OpPattern.GATHER, (0, 2), _gather_refusal),
    "GatherNd": Rule(_gather_nd, OpPattern.GATHER, refusal=_gather_nd_refusal),
    "ResourceGather": Rule(_resource_gather, OpPattern.GATHER, (1, 2), _gather_refusal, reads=(0,)),
    "OneHot": Rule(_one_hot, OpPattern.LAYOUT, (0, 4)),
}
