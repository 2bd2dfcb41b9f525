"""What a user may set about recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from custom_ops.recurrent.spec import Precision
from graph_passes.checks import architectures, capabilities, one_of, refuse, series, truth, whole

OLDEST = 75  # compute capability 7.5
LARGEST_BATCH = (1 << 31) - 1  # a kernel counts in 32 bits


@dataclass(frozen=True)
class RecurrentOptions:
    """Options of the recurrent pass. All of them concern GPUs; a CPU has one kernel and one precision.

    Attributes:
        precision: the precision of a GPU's products with a state. `highest` keeps float32's accuracy; `tf32`,
            `bfloat16` and `float16` round to these types. `auto` does what TensorFlow would do: `tf32` where it lets
            products of float32 round so, else `highest`.
        candidates: how many kernels are compiled and timed for each batch size (GRNN's K). Of five, three are those
            that the cost model ranks best, and two more are like the fastest of these.
        batches: the batch sizes to choose kernels for, if the graph leaves the batch open. A choice also serves smaller
            batches, down to the next size in the list; the last one serves all larger batches.
        time_steps: length of the sequences with which kernels are timed.
        progress: whether to show a bar while kernels are chosen.
        architectures: compute capabilities for which kernels are compiled besides that of this machine's GPU, as
            ("sm_80", "sm_90"). The cost model chooses these kernels. Later GPUs compile the PTX of the oldest.
    """

    precision: Precision | Literal["auto"] = "auto"
    candidates: int = 5
    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    time_steps: int = 100
    progress: bool = True
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", *get_args(Precision)))
        for name in ("candidates", "time_steps"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, LARGEST_BATCH))
        batches = series("batches", self.batches, "batch sizes, as (1, 8, 64)")
        if not batches:
            refuse("batches", self.batches, "batch sizes, at least one")
        object.__setattr__(self, "batches", tuple(whole("batches", size, 1, LARGEST_BATCH) for size in batches))
        object.__setattr__(self, "progress", truth("progress", self.progress))
        names = architectures("architectures", self.architectures, OLDEST)
        object.__setattr__(self, "architectures", names)

    @property
    def capabilities(self) -> tuple[int, ...]:
        """`architectures` as numbers, ascending: 90 for "sm_90"."""
        return capabilities(self.architectures)
