"""The plans of all lanes of a step, carried out: no edge joins two lanes, and the step does not wait for itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from graph_passes.analysis.peers import waits_for_itself
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import Needs, Probing
from graph_passes.pipeline import Step, edit_on_devices

_SHOWN = 6  # nodes of a cycle that an error names


def edit_lanes(
    step: Step,
    plans: Sequence[LanePlan],
    options: OffloadOptions,
    spill_key: str = "",
    probing: Sequence[Probing] = (),
) -> Graph:
    """A copy of the step's graph with the MemOps of all lanes.

    Args:
        step: of all lanes.
        plans: one for each.
        options: of the pass.
        spill_key: what stands for the directory of spill files.
        probing: the probes of each lane; () for none.

    Raises:
        GraphError: a plan is none for the step, the edited step would wait for itself, or its collectives are in no
            known order.
    """
    needs = [
        Needs(each.timeline, options, each.plan, probes, spill_key)
        for each, probes in zip_longest(plans, probing)
        if each.plan.moves or probes
    ]
    graph = edit_on_devices(step, needs)
    cycle = waits_for_itself(graph)
    if cycle:
        more = " -> ..." if len(cycle) > _SHOWN else ""
        raise GraphError(
            f"with its moves the step would wait for itself, through {' -> '.join(cycle[:_SHOWN])}{more}; "
            "please report this"
        )
    return graph
