"""A GPU as a kernel sees it, as data: what it has, and what the parts of a recurrent step cost on it.

Times are nanoseconds. What is measured: the "measured parameters" of GRNN's performance model (Holmes et al., EuroSys
2019, Figure 10) and what clusters and tensor cores add; `custom_ops/recurrent/search/microbenchmark.py` measures it.
Functions are stored as points, and read between them along straight lines over a logarithmic axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any, TypeAlias

from custom_ops.errors import KernelError

DEVICES = Path(__file__).parent / "devices"  # a profile of each device, as JSON
WARP = 32  # threads
SCHEDULERS = 4  # warp schedulers of a multiprocessor, on every architecture from 7.0 on
REGISTERS = 65536  # of a multiprocessor
REGISTERS_PER_THREAD = 255
# bytes that a CTA can have, by compute capability (CUDA C++ Programming Guide, Technical Specifications)
SHARED_MEMORY = {
    70: 96 << 10, 75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10,
    100: 227 << 10, 103: 227 << 10, 120: 99 << 10, 121: 99 << 10,
}  # fmt: skip

Curve: TypeAlias = tuple[tuple[float, float], ...]  # points (x, y), x ascending and positive


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Attributes:
        name: as its driver names it, or a profile's name.
        arch: compute capability, 10 * major + minor.
        multiprocessors: how many there are.
        clusters: for each size of a cluster, how many can run at once; only size 1 where there are none.
        fma: one fused multiply-add in a chain of them, one warp on each scheduler (FC).
        warps_speedup: S1: over warps on a scheduler, how much more of them it finishes in the same time.
        columns_speedup: S2: over columns of weights that a thread sums up, each with the same state (the sub-tile).
        rows_speedup: likewise over rows of the batch that it sums up at once, each with the same weights.
        peak_speedup: what the three together cannot exceed.
        shared_load: a warp's load of 16 bytes a thread, when shared memory does nothing else, over the threads of the
            warp that read different ones.
        shuffle: one dependent shuffle and addition, in FMAs (FPS).
        shuffle_speedup: S3: over independent reductions on a scheduler.
        activation: a sigmoid or a hyperbolic tangent.
        tensor_chain: one m16n8k8 product in TF32 that waits for the one before; 0 where there are none.
        tensor_rate: the same, when a scheduler has others to do meanwhile.
        load_bandwidth: bytes a nanosecond of one multiprocessor from the L2 cache (L2B), over the share of all
            multiprocessors that load at once.
        block_barrier: a barrier of a CTA.
        cluster_handoff: until a value that each CTA of a cluster stores in the shared memory of all is seen by all.
        cluster_bandwidth: bytes a nanosecond that arrive in one CTA that way.
        grid_handoff: until a value that each CTA stores in global memory, its epoch in it, is seen by all, over the
            number of CTAs.
        grid_bandwidth: bytes a nanosecond that arrive in one CTA that way, over the number of CTAs: what was just
            written elsewhere comes slower than what is read again.
    """

    name: str
    arch: int
    multiprocessors: int
    clusters: Curve
    fma: float
    warps_speedup: Curve
    columns_speedup: Curve
    rows_speedup: Curve
    peak_speedup: float
    shared_load: Curve
    shuffle: float
    shuffle_speedup: Curve
    activation: float
    tensor_chain: float
    tensor_rate: float
    load_bandwidth: Curve
    block_barrier: float
    cluster_handoff: float
    cluster_bandwidth: float
    grid_handoff: Curve
    grid_bandwidth: Curve

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)


def from_json(values: Mapping[str, Any]) -> Machine:
    """A machine from JSON; keys that begin with an underscore are notes.

    Raises:
        KernelError: a field is missing, there is one too many, or it holds something else.
    """
    names = {field.name for field in fields(Machine)}
    given = {name for name in values if not name.startswith("_")}
    if given != names:
        wrong = ", ".join(sorted(names ^ given))
        raise KernelError(f"a machine description has a missing or unknown field: {wrong}; measure the machine again")
    found = {name: _tuples(values[name]) for name in names}
    for field in fields(Machine):
        if not _IS_KIND[str(field.type)](found[field.name]):
            raise KernelError(
                f"{field.name} of a machine description is no {field.type} of finite numbers; measure the machine again"
            )
    return Machine(**found)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _is_curve(value: Any) -> bool:
    """Points with x ascending and positive; at least one, so that it can be read."""
    if not isinstance(value, tuple) or not value or not all(isinstance(point, tuple) for point in value):
        return False
    if not all(len(point) == 2 and all(map(_is_number, point)) for point in value):
        return False
    places = [0.0, *(x for x, _ in value)]
    return all(left < right for left, right in pairwise(places))


_IS_KIND: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _is_count,
    "float": _is_number,
    "Curve": _is_curve,
}


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that a CTA can have; where nothing is known, what all have since 8.0."""
    return SHARED_MEMORY.get(arch) or min(size for known, size in SHARED_MEMORY.items() if known >= 80)


def registers_of(threads: int) -> int:
    """Registers that each thread can have where so many are on a multiprocessor."""
    return min(REGISTERS_PER_THREAD, REGISTERS // threads)


def read(curve: Curve, x: float) -> float:
    """The value of a curve at `x`; beyond its ends, the value at the end."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if x <= right:
            return low + (high - low) * log(x / left) / log(right / left)
    return curve[-1][1]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
