"""What a user may set about offloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from graph_passes.checks import directory, one_of, whole

Policy = Literal["autovm", "hybrid", "vdnn_all", "vdnn_conv"]
PrefetchTiming = Literal["auto", "late", "early"]
CopyStart = Literal["last_use", "produced"]
Mechanism = Literal["auto", "copy", "managed", "file"]


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the offload pass.

    Attributes:
        policy: `autovm` is the thesis's and copies only; `hybrid` is the same, but what its own op makes faster than a
            copy brings it back is recomputed (the output of a first convolution, say); `vdnn_all` and `vdnn_conv` are
            the peers' heuristics, for comparison.
        size_threshold: bytes below which a tensor stays; `auto` takes the largest that meets the budget.
        reuse_distance: ops that must lie between a tensor's last forward and first backward use; `auto` skips the
            outputs of the last two layers (thesis 3.3.1.1).
        prefetch: `late` (Listing 3.3: run times known), `early` (Listing 3.4: not known), or `auto`: late once they
            were measured.
        copy_start: when a copy out may begin: after the last forward use (Listing 3.2), or once produced.
        mechanism: `copy` (pinned host memory), `managed` (unified memory), `file` (no GPU), or `auto`.
        spill_directory: where the file mechanism writes; the system's temporary directory by default.
        spill_budget: the most bytes in spill files; 0 for what the directory has free.
        host_budget: the most bytes of pinned host memory; 0 for no limit.
    """

    policy: Policy = "hybrid"
    size_threshold: int | Literal["auto"] = "auto"
    reuse_distance: int | Literal["auto"] = "auto"
    prefetch: PrefetchTiming = "auto"
    copy_start: CopyStart = "last_use"
    mechanism: Mechanism = "auto"
    spill_directory: str = ""
    spill_budget: int = 0
    host_budget: int = 0

    def __post_init__(self) -> None:
        one_of("policy", self.policy, get_args(Policy))
        one_of("prefetch", self.prefetch, get_args(PrefetchTiming))
        one_of("copy_start", self.copy_start, get_args(CopyStart))
        one_of("mechanism", self.mechanism, get_args(Mechanism))
        for name in ("size_threshold", "reuse_distance"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value == "auto"):
                object.__setattr__(self, name, whole(name, value))
        for name in ("spill_budget", "host_budget"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        spill_directory = directory("spill_directory", self.spill_directory, ', or "" for that of temporary files')
        object.__setattr__(self, "spill_directory", spill_directory)
