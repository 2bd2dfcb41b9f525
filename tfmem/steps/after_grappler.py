"""Runs Grappler, and then the passes of `AFTER_GRAPPLER`, on a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import tensorflow as tf

from custom_ops.background import go_on
from graph_passes.analysis.op_pattern import OpPattern
from graph_passes.decision import Fusion, FusionWhy
from graph_passes.graph.graph_source import Source
from graph_passes.pass_infra import PassOutcome
from graph_passes.passes.fuse.partition.regions import CALLS
from graph_passes.passes.fuse.plan import FusionPlan, Needs, fault
from graph_passes.pipeline import PassPhase, run_passes
from graph_passes.report import STITCHED, Report
from tfmem.capture.branches import with_selects
from tfmem.capture.captured import Captured, every_node
from tfmem.capture.captured_source import CapturedSource
from tfmem.capture.grappler import run_grappler
from tfmem.capture.kept_graphs import KeptGraphs
from tfmem.capture.known_sizes import with_known_sizes
from tfmem.capture.unique_rows import with_all_rows
from tfmem.devices import conditions, cpu_instructions
from tfmem.kernels.fusion_needs import after_grappler, before_regions, fusion_needs, regions, stitching
from tfmem.kernels.fusion_tuning import FusionKernels
from tfmem.options import tensorflow_flags
from tfmem.runtime.collector import set_aside
from tfmem.runtime.engine import Engine
from tfmem.runtime.notices import REPORT_IT, SEE
from tfmem.steps.known_plans import KnownPlan, key_of, plans

LEAVE_OUT = "to run it so without this warning, leave 'fusion' out of passes"
# TF32's kernels of the first three want channels last. Depthwise ones take longer so, by less than the others win.
_CONVOLUTIONS = frozenset(
    f"{op}{part}" for op in ("Conv2D", "DepthwiseConv2dNative") for part in ("", "BackpropInput", "BackpropFilter")
)


def grappled(captured: Captured, engine: Engine) -> Captured:
    """`captured` after Grappler."""
    settings = engine.settings
    portable = settings.stitches and bool(settings.options.fusion.architectures)
    return _run(captured, engine, nested=settings.edits_bodies, portable=portable)


def grappled_to_stitch(captured: Captured, engine: Engine) -> Captured | None:
    """`captured` after Grappler in the layout that suits what is stitched; None where that is `grappled`'s.

    TF32's convolutions want channels last. Grappler asks for channels first all the same, as its rule is from before
    TF32, and cuDNN then changes the layout of each convolution's operands and result: of ResNet-50's step on an H100 a
    fifth of all kernels' time. TensorFlow's own batch normalization is slow in channels last, but it is stitched.
    """
    if engine.settings.target.precision != "tf32":
        return None
    found = [node for node in every_node(captured.graph_def) if "Conv" in node.op and "data_format" in node.attr]
    float32 = tf.float32.as_datatype_enum
    if not found or not all(node.op in _CONVOLUTIONS and node.attr["T"].type == float32 for node in found):
        return None
    return _run(captured, engine, nested=engine.settings.stitches, keep_layout=True)


def _run(captured: Captured, engine: Engine, **how: bool) -> Captured:
    target = engine.settings.target
    facts = {**conditions(target), "instructions": cpu_instructions(), "environment": tensorflow_flags()}
    kept = KeptGraphs(engine.settings.options.cache_directory, facts)
    return run_grappler(captured, device=target.kind, kept=kept, **how)


def without_conditions(captured: Captured, engine: Engine) -> Captured:
    """`captured` with both branches of conditions in their place, where what runs is timed; regions hold none."""
    options, target = engine.settings.options, engine.settings.target
    if not options.observe or options.fusion.tune == "off":
        return captured
    found = with_selects(captured)
    return with_all_rows(with_known_sizes(found)) if target.is_gpu else found


class BeforeRegions:
    """What Grappler left. The passes before `fuse` run on it once, however often its regions are planned.

    Attributes:
        optimized: what Grappler left.
        engine: device and options.
        roots: names of ops of which a caller may run some without the others; None: all of the graph runs.
    """

    def __init__(self, optimized: Captured, engine: Engine, roots: Collection[str] | None = None) -> None:
        self.optimized = optimized
        self.engine = engine
        self.roots = roots
        self._source: CapturedSource | None = None
        self._done: Mapping[str, PassOutcome[Any]] = {}

    def source(self, needs: Needs) -> tuple[CapturedSource, Mapping[str, PassOutcome[Any]]]:
        """A graph of which to plan regions and to edit, and what came of the passes before them.

        Args:
            needs: of the fusion pass. What comes before it looks at nothing that differs from plan to plan.
        """
        settings = self.engine.settings
        if self._source is None:
            source = CapturedSource(self.optimized, settings.feed_shapes)
            self._done = run_passes(PassPhase.AFTER_GRAPPLER, settings.passes, source, before_regions(needs))
            source.read(functions=False)
            self._source = source
        return self._source.fork(), self._done


def stitched(
    before: BeforeRegions,
    mirrored: bool = False,
    segments: Mapping[str, int] | None = None,
    kernels: FusionKernels | None = None,
    calls: bool = True,
) -> tuple[Captured, FusionPlan]:
    """What Grappler left, after the passes of `AFTER_GRAPPLER`, and what they did.

    Args:
        before: what Grappler left.
        mirrored: whether variables of several devices have to stay equal; see `Needs`.
        segments: of the nodes, where memory is planned afterwards; see `Needs`.
        kernels: makes kernels that are timed while the plan runs; see `fusion_needs`.
        calls: whether regions may hold products, and other calls.
    """
    engine = before.engine
    needs = fusion_needs(
        before.optimized.feeds,
        engine.settings.target,
        engine.settings.options,
        before.roots,
        quiet=engine.quiet,
        kernels=kernels,
    )
    if segments is not None:
        needs = replace(needs, segments=segments, kinds=frozenset(needs.kinds) - {OpPattern.READ})
    if not calls:
        needs = replace(needs, kinds=frozenset(needs.kinds) - CALLS)
    return _known_or_new(before, replace(needs, mirrored=mirrored))


def _known_or_new(before: BeforeRegions, needs: Needs) -> tuple[Captured, FusionPlan]:
    """What an earlier process planned; else a new plan, which later ones find."""
    optimized, engine = before.optimized, before.engine
    known = plans(engine.settings.options.cache_directory if needs.measure is None else "")
    key = key_of(known, optimized, engine, needs) if known.cache is not None else ""
    found = known.find(key)
    if found is not None:
        with suppress(Exception):  # whatever a file holds, a new plan takes its place
            return found.follow(optimized, engine, needs)
    go_on()
    with set_aside():
        source, ran = before.source(needs)
        done = stitch(source, engine, needs, ran)
    with suppress(TypeError):  # a reason is about something that no file holds
        if (planned := KnownPlan.of(source.captured, done)) is not None:
            known.keep(key, planned)
    return source.captured, done


def stitch(
    source: Source, engine: Engine, needs: Needs, ran: Mapping[str, PassOutcome[Any]] | None = None
) -> FusionPlan:
    """Edit `source`, and the functions that it calls, by the passes of `AFTER_GRAPPLER`; what these did.

    Warns of bugs in tfmem.

    Args:
        source: the graph.
        engine: device and options.
        needs: of the fusion pass.
        ran: what came of the passes before it on `source` itself; None: they have not run.
    """
    done = _stitched(source, engine, needs, ran)
    try:
        called = source.bodies() if engine.settings.stitches else {}
    except Exception as error:  # after any error, functions stay unchanged
        called = {}
        done = done.joined(FusionPlan(kept=(fault("every region of a called function", (), error),)))
    planned: dict[Hashable, tuple[Source, FusionPlan]] = {}
    for caller, body in called.items():
        go_on()
        inside = _as_before(body, planned)
        if inside is None:
            own = replace(needs, fed=(), roots=None, segments=None if needs.segments is None else {})
            inside = _stitched(body, engine, own)
            planned[body.structure] = body, inside
        done = done.joined(inside.within(caller))
    faults = [region for region in done.kept if region.warned]
    if faults:
        more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
        what = f"{faults[0].name} stays unchanged: {faults[0].reason}{more}"
        cure = REPORT_IT if faults[0].traceback else f"to fuse nothing, leave 'fusion' out of passes; {SEE}"
        engine.notices.warn("fault", what, cure)
    return done


def _as_before(body: Source, planned: Mapping[Hashable, tuple[Source, FusionPlan]]) -> FusionPlan | None:
    """What became of a body that is equal to one before it; None if none is."""
    if body.structure is None or body.structure not in planned:
        return None
    other, done = planned[body.structure]
    try:
        return done.named(body.follow(other))
    except Exception:  # after any error, the body gets a separate plan
        return None


def _stitched(
    source: Source, engine: Engine, needs: Needs, ran: Mapping[str, PassOutcome[Any]] | None = None
) -> FusionPlan:
    handed = after_grappler(needs) if ran is None else regions(needs)
    done = run_passes(PassPhase.AFTER_GRAPPLER, engine.settings.passes, source, handed)
    return stitching({**(ran or {}), **done})


def with_regions(report: Report, done: FusionPlan, why: str) -> Report:
    """`report` with the stitched regions, and why they run or not."""
    kept = [(name, str(region.reason)) for region in done.kept for name in region.members]
    images = [program.image for region in done.regions for program in region.programs]
    kinds = dict.fromkeys(f"{image.kind} {image.arch / 10}" for image in images)
    exported = f"kernels of fused regions for GPUs: {', '.join(kinds)}" if len(kinds) > 1 else ""
    tracebacks = [region.traceback for region in done.kept]
    return replace(
        report,
        regions=tuple(region.record for region in done.regions),
        not_stitched=(*((name, str(reason)) for name, reason in done.reasons.items()), *kept),
        fusion=why,
        notes=(*report.notes, *filter(None, [exported, *tracebacks])),
    )


def unobserved(report: Report, done: FusionPlan) -> Report:
    """`report` of a graph that another program runs, so that tfmem cannot time its regions."""
    if not done.regions:
        return replace(with_regions(report, done, FusionWhy.NOTHING), fusion_state=Fusion.LEFT)
    return with_regions(with_decision(report), done, FusionWhy.BY_MODEL)


def unstitched(report: Report, engine: Engine, reason: FusionWhy) -> Report:
    """`report` of a step that is not stitched; warns a user who asked for fusion.

    Args:
        report: of the step.
        engine: its options, and what the user is told.
        reason: why.
    """
    if "fusion" in (engine.settings.options.passes or ()):
        told = f"{report.graph} was to be stitched, but is {reason}"
        engine.notices.warn("fusion", told, f"{reason.cure or LEAVE_OUT}; {SEE}")
    notes = (*report.notes, *([f"to have it stitched, {reason.cure}"] if reason.cure else []))
    return replace(with_fusion(report, reason), notes=notes)


def with_fusion(report: Report, why: FusionWhy) -> Report:
    """`report` with the reason why the step runs stitched or not."""
    return replace(report, fusion=why, fusion_state=why.state)


def with_decision(report: Report) -> Report:
    """`report` of a step that runs stitched."""
    report = replace(report, fusion_state=Fusion.STITCHED)
    return replace(report, decision=STITCHED) if report.decision.is_unchanged else report
