"""What a user may set about recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from custom_ops.spec import Precision
from graph_passes.errors import OptionsError


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
        known = ("auto", *get_args(Precision))
        if self.precision not in known:
            raise OptionsError(f"precision={self.precision!r}: expected one of {', '.join(known)}")
        for name in ("candidates", "time_steps"):
            if getattr(self, name) < 1:
                raise OptionsError(f"{name}={getattr(self, name)}: expected 1 or more")
        if not self.batches or min(self.batches) < 1:
            raise OptionsError(f"batches={self.batches}: expected batch sizes of 1 or more")
