"""What a user may set about offloading."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

from graph_passes.checks import directory, one_of, whole

Policy = Literal["optimal", "hybrid", "autovm", "vdnn_all", "vdnn_conv"]
PrefetchTiming = Literal["auto", "late", "early"]
CopyStart = Literal["last_use", "produced"]
Mechanism = Literal["auto", "copy", "managed", "file"]
Splitting = Literal["auto", "needed", "faster", "never"]

RECOMPUTING: tuple[Policy, ...] = ("optimal", "hybrid")  # the policies that may recompute instead of copying


class Effort(enum.Enum):
    """What policy `optimal` computes for one plan.

    Attributes:
        GREEDY: no integer program: the step will be planned again before its plan matters.
        ONCE: the program for one margin: it takes a third of the time of a search, and has most of its gain.
        SEARCHED: the program for several margins.
    """

    GREEDY = "greedy"
    ONCE = "once"
    SEARCHED = "searched"


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the offload pass.

    Attributes:
        policy: `optimal` (use this one) chooses copies and recomputations together, by an integer program. `autovm`, of
            the AutoVM thesis, copies only. `hybrid` is `autovm`, but recomputes a tensor if its ops run faster than a
            copy. `vdnn_all` and `vdnn_conv` are the heuristics of the vDNN paper, for comparison.
        size_threshold: bytes below which a tensor stays; `auto` takes the largest threshold that meets the budget.
        reuse_distance: the fewest ops between two uses of a tensor for it to move in between; `auto` skips the outputs
            of the last two layers (thesis 3.3.1.1).
        prefetch: when a copy back starts. `late`: just early enough to end before the use (thesis, Listing 3.3);
            `early`: as soon as there is free memory (Listing 3.4); `auto`: `late` once run times were measured.
        copy_start: when a copy out may begin: after the `last_use` (Listing 3.2), or as soon as it is `produced`.
        mechanism: `copy` (pinned host memory), `managed` (unified memory), `file` (no GPU), or `auto`.
        spill_directory: where the file mechanism writes; the system's temporary directory by default.
        spill_budget: the most bytes in spill files; 0 for what the directory has free.
        host_budget: the most bytes of pinned host memory; 0 for no limit.
        split: when parts of the step run on pieces of the batch, which changes the order of sums: where no other plan
            meets the budget (`needed`), also where it is predicted and measured to be clearly faster (`faster`), or
            never. `auto`: `faster` on a GPU, whose libraries choose by time as well; `needed` on a CPU.
    """

    policy: Policy = "optimal"
    size_threshold: int | Literal["auto"] = "auto"
    reuse_distance: int | Literal["auto"] = "auto"
    prefetch: PrefetchTiming = "auto"
    copy_start: CopyStart = "last_use"
    mechanism: Mechanism = "auto"
    spill_directory: str = ""
    spill_budget: int = 0
    host_budget: int = 0
    split: Splitting = "auto"

    def __post_init__(self) -> None:
        one_of("policy", self.policy, get_args(Policy))
        one_of("prefetch", self.prefetch, get_args(PrefetchTiming))
        one_of("copy_start", self.copy_start, get_args(CopyStart))
        one_of("mechanism", self.mechanism, get_args(Mechanism))
        one_of("split", self.split, get_args(Splitting))
        for name in ("size_threshold", "reuse_distance"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value == "auto"):
                object.__setattr__(self, name, whole(name, value))
        for name in ("spill_budget", "host_budget"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        spill_directory = directory("spill_directory", self.spill_directory, ', or "" for that of temporary files')
        object.__setattr__(self, "spill_directory", spill_directory)
