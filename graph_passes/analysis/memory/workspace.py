"""Workspace that a step finds less of than it would take: its convolutions get by, more slowly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graph_passes.analysis.memory.simulate import Move, usage_under
from graph_passes.analysis.memory.timeline import Timeline

SLOWER = 7  # times its run time that a convolution takes longer without its workspace; seen: 3.4 to 8.8


def squeezed(generous: Timeline, least: Timeline, moves: Sequence[Move], budget: int) -> Timeline:
    """`generous` with only the workspace that `moves` leave within the budget, and the time that this costs.

    Args:
        generous: the step, every op with the workspace it would take.
        least: the same step, with the workspace that its ops cannot do without.
        moves: a plan's moves, under which `least` keeps within the budget.
        budget: bytes.
    """
    over = np.maximum(0, usage_under(generous, moves) - budget)
    for move in moves:
        chain = generous.chain(move.gap) if move.recomputed else None
        for again in chain.ops if chain else ():  # the ops that recompute the buffer run there, too
            over[again] = max(over[again], over[move.next])
    steps = list(generous.steps)
    for position in np.flatnonzero(over).tolist():
        step, needed = generous.steps[position], least.steps[position].workspace
        workspace = max(needed, step.workspace - int(over[position]))
        steps[position] = replace(step, seconds=(1 + SLOWER) * step.seconds, workspace=workspace)
    return replace(generous, steps=tuple(steps))
