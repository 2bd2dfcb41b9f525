"""What a user may set about fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from graph_passes.checks import architectures, capabilities, one_of, truth

OLDEST = 75  # compute capability 7.5: of those that kernels may be exported for
Tune = Literal["off", "fast", "full"]


@dataclass(frozen=True)
class FusionOptions:
    """Options of the fusion pass.

    Attributes:
        tune: how much is timed. `off` fuses by the cost model alone, so each process makes the same plan and runs it
            from the first step on. `fast` runs the first steps unfused; then tfmem times the fused step against them,
            on copies of the variables, and the faster one runs. On a GPU a thread then times other kernels of the plan,
            unless tensors move. `full` does all timing in the first call, and takes as long as it needs.
        xla: whether XLA may run the step if it is the fastest. A thread has XLA compile the step, and tfmem times that
            against what runs. XLA is not tried if the function or the model has `jit_compile=False`, or if nothing is
            timed.
        architectures: compute capabilities for which the kernels of regions are compiled besides that of this machine's
            GPU, as ("sm_80", "sm_90"); PTX of the oldest stands in on all later ones. Without a GPU here, regions are
            planned for an H200, and the kernels that the model ranks first are compiled.
    """

    tune: Tune = "fast"
    xla: bool = True
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("tune", self.tune, get_args(Tune))
        object.__setattr__(self, "xla", truth("xla", self.xla))
        names = architectures("architectures", self.architectures, OLDEST)
        object.__setattr__(self, "architectures", names)

    @property
    def capabilities(self) -> tuple[int, ...]:
        """`architectures` as numbers, ascending: 90 for "sm_90"."""
        return capabilities(self.architectures)
