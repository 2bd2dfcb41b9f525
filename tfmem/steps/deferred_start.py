"""A step whose stages begin in the background, once it has run: meanwhile the trace runs as it was given.

To plan a large step takes a second, and kernels for recurrent layers take several to compile and to time."""

from __future__ import annotations

from custom_ops.background import Background
from graph_passes.report import UNDECIDED
from tfmem.runtime.engine import Engine
from tfmem.steps.stages import Stages
from tfmem.steps.trace import Trace

MEANWHILE = f"{UNDECIDED}: it runs as it was, while it is planned and kernels for its recurrent layers are made"


def start(stages: Stages, budget: int | None) -> None:
    """Replace recurrent layers, then plan by estimate if there is a budget. Raises what these raise."""
    stages.replace_layers()
    if budget is not None:
        stages.begin(budget)


def can_wait(engine: Engine, trace: Trace) -> bool:
    """Whether a trace may run as it was given for a while.

    Only on a GPU, and only where the fusion pass would leave it so for a while in any case: `tune="fast"`. Not if it
    may need more memory than there is, nor under a budget of the user's; nor if it draws random numbers, with which
    another graph would not go on.
    """
    options = engine.options
    if not (engine.stitches and engine.target.is_gpu and (engine.replaces or engine.budget is not None)):
        return False
    if not options.observe or options.fusion.tune != "fast" or engine.must_fit:
        return False
    try:
        if trace.draws:
            return False
        return engine.budget is None or trace.surely_fits(engine.budget)
    except Exception:  # whatever it is, it is told where the trace is planned at once
        return False


class Later:
    """Stages that a thread begins, once the step has run.

    Attributes:
        stages: of the trace.
        error: what that failed with.
        thread: that does it.
    """

    def __init__(self, stages: Stages, budget: int | None) -> None:
        """Nothing has begun yet."""
        self.stages = stages
        self.error: Exception | None = None
        self._budget = budget
        self.thread = Background(self._run, "tfmem stages")

    def _run(self) -> None:
        try:
            start(self.stages, self._budget)
        except Exception as error:  # whatever it is, the step runs as it was
            self.error = error
