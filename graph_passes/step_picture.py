"""When ops and copies of a planned step run, and what is in memory at its peak, for reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graph_passes.analysis.memory.simulate import Link, Move, by_position
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.report import Lane, Span

MOST_SPANS = 600  # of ops that a report keeps: the longest
MOST_ALIVE = 40  # tensors at the peak: the largest


@dataclass
class ReplayRecord:
    """What a replay of the plan writes down.

    Attributes:
        spans: in the order in which they end.
        waits: seconds that computation waits for each move.
    """

    spans: list[Span] = field(default_factory=list)
    waits: dict[int, float] = field(default_factory=dict)


def pictured(timeline: Timeline, moves: Sequence[Move], link: Link, peaks: tuple[int, int]) -> dict[str, Any]:
    """The fields of a report about times and about what is alive.

    Args:
        timeline: the step.
        moves: the plan's.
        link: bandwidths.
        peaks: positions of the peak without the plan, and with it.
    """
    if not timeline.steps:
        return {}
    found = schedule(timeline, moves, link)
    return {
        "stalls": slowest(timeline, moves, found),
        "spans": longest(found.spans),
        "alive_before": alive_at(timeline, peaks[0]),
        "alive_after": alive_at(timeline, peaks[1], moves),
        "scopes": tuple(dict.fromkeys(step.node.rpartition("/")[0] for step in timeline.steps if "/" in step.node)),
    }


def schedule(timeline: Timeline, moves: Sequence[Move], link: Link) -> ReplayRecord:
    """The times of `simulate`, op by op; it holds every op, where the planner's replay skips those between moves."""
    names = [str(timeline.buffers[move.buffer].tensor) for move in moves]
    copies = [(index, move) for index, move in enumerate(moves) if not move.recomputed]
    copies_out = by_position((move.copy_after, index) for index, move in copies)
    releases = by_position((move.release, index) for index, move in copies)
    prefetches = by_position((move.prefetch, index) for index, move in copies)
    arrivals = by_position((move.next, index) for index, move in copies)
    again = by_position((move.next, timeline.recomputing(move.gap)) for move in moves if move.recomputed)
    found = ReplayRecord()
    now = out_free = in_free = 0.0
    ends: dict[int, float] = {}

    def note(lane: Lane, name: str, begin: float, end: float) -> None:
        if end > begin:
            found.spans.append(Span(lane, name, round(begin * 1e9), round(end * 1e9)))

    def wait(index: int, until: float) -> float:
        if until <= now:
            return now
        note("wait", names[index], now, until)
        found.waits[index] = found.waits.get(index, 0.0) + until - now
        return until

    for position, step in enumerate(timeline.steps):
        for index in releases.get(position, ()):
            now = wait(index, ends.get(index, 0.0))
        for index in prefetches.get(position, ()):
            begin = max(now, in_free, ends.get(index, 0.0))
            in_free = begin + timeline.buffers[moves[index].buffer].nbytes / link.prefetch
            note("in", names[index], begin, in_free)
            ends[index] = in_free
        for index in arrivals.get(position, ()):
            now = wait(index, ends.get(index, 0.0))
        begin, now = now, now + step.seconds + sum(again.get(position, ()))
        note("compute", step.node, begin, now)
        for index in copies_out.get(position, ()):
            begin = max(now, out_free)
            out_free = ends[index] = begin + timeline.buffers[moves[index].buffer].nbytes / link.offload
            note("out", names[index], begin, out_free)
    return found


def longest(spans: Sequence[Span]) -> tuple[Span, ...]:
    """All copies and waits, and the longest ops, by their beginning."""
    ops = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.begin - span.end)
    others = [span for span in spans if span.lane != "compute"]
    return tuple(sorted([*ops[:MOST_SPANS], *others], key=lambda span: (span.begin, span.lane)))


def slowest(timeline: Timeline, moves: Sequence[Move], found: ReplayRecord) -> tuple[tuple[str, int], ...]:
    """(tensor, nanoseconds that computation waits for it), slowest first."""
    by_tensor: dict[str, float] = {}
    for index, seconds in found.waits.items():
        tensor = str(timeline.buffers[moves[index].buffer].tensor)
        by_tensor[tensor] = by_tensor.get(tensor, 0.0) + seconds
    return tuple(
        sorted(((name, round(s * 1e9)) for name, s in by_tensor.items()), key=lambda each: (-each[1], each[0]))
    )


def alive_at(timeline: Timeline, position: int, moves: Sequence[Move] = ()) -> tuple[tuple[str, int], ...]:
    """(tensor, bytes) in memory while the op at `position` runs under `moves`, largest first."""
    away = {move.buffer for move in moves if move.release <= position < move.prefetch}
    found = [
        (str(buffer.tensor), buffer.nbytes)
        for index, buffer in enumerate(timeline.buffers)
        if index not in away and buffer.start <= position <= timeline.end(buffer)
    ]
    return tuple(sorted(found, key=lambda each: (-each[1], each[0]))[:MOST_ALIVE])
