"""Inputs of the fusion pass: the device as its cost model sees it, and how attributes are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from custom_ops.fusion.search.kernel_model import h200
from custom_ops.jit.compilers import Compilers
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.device import Quiet
from graph_passes.analysis.cost.device_costs import kernel_device, load
from graph_passes.analysis.device_support import CUDA
from graph_passes.analysis.op_pattern import OpPattern
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph
from graph_passes.pass_infra import NeedsOf, PassOutcome
from graph_passes.passes.fuse.partition.partition import ON_CPU, ON_GPU
from graph_passes.passes.fuse.plan import FusionPlan, Needs, fault
from graph_passes.passes.merge import plan as merge
from graph_passes.passes.prepare import plan as prepare
from graph_passes.pipeline import FUSE, MERGE, PREPARE
from tfmem.capture.captured import op_name
from tfmem.devices import Target
from tfmem.kernels.fusion_programs import absent_gpu_programs, gpu_programs, is_timed
from tfmem.kernels.fusion_times import PatternTimer
from tfmem.kernels.fusion_tuning import FusionKernels
from tfmem.options import Options

LOCAL = "/job:localhost/replica:0/task:0"
HOME = f"{LOCAL}/device:CPU:0"
ABSENT = "h200"  # the profile that regions are planned by for GPUs that are not here


def fusion_needs(
    feeds: Collection[str],
    target: Target,
    options: Options,
    roots: Collection[str] | None = None,
    in_place: bool = False,
    quiet: Quiet | None = None,
    kernels: FusionKernels | None = None,
) -> Needs:
    """What the fusion pass needs to plan a graph on a device.

    Args:
        feeds: tensors that a caller gives.
        target: the device.
        options: of the pass, and where kernels are cached.
        roots: see `Needs`.
        in_place: the graph is edited in place. Its users may still run the old ops, so only old ops read and write
            variables.
        quiet: keeps steps from running while a kernel is timed.
        kernels: makes kernels that are timed later, while the plan runs, or never: patterns are chosen by model. None:
            they are timed now, if anything may be.
    """
    fed = tuple(map(op_name, feeds))
    kept = {OpPattern.READ, OpPattern.UPDATE} if in_place else set()
    if not target.is_gpu and options.fusion.architectures:
        absent = Target("/device:GPU:0", "a GPU that is not here", 80 << 30, load(ABSENT))
        programs = absent_gpu_programs(options, h200().processors, Compilers())
        home, kinds = LOCAL + absent.name, ON_GPU - kept
        device = kernel_device(absent.profile, absent.description)
        return Needs(
            device,
            home,
            serde.attributes,
            kinds,
            fed,
            roots,
            CUDA,
            programs,
            timed=is_timed(options),
            at_once=usable_cores(),
        )
    device = kernel_device(target.profile, target.description)
    if not target.is_gpu:
        return Needs(device, HOME, serde.attributes, ON_CPU - kept, fed, roots)
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    compilers = kernels.compilers if kernels else Compilers()
    times = PatternTimer(target, options, tf32, compilers, quiet) if is_timed(options) else None
    programs = kernels.programs if kernels else gpu_programs(target, options, compilers, quiet)
    return Needs(
        device,
        LOCAL + target.name,
        serde.attributes,
        ON_GPU - kept,
        fed,
        roots,
        CUDA,
        programs,
        times.of if times and not kernels else None,
        timed=is_timed(options),
        beside=times.beside if times else None,
        at_once=1 if times and not kernels else usable_cores(),  # no other kernel compiles while one is timed
    )


def after_grappler(needs: Needs) -> dict[str, NeedsOf]:
    """Inputs of the passes after Grappler, for `run_passes`; the fusion pass gets `needs`."""
    return {**before_regions(needs), **regions(needs)}


def regions(needs: Needs) -> dict[str, NeedsOf]:
    """Inputs of the fusion pass alone."""
    return {FUSE.name: lambda _: needs}


def before_regions(needs: Needs) -> dict[str, NeedsOf]:
    """Inputs of the passes between Grappler and the fusion pass, which are equal for all segments of a graph."""
    whole = needs.roots is None
    handed: dict[str, NeedsOf] = {PREPARE.name: lambda _: prepare.Needs(whole)}
    if needs.beside is not None:  # else the graph is not read for it
        handed[MERGE.name] = lambda _: merge.Needs(needs.device, needs.beside, whole)
    return handed


def sinks(graph: Graph) -> list[str]:
    """Nodes that no other node reads or waits for, so that users may run them."""
    return [node.name for node in graph if not any(graph.successors(node))]


def stitching(done: Mapping[str, PassOutcome[Any]]) -> FusionPlan:
    """What the fusion pass did; nothing where it did not run. Faults in what comes before it are in it, too."""
    outcome: PassOutcome[FusionPlan] | None = done.get(FUSE.name)
    if outcome is None:
        return FusionPlan()
    before: list[PassOutcome[Any]] = [done.get(name, PassOutcome()) for name in (PREPARE.name, MERGE.name)]
    errors = [error for each in before for error in (*each.errors.values(), each.failed) if error is not None]
    unprepared = tuple(fault("what comes before regions", (), error) for error in errors)
    if outcome.plan is None:
        failed = outcome.failed or AssertionError("a pass that made no plan failed")
        return FusionPlan(kept=(*unprepared, fault("every region", (), failed)))
    return FusionPlan(kept=unprepared).joined(outcome.plan.without(outcome.errors))
