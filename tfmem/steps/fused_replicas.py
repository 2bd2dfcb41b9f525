"""Fusion of a step of several replicas: when it is left alone, and what an edited step must not do."""

from __future__ import annotations

from dataclasses import replace

from graph_passes.analysis.peers import meetings, waits_for_itself
from graph_passes.decision import FusionWhy
from graph_passes.errors import GraphError
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph
from graph_passes.passes.fuse.plan import FusionPlan
from tfmem.capture.build import FeedShapes, shaped_graph
from tfmem.capture.captured import Captured
from tfmem.runtime.engine import Engine
from tfmem.steps.replicas import waits_for_others

_SHOWN = 6  # nodes of a cycle that a report names


def untimed(engine: Engine) -> Engine:
    """`engine`, under which the cost model alone chooses kernels, so that they are equal on all replicas."""
    options = engine.settings.options
    options = replace(options, fusion=replace(options.fusion, tune="off"))
    return engine.under(replace(engine.settings, options=options))


def against_fusion(captured: Captured, shapes: FeedShapes, agree: bool = False) -> str:
    """Why a step cannot be fused, whatever its regions are; "" if it can.

    Args:
        captured: the step.
        shapes: of its feeds.
        agree: whether other workers can agree with this one. What they compute behind a collective must be computed
            by equal kernels.
    """
    graph = read(captured, shapes)
    if not agree and waits_for_others(graph):
        return FusionWhy.OTHER_WORKERS
    try:
        meetings(graph)
    except GraphError as error:
        return f"left unchanged: {error}"
    return ""


def against_edited(captured: Captured, found: FusionPlan, shapes: FeedShapes) -> str:
    """Why an edited step must not run; "" if it may."""
    faults = [region.reason for region in found.kept if region.warned]
    if faults:  # by which replicas may differ
        return f"left unchanged: {faults[0]}"
    cycle = waits_for_itself(read(captured, shapes))
    more = " -> ..." if len(cycle) > _SHOWN else ""
    if cycle:
        return f"left unchanged: stitched it would wait for itself, through {' -> '.join(cycle[:_SHOWN])}{more}"
    return ""


def read(captured: Captured, shapes: FeedShapes) -> Graph:
    """A captured graph, with its shapes and the functions that it calls."""
    return serde.from_graph_def(captured.graph_def, inferred=shaped_graph(captured, feed_shapes=shapes), functions=True)
