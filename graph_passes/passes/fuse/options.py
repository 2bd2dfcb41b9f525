"""What a user may set about fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from graph_passes.checks import one_of

Tune = Literal["off", "fast", "full"]


@dataclass(frozen=True)
class FusionOptions:
    """Options of the fusion pass.

    Attributes:
        tune: whether anything is timed. `off` plans by the model alone, so that each process makes the same plan, and
            runs it from the first step on. `fast` runs the first steps as they were given; then the fused step is timed
            against them, on copies, and the faster one runs. `full` does the same at once, in the first call, and takes
            as long as it needs.
    """

    tune: Tune = "fast"

    def __post_init__(self) -> None:
        one_of("tune", self.tune, get_args(Tune))
