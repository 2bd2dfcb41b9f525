"""One lane of a step that runs on several devices: the part of its timeline that a device's memory depends on. Pure.

position         0    1    2    3    4    5          one order for the whole step
lane of GPU:0    op   op             op              its ops take time, its buffers count
lane of GPU:1              op   op        op         for GPU:0 these take no time; no move begins or ends there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline, turning_point
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph
from graph_passes.refusals import Reason


def lane_of(graph: Graph, timeline: Timeline, device: str, default: str) -> Timeline:
    """The timeline of one device.

    Args:
        graph: the step's graph.
        timeline: the whole step's, with positions in one order.
        device: the lane, as the graph's nodes name it.
        default: the device of ops that name none.

    Returns:
        A timeline with the same positions. Ops elsewhere take no time there, and are ordered by no control edge.
    """
    places = [graph[step.node].device for step in timeline.steps]
    here = [(place or default) == device for place in places]
    unordered = timeline.unordered | {position for position, place in enumerate(places) if place != device}
    steps = tuple(step if mine else ScheduledOp(step.node) for step, mine in zip(timeline.steps, here, strict=True))
    kept = [index for index, buffer in enumerate(timeline.buffers) if here[buffer.start]]
    index = {old: new for new, old in enumerate(kept)}
    buffers = tuple(_local(timeline.buffers[old], here, index) for old in kept)
    return replace(
        timeline,
        steps=steps,
        buffers=buffers,
        turn=_turn(timeline, buffers),
        unordered=frozenset(unordered),
    )


def _local(buffer: Buffer, here: Sequence[bool], index: dict[int, int]) -> Buffer:
    chains = tuple(
        replace(chain, sources=tuple(index[source] for source in chain.sources))
        if all(here[position] for position in chain.ops) and all(source in index for source in chain.sources)
        else Chain(chain.since)
        for chain in buffer.chains
    )
    buffer = replace(buffer, chains=chains)
    if not all(here[use] for use in (*buffer.uses, *buffer.written)):
        # When another lane reads it depends on that lane: it counts until the step ends.
        return replace(buffer, pinned_by=buffer.pinned_by or Reason.OTHER_DEVICE(), fetched=True)
    return buffer


def _turn(timeline: Timeline, buffers: Sequence[Buffer]) -> int:
    pauses = [
        pause
        for buffer in buffers
        if buffer.pinned_by != Reason.SMALL()
        for pause in pairwise((buffer.start, *(use for use in buffer.uses if use not in timeline.updates)))
        if pause[1] - pause[0] > 1
    ]
    return turning_point(pauses, len(timeline.steps))


def held_by(graph: Graph, device: str, default: str) -> int:
    """Bytes of the variables, constants and inputs that ops of a lane read: what its device holds before the step."""
    found: dict[object, int] = {}
    for node in graph:
        if node.op not in ops.EXTERNAL or node.op == "VarHandleOp":
            continue
        for tensor in graph.tensors(node):
            places = {graph[use.node].device or node.device or default for use in graph.uses(tensor)}
            if device in (places or {node.device or default}):
                found[node.inputs[0] if node.op == "ReadVariableOp" else tensor] = graph.nbytes(tensor)
    return sum(found.values())
