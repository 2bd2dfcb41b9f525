"""The report of a planned step, nothing measured yet."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.analysis.memory.simulate import uncounted, usage_under
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.apply import transfers
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason
from graph_passes.report import MOVED, RECOMPUTED, UNCHANGED_FITS, Report, TransferRecord
from graph_passes.step_picture import pictured


def describe(
    step: Step,
    timeline: Timeline,
    plan: OffloadPlan,
    policy: str,
    *,
    graph: str,
    device: str,
    notes: Sequence[str] = (),
) -> Report:
    """The report of a plan, nothing measured yet."""
    names = [item.node for item in timeline.steps]
    peaks = {plan.before.peak_at, plan.after.peak_at} if names else set()  # a step may have no op at all
    shown = sorted({*plan.ordered, *peaks})
    after = usage_under(timeline, plan.moves, plan.paddings)
    records = tuple(
        TransferRecord(
            tensor=str(tensor),
            bytes=timeline.buffers[move.buffer].nbytes,
            offload_after=RECOMPUTED if move.recomputed else names[move.copy_after],
            release_before=names[move.release],
            prefetch_before=names[move.prefetch],
            first_use=names[move.next],
        )
        for move, tensor in transfers(step.graph, timeline, plan)
    )
    moved = sum(record.bytes for record in records if record.offload_after != RECOMPUTED)
    uncounted_lists = tuple(
        str(buffer.tensor) for buffer in timeline.buffers if buffer.pinned_by == Reason.LIST_UNKNOWN()
    )
    unknown = [(str(buffer.tensor), buffer.pinned_by) for buffer in timeline.buffers if not buffer.nbytes]
    return Report(
        graph=graph,
        device=device,
        policy=policy,
        decision=MOVED if records else UNCHANGED_FITS,
        budget=plan.budget,
        passes=("offload",),
        peak_before=plan.before.peak,
        peak_predicted=plan.after.peak,
        peak_uncounted=uncounted(timeline, plan.moves, plan.paddings),
        bytes_out_predicted=moved,
        bytes_in_predicted=moved,
        stall_predicted_ns=round(plan.after.stall * 1e9),
        step_predicted_ns=round(plan.after.seconds * 1e9),
        verdict=plan.verdict,
        size_threshold=plan.size_threshold if records else None,
        transfers=records,
        curve_before=tuple((names[p], int(timeline.usage[p])) for p in shown),
        curve_after=tuple((names[p], int(after[p])) for p in shown),
        notes=(*notes, *([plan.verdict.note] if plan.verdict and plan.verdict.note else [])),
        not_moved=tuple((str(tensor), str(reason)) for tensor, reason in (*unknown, *plan.left_alone)),
        not_enforced=uncounted_lists,
        **pictured(timeline, plan.moves, plan.link, (plan.before.peak_at, plan.after.peak_at)),
    )
