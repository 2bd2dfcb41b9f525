"""Edits a graph as an OffloadPlan says; makes no choice."""

from __future__ import annotations

from graph_passes.errors import GraphError
from graph_passes.graph.ir import Editor, Graph
from graph_passes.graph.rewrite import apply_rewrites
from graph_passes.memory.timeline import Timeline
from graph_passes.offload.check import faults
from graph_passes.offload.memops import Probing, memory_ops
from graph_passes.offload.options import OffloadOptions
from graph_passes.offload.plan import OffloadPlan


def apply_offload(
    graph: Graph,
    timeline: Timeline,
    plan: OffloadPlan,
    options: OffloadOptions,
    probing: Probing | None = None,
    spill_key: str = "",
    editor: Editor | None = None,
) -> None:
    """Insert the MemOps of `plan`.

    Args:
        graph: the graph that `timeline` was built from, or a copy of it. Edited itself, unless there is an editor.
        timeline: the step that the plan was made for.
        plan: what to do.
        options: mechanism and spill settings, which become attributes of the MemOps.
        probing: put probes behind the ordered ops.
        spill_key: what stands for `options.spill_directory`: a graph goes anywhere, and names no directory.
        editor: edit this (the live graph that `graph` was read from) instead.

    Raises:
        GraphError: the plan is none for this step; nothing was edited.
    """
    found = faults(timeline, plan)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise GraphError(f"the plan cannot be put into the graph: {found[0]}{more}; please report this")
    apply_rewrites([memory_ops(graph, timeline, plan, options, probing, spill_key)], graph, editor)
