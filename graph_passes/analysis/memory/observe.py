"""An observed step -> costs: what the probes of one step say about op times, workspace and what was alive before. What
later steps say corrects them, op by op."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from graph_passes.analysis.memory.simulate import Move, Padding, uncounted_under, usage_under
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import GraphError

FEW = 10  # part of the ops after which less may be in use than what counts as the least: buffers that were shared
LITTLE = 64  # part of the memory that an op is given more of after it found none


@dataclass(frozen=True)
class Sample:
    """What one probe read.

    Attributes:
        index: 2 * position for a probe right before an op, 2 * position + 1 for one right after it.
        seconds: the device's clock (the host's where the device is the CPU).
        bytes_in_use: what the allocator had handed out.
        peak_bytes: the most it had handed out since the previous probe.
    """

    index: int
    seconds: float
    bytes_in_use: int
    peak_bytes: int


@dataclass(frozen=True)
class Observation:
    """What an observed step shows of its ops, by op name.

    Attributes:
        seconds: run times.
        workspace: bytes in use beyond `base` and the modelled buffers, while the op runs. Negative where a buffer was
            shared that the model counts twice.
        base: what was in use beyond the modelled buffers after most ops.
        step_seconds: from the first to the last sample.
        peak: the most bytes in use.
        curve: (op, most bytes in use while it ran), in order.
        least_base: what was in use beyond the modelled buffers after all but a few ops; 0 where that is not known. It
            is below `base` where an allocator's chunks were larger than what lay in them.
    """

    seconds: dict[str, float]
    workspace: dict[str, int]
    base: int
    step_seconds: float
    peak: int
    curve: tuple[tuple[str, int], ...]
    least_base: int = 0


def observe(
    timeline: Timeline, moves: Sequence[Move], samples: Sequence[Sample], paddings: Sequence[Padding] = ()
) -> Observation:
    """Compare the samples of a step with its timeline.

    Args:
        timeline: the step, with any costs; its own workspace and base are not used. What it says the allocator does
            not count is added to what probes read.
        moves: the moves that the observed step made.
        samples: what its probes read, any order.
        paddings: what else the observed step allocated; each is there until the first probe from its position on.

    Raises:
        GraphError: the step wrote no samples.
    """
    samples = sorted(samples, key=lambda sample: sample.index)
    if not any(sample.index % 2 for sample in samples):
        raise GraphError("internal error in tfmem: the probes of the step wrote no samples; please report this")
    modelled = usage_under(timeline, moves) - timeline.workspace - timeline.base
    kept = modelled.copy()  # after the op: not what it was the last to read
    uncounted = uncounted_under(timeline, moves)
    unseen = uncounted.copy()
    for buffer in timeline.buffers:
        freed = 0 if buffer.fetched else buffer.nbytes
        kept[timeline.end(buffer)] -= freed
        unseen[timeline.end(buffer)] -= freed if buffer.allocation < timeline.counted else 0
    probed = [sample.index // 2 for sample in samples if sample.index % 2]
    for padding in paddings:
        modelled[probed[min(bisect_left(probed, padding.position), len(probed) - 1)]] += padding.nbytes
    seconds = dict.fromkeys((step.node for step in timeline.steps), 0.0)
    beyond: dict[int, int] = {}
    after: list[int] = []
    curve = []
    for previous, sample in zip([None, *samples[:-1]], samples, strict=True):
        position, is_after = divmod(sample.index, 2)
        if not is_after:
            continue  # its peak is that of the MemOps since the op before: what a release has not freed yet
        name = timeline.steps[position].node
        seconds[name] = max(0.0, sample.seconds - previous.seconds) if previous else 0.0
        most = sample.peak_bytes + int(uncounted[position])
        beyond[position] = most - int(modelled[position])
        after.append(sample.bytes_in_use + int(unseen[position]) - int(kept[position]))
        curve.append((name, most))

    base = median_low(after)
    # between probes nothing of size happens
    workspace = {step.node: beyond.get(place, base) - base for place, step in enumerate(timeline.steps)}
    return Observation(
        seconds,
        workspace,
        base,
        samples[-1].seconds - samples[0].seconds,
        max(sample.peak_bytes + int(uncounted[sample.index // 2]) for sample in samples),
        tuple(curve),
        sorted(after)[len(after) // FEW],
    )


def corrected(timeline: Timeline, seen: Observation) -> Timeline:
    """`timeline` by what one more step showed: where it took more memory than planned, and which ops ran faster.

    A budget that was missed thereby becomes a cut: the next plan has less room at the ops that took more, and as much
    as before at all others. Of an op's times the shortest counts, for whatever else a machine does adds to them.
    """
    steps = tuple(
        replace(
            step,
            seconds=min(filter(None, (step.seconds, seen.seconds.get(step.node, 0.0))), default=0.0),
            workspace=max(step.workspace, seen.workspace.get(step.node, 0) + seen.base - timeline.base),
        )
        for step in timeline.steps
    )
    return replace(timeline, steps=steps)


def least_taken(timeline: Timeline, seen: Observation) -> Timeline:
    """`timeline` as if every chunk that the allocator gave out were as large as what lies in it, and no op took
    workspace: by what was `seen` the least that the step may take."""
    base = seen.least_base or timeline.base
    steps = tuple(replace(step, workspace=min(0, step.workspace + timeline.base - base)) for step in timeline.steps)
    return replace(timeline, steps=steps, base=base)


def short_at(timeline: Timeline, op: str, usage: Sequence[int], limit: int) -> Timeline:
    """`timeline` after `op` found no memory in a step that was planned to use `usage` of `limit` bytes.

    By the plan there was room, so what was free lay in pieces: from now on the op counts as taking all of it, and a
    little more. So the next plan makes room at this op, and nowhere else.
    """
    steps = tuple(
        replace(step, workspace=step.workspace + max(0, limit - int(usage[place])) + limit // LITTLE)
        if step.node == op
        else step
        for place, step in enumerate(timeline.steps)
    )
    return replace(timeline, steps=steps)
