"""What a user may set about recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from custom_ops.recurrent.spec import Precision
from graph_passes.checks import one_of, refuse, series, truth, whole

LARGEST_BATCH = (1 << 31) - 1  # a kernel counts in 32 bits


@dataclass(frozen=True)
class RecurrentOptions:
    """Options of the recurrent pass. All of them are about GPUs; a CPU has one kernel and one precision.

    Attributes:
        precision: what a GPU's products with a state may round to: `highest` keeps float32's accuracy, `tf32`,
            `bfloat16` and `float16` are those types'. `auto` is what TensorFlow itself would do: `tf32` where it lets
            products of float32 round so, else `highest`.
        candidates: how many kernels are compiled and timed for each batch size (GRNN's K, section 7.2): three
            of five the best ranked, the others more of the kind that was the fastest of these.
        batches: the batch sizes to choose kernels for, where the graph does not say the batch. Each choice holds down
            to the size before it, the last for all above.
        time_steps: length of the sequences that kernels are timed with.
        progress: whether to show a bar while kernels are chosen.
    """

    precision: Precision | Literal["auto"] = "auto"
    candidates: int = 5
    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    time_steps: int = 100
    progress: bool = True

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", *get_args(Precision)))
        for name in ("candidates", "time_steps"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, LARGEST_BATCH))
        batches = series("batches", self.batches, "batch sizes, as (1, 8, 64)")
        if not batches:
            refuse("batches", self.batches, "batch sizes, at least one")
        object.__setattr__(self, "batches", tuple(whole("batches", size, 1, LARGEST_BATCH) for size in batches))
        object.__setattr__(self, "progress", truth("progress", self.progress))
