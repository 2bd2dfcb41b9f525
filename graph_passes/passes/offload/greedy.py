"""Policy `hybrid`: copies by threshold and chains by rank, the fastest of a few plans. Pure: Timeline in, gaps out."""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.background import go_on
from graph_passes.analysis.memory.simulate import Link, simulate
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import in_order, place
from graph_passes.passes.offload.recomputation import chain_choices, endings
from graph_passes.passes.offload.selection import Selection, select_copies


def fastest(
    timeline: Timeline, candidates: Sequence[Gap], link: Link, budget: int, options: OffloadOptions, timed: bool
) -> Selection:
    """The selection of the fastest plan of those with more or fewer chains.

    Raises:
        InfeasibleBudgetError: none meets the budget.
    """
    found: list[tuple[bool, float, int, Selection]] = []
    refused = None
    for number, (again, others) in enumerate(chain_choices(timeline, candidates, link)):
        go_on()
        try:
            chosen, threshold = select_copies(timeline, others, budget, options, again)
        except InfeasibleBudgetError as error:
            refused = refused or error
            continue
        for ends in endings(timeline, chosen, frozenset(again), link):
            moves = in_order(timeline, place(timeline, chosen, link, budget, options, timed, ends))
            after = simulate(timeline, moves, link)
            selection = Selection(tuple(chosen), ends, threshold)
            found.append((after.peak > budget, after.seconds, number, selection))
    if not found:
        raise refused or ValueError("no choice of chains was planned")
    return min(found, key=lambda plan: plan[:3])[3]
