"""What a step says of itself before all is decided: its report, and what its next call does."""

from __future__ import annotations

from dataclasses import replace

from graph_passes.decision import FusionWhy
from graph_passes.report import Report
from tfmem.steps import dividing, improving, solving
from tfmem.steps.after_grappler import with_fusion
from tfmem.steps.states import (
    Checking,
    Composing,
    Dividing,
    Fusing,
    Improving,
    Placed,
    Planning,
    Probed,
    Solving,
    StepState,
    Trying,
    Warming,
    Watching,
)
from tfmem.steps.trials import CPU_RETRIES, GPU_TRIALS

_UNFUSED = Probed | Improving | Solving | Checking | Watching | Placed | Dividing | Composing


def so_far(state: StepState, stitches: bool) -> Report:
    """What was decided and measured so far.

    Args:
        state: of the step.
        stitches: whether regions are planned once memory is settled.
    """
    if isinstance(state, Fusing) and (found := state.work.result) is not None:
        return found.report
    if isinstance(state, Planning):
        return with_fusion(state.report, FusionWhy.MEANWHILE)
    if isinstance(state, Solving) or (isinstance(state, Checking) and state.search is not None):
        state = replace(state, report=solving.meanwhile(state.report))
    if isinstance(state, Improving):
        state = replace(state, report=improving.meanwhile(state.report))
    if isinstance(state, Dividing):
        state = replace(state, report=dividing.meanwhile(state.report))
    if stitches and isinstance(state, _UNFUSED):
        return with_fusion(state.report, FusionWhy.UNDECIDED)
    return state.report


def doing(state: Probed, is_gpu: bool) -> str:
    """What the next call with probes does, in words."""
    if isinstance(state, Trying) and state.search.stays is not None:
        return "trying the solver's plan"
    if isinstance(state, Trying):
        most = GPU_TRIALS if is_gpu else 1 + CPU_RETRIES
        return f"trial {len(state.search.trials) + 1} of at most {most}"
    return "running a first plan" if isinstance(state, Warming) else "observing a step"
