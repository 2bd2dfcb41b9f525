"""A step in which tensors move, with regions: both within one budget, or the budgets of all devices of replicas.

    the step without regions, its moves settled      its predicted peak keeps within the budget; it runs meanwhile
    regions of segments of its schedule              `graph_passes/passes/fuse/schedule_segments.py`
    moves, planned again on the schedule of regions  each region is one op, so that no move can lie inside of it
    both run, measured, until memory is settled      by a separate step: it passes through the phases of any other
    both variants run in turn                        the faster one stays, of those within the budget

Regions change what moves: what is handed from kernel to kernel is no buffer, and what a region reads stays until it
ends. So moves that were planned for the step without regions do not serve the step with them.

Replicas that keep equal variables have regions that are equal on all devices where these follow a collective
(`graph_passes/passes/fuse/equal_kernels.py`), and moves of each device. Workers of other processes make each choice of
these together (`tfmem.steps.agreed_fusion`), between the same two calls. Where tensors move on one of them, all divide
the step, those with room for all of it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any

from custom_ops.background import go_on
from graph_passes.decision import Decision, FusionWhy, Missed, Xla
from graph_passes.device_report import DeviceReport, Peaks
from graph_passes.errors import BudgetError
from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.passes.fuse.schedule_segments import SEGMENTATIONS, RegionBounds, segments, with_regions
from graph_passes.report import Report, measured
from graph_passes.verdict import rated_by
from tfmem.capture.concrete_function import with_places
from tfmem.devices import conditions, is_deterministic
from tfmem.runtime.engine import Engine
from tfmem.runtime.out_of_memory import lacks_memory
from tfmem.steps import after_grappler
from tfmem.steps.after_grappler import BeforeRegions
from tfmem.steps.agreed_fusion import FusionFinding, Offer, abandon, found_together, offered
from tfmem.steps.fused_replicas import against_edited, untimed
from tfmem.steps.fuser import Fuser, shared
from tfmem.steps.phases import Event, Transition
from tfmem.steps.replicas import usual_replicas
from tfmem.steps.rooms import Predicted, StepRoom
from tfmem.steps.states import Comparing, Composing, StepState
from tfmem.steps.trace import Trace
from tfmem.steps.variants import Composition, Found, Variants
from tfmem.timing.ab_timing import Times, Turns
from tfmem.timing.choices import key_of

if TYPE_CHECKING:
    from tfmem.steps.managed_step import ManagedStep

MOST = 3  # segmentations that may run
GOOD_ENOUGH = 1.02  # times the ops' own run times: smaller regions have nothing left to gain


@dataclass(frozen=True)
class _Candidate:
    """Regions of the step, and what it takes with the moves that the cost model plans among them.

    Attributes:
        trace: the step with its regions.
        done: what they are.
        predicted: what the step takes; of several workers that of the slowest.
        kernels: a digest of those that have to be equal on all workers.
    """

    trace: Trace
    done: FusionPlan
    predicted: Predicted
    kernels: str = ""

    @property
    def members(self) -> set[tuple[str, ...]]:
        """The members of each region."""
        return {region.schedule.members for region in self.done.regions}


def memory_engine(engine: Engine) -> Engine:
    """`engine` for a step that has its regions, and whose memory alone is planned: always by what was measured, since
    what calls take within a region is known by that alone."""
    options, notices = replace(engine.settings.options, passes=("offload",)), engine.notices.of_variant()
    settings = replace(engine.settings, options=options, passes=("offload",), surely_fits=0.0)
    return replace(engine, settings=settings, notices=notices)


def composed(fuser: Fuser, room: StepRoom, report: Report) -> Found:
    """Regions that leave room for a plan: those that are predicted to be the fastest, and others in their stead.

    Segmentations are planned until nothing is left to gain, and once more: the measured step may need more memory than
    the predicted one.

    Args:
        fuser: the step, whose moves are settled.
        room: the memory of its devices.
        report: of the step without regions.
    """
    found: list[_Candidate] = []
    why: str = FusionWhy.NO_ROOM
    segmented, good = _Segmented(fuser, room), False
    nothing: FusionPlan | None = None
    for segmentation in SEGMENTATIONS:
        go_on()
        candidate, new = segmented.by(segmentation)
        if not new and fuser.board is None:
            continue
        candidate, offer = _of_all(fuser, candidate, new)
        if offer.last:
            return Found(report, why=offer.why)
        if isinstance(candidate, str):
            why = candidate if why == FusionWhy.NO_ROOM else why
            continue
        if not offer.new:
            continue
        if not offer.regions:
            nothing = candidate.done
            continue
        found.append(candidate)
        if good or len(found) == MOST:
            break
        good = candidate.predicted.moved <= GOOD_ENOUGH * candidate.predicted.unlimited
    if not found and nothing is not None:
        return Found(after_grappler.with_regions(report, nothing, report.fusion))
    if not found:
        return Found(report, why=why)
    found.sort(key=lambda candidate: candidate.predicted.moved)
    return Found(report, composed=tuple(Composition(each.trace, each.done) for each in found))


class _Segmented:
    """The candidates of a step by segmentation, of which none is planned twice."""

    def __init__(self, fuser: Fuser, room: StepRoom) -> None:
        self._fuser, self._room = fuser, room
        self._known: list[tuple[object, _Candidate | str]] = []
        given, engine = fuser.trace.to_stitch(), fuser.engine
        if fuser.mirrored:
            given, engine = with_places(given, fuser.trace.concrete), untimed(engine)
        self._before = BeforeRegions(given, engine)
        self._kernels = replace(fuser, engine=engine).kernels()  # by the cost model: of several plans one runs

    def by(self, bounds: RegionBounds) -> tuple[_Candidate | str, bool]:
        """The candidate of a segmentation, or why there is none; and whether no other one had the same regions."""
        step = self._fuser.trace.step
        most = None if bounds.share is None else self._room.least // bounds.share
        within = segments(step.graph, step.order, most, lanes=bool(step.shared))
        for key, before in self._known:
            if key == (within, bounds.calls):
                return before, False
        found = self._candidate(within, bounds.calls)
        others = [each for _, each in self._known if isinstance(each, _Candidate)]
        self._known.append(((within, bounds.calls), found))
        return found, isinstance(found, str) or all(found.members != each.members for each in others)

    def _candidate(self, within: Mapping[str, int], calls: bool) -> _Candidate | str:
        """Regions of these segments, with the moves that they need; why there are none if no plan can run."""
        fuser, mirrored = self._fuser, self._fuser.mirrored
        captured, done = after_grappler.stitched(
            self._before, mirrored=mirrored, segments=within, kernels=self._kernels, calls=calls
        )
        if mirrored and (why := against_edited(captured, done, fuser.engine.settings.feed_shapes)):
            return why
        members = {region.name: region.schedule.members for region in done.regions}
        captured = replace(captured, creation_order=with_regions(fuser.trace.step.order, members))
        trace = fuser.trace.variant(captured, memory_engine(fuser.engine))
        trace.read()
        try:
            return _Candidate(trace, done, self._room.predicted(trace, fuser.engine), fuser.digest(captured, done))
        except BudgetError:
            return FusionWhy.NO_ROOM


def _of_all(fuser: Fuser, own: _Candidate | str, new: bool) -> tuple[_Candidate | str, Offer]:
    """The candidate that all workers run, with what it takes on the slowest of them; else why there is none."""
    if isinstance(own, str):
        offer = Offer(own, new=new)
    else:
        offer = Offer("", own.kernels, len(own.done.regions), new, False, *own.predicted)
    if fuser.board is not None:
        offer = offered(fuser.board, fuser.engine, fuser.trace, offer)
    if isinstance(own, str) or offer.why:
        return offer.why, offer
    return replace(own, predicted=Predicted(offer.moved, offer.unlimited)), offer


def prepared(state: Composing) -> Trace:
    """The trace of the regions that run next. Raises what making it raises, once the other workers know."""
    fuser, trace = state.fuser, state.compositions[0].trace
    try:
        return trace.prepared()
    except Exception:
        if fuser.board is not None:
            abandon(fuser.board, fuser.engine, fuser.trace, FusionWhy.FAILED)
        raise


def called(
    state: Composing,
    step: ManagedStep,
    call: Callable[[], Any],
    run: Callable[[Any], Any],
    take: Callable[[Transition[StepState]], StepState],
) -> Any:
    """What a call gives while the step with its regions runs under the budget.

    Args:
        state: with the step.
        step: that of `state`.
        call: runs it.
        run: runs another function with the same arguments.
        take: takes what follows.

    Raises:
        What the user's program raises, and what regions raise in a call that may have written variables.
    """
    try:
        result = call()
    except BudgetError as error:  # no variable was written
        return run(take(gave_up(state, error)).function)
    except Exception as error:
        if lacks_memory(error):  # the next call runs without these regions
            take(gave_up(state, error))
        elif _is_of_region(state, error):
            if step.wrote_nothing and state.fuser.board is None:
                result = run(state.function)  # where the program is at fault, this raises, and regions stay
                take(_broke(state, error))
                return result
            take(_broke(state, error))
        raise
    if step.settled:
        take(decided(state, step.report, step.running))
    return result


def _is_of_region(state: Composing, error: Exception) -> bool:
    """Whether TensorFlow says that the op of a region failed."""
    names = (region.name for region in state.compositions[0].done.regions)
    return any(f"{{{{node {name}}}}}" in str(error) for name in names)


def _broke(state: Composing, error: Exception) -> Transition[StepState]:
    return state.fuser.failed(state, error, "running regions within the budget", FusionWhy.FAILED)


def gave_up(state: Composing, error: Exception) -> Transition[StepState]:
    """What follows where no plan with these regions could be run: other regions, or the step without regions."""
    if others := state.compositions[1:]:
        return Transition(Event.RAN, replace(state, compositions=others, step=None))
    report = after_grappler.unstitched(state.report, state.fuser.engine, FusionWhy.NO_ROOM)
    report = replace(report, notes=(*report.notes, f"stitched: {error}"))
    return state.fuser.settled(replace(state, report=report), FusionWhy.NO_ROOM)


def decided(state: Composing, report: Report, function: Any) -> Transition[StepState]:
    """What follows once the memory of the step with regions is settled. What is called `given` is without regions.

    Args:
        state: with the step.
        report: of the step with regions.
        function: that runs it.
    """
    fuser, options, given = state.fuser, state.fuser.engine.settings.options, state.report
    failed = str(FusionWhy.FAILED) if report.decision is Decision.FAILED else ""
    seconds = [1e-9 * (each.step_predicted_ns or 0) for each in (given, report)]
    own = FusionFinding(failed, total_over(given), total_over(report), *seconds)
    found = found_together(fuser.board, fuser.engine, fuser.trace, own)
    if found.failed:
        notes = tuple(dict.fromkeys((*given.notes, *report.notes)))
        return fuser.settled(replace(state, report=replace(given, notes=notes)), found.failed)
    if excess := found.excess:
        if others := state.compositions[1:]:  # smaller regions may leave more room, and larger ones need fewer moves
            return Transition(Event.RAN, replace(state, compositions=others, step=None))
        return fuser.settled(state, f"left unchanged: stitched it would take {excess:,} bytes more than the budget")
    others = state.compositions[1:]
    instead = replace(state, compositions=others, step=None) if others else None
    undecided = after_grappler.with_fusion(given, FusionWhy.UNDECIDED)
    with_both = after_grappler.with_regions(undecided, state.compositions[0].done, undecided.fusion)
    state = replace(state, report=with_both)
    variants = _variants(state, report, function)
    saves = found.seconds <= found.given
    for holds, why in (
        (options.fusion.tune == "off", FusionWhy.UNTUNED),
        (is_deterministic(), FusionWhy.DETERMINISTIC),
        (not options.observe, FusionWhy.BY_MODEL),
    ):
        if holds and saves:
            return fuser.stitched(state, variants, FusionWhy.REPLICAS if fuser.mirrored else why)
        if holds:
            return fuser.settled(state, FusionWhy.SLOWER)
    if fuser.board is None and (times := fuser.known.find(variants.key)) is not None:
        return fuser.chosen(state, variants, times, "; known from the cache", Event.STAYS)
    return Transition(
        Event.TIMED, Comparing(**shared(state), fuser=fuser, variants=variants, turns=Turns(), instead=instead)
    )


def _variants(state: Composing, report: Report, function: Any) -> Variants:
    given, engine = state.report, state.fuser.engine
    unmoved = report.decision.is_unchanged
    faults = (region.traceback for region in state.compositions[0].done.kept if region.traceback)
    report = replace(
        report,
        verdict=rated_by(report.verdict, given.verdict),
        notes=(*report.notes, *faults),
        passes=engine.settings.passes,
        peak_before=given.peak_before,
        curve_before=given.curve_before,
        devices=tuple(_as_before(found, given.devices) for found in report.devices),
        regions=given.regions,
        not_stitched=given.not_stitched,
        not_replaced=given.not_replaced,
        jit_compile=Xla.STITCHED if unmoved and given.jit_compile else given.jit_compile,
    )
    moved = [(each.tensor, each.release_before, each.prefetch_before) for each in (*given.transfers, *report.transfers)]
    budgets = [found.budget for found in report.devices] or engine.settings.budget
    facts = {**conditions(engine.settings.target), "budget": budgets, "moved": moved}
    key = key_of(state.fuser.known, state.compositions[0].trace.optimized().graph_def, facts)
    return Variants(function, state.function, function, "", key, report=report, kept=(state.step,))


def _as_before(found: DeviceReport, given: Sequence[DeviceReport]) -> DeviceReport:
    """`found` with the peak of the unmodified step."""
    before = next((each.peak_before for each in given if each.device == found.device), found.peak_before)
    return replace(found, peak_before=before)


def chosen(state: Comparing, times: Times) -> Transition[StepState]:
    """The faster of two steps under a budget, of those whose calls in turn kept within it.

    What ran before decides which chunks an allocator has, and so what it counts.
    """
    fuser, variants = state.fuser, state.variants
    given, report = (
        _watched(each, [peak for stitched, peak in state.peaks if stitched is with_regions])
        for each, with_regions in ((state.report, False), (variants.report or state.report, True))
    )
    state, variants = replace(state, report=given), replace(variants, report=report)
    own = FusionFinding("", total_over(given), total_over(report), times.given, times.stitched, times.noise)
    found = found_together(fuser.board, fuser.engine, fuser.trace, own)
    times = Times(found.given, found.seconds, noise=found.noise)
    if not found.failed:
        fuser.known.keep(variants.key, times)
    if found.failed:
        transition = fuser.settled(state, found.failed, Event.CLEAR)
    elif excess := found.excess:
        if state.instead is not None:
            return Transition(Event.COMPOSED, state.instead)
        why = f"left unchanged: stitched it takes {excess:,} bytes more than the budget"
        transition = fuser.settled(state, why, Event.CLEAR)
    elif excess := found.less:
        why = f"stitched: without regions it takes {excess:,} bytes more than the budget"
        transition = fuser.stitched(state, variants, why, Event.CLEAR)
    else:
        transition = fuser.chosen(state, variants, times, ", in turn", Event.CLEAR)
    fuser.engine.notices.warn_of_losses(transition.state.report)
    return transition


def _watched(report: Report, peaks: Sequence[tuple[int, ...]]) -> Report:
    """`report` with the usual peak of later calls. A single one may have met what the other version left."""
    if not peaks:
        return report
    if report.devices:
        return usual_replicas(report, peaks)
    taken = [peak for (peak,) in peaks]
    usual, most = (size + report.peak_uncounted for size in (median_low(taken), max(taken)))
    over = most - (report.budget or most)
    missed = Missed.of(f" by {over:,} bytes, in calls in turn with the other version") if over > 0 else None
    if usual > (report.peak_measured or 0):
        report = measured(report, usual)
    if missed is None:
        return report
    kept = missed if report.budget is not None and usual > report.budget else missed.once
    return replace(report, notes=(*report.notes, kept))


def more_over(given: Report, report: Report) -> int:
    """Bytes by which another version of a step is over the budget, unless the given one is over it by more; else 0."""
    return FusionFinding(given_over=total_over(given), over=total_over(report)).excess


def total_over(report: Report) -> int:
    """Bytes by which a step is over its budget; where there are several devices, over their budgets together."""
    return sum(map(_over, report.devices or (report,)))


def _over(found: Peaks) -> int:
    peak = found.peak_predicted if found.peak_measured is None else found.peak_measured
    return 0 if found.budget is None else max(0, peak - found.budget)
