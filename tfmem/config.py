"""What a user may set, in one frozen value; the only reader of environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from graph_passes.errors import InvalidBudgetError, OptionsError
from graph_passes.offload.options import OffloadOptions
from graph_passes.recurrent.options import RecurrentOptions

Budget = int | float | str | None
PassName = Literal["recurrent", "offload"]

_KERNEL_FLAGS = (
    *("CUDNN_", "DNNL_", "NVIDIA_TF32", "ONEDNN_", "OMP_", "TF_CUDNN_", "TF_DETERMINISTIC", "TF_ENABLE_"),
    *("TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_USE_", "TF_XLA_FLAGS"),
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class Options:
    """How `tfmem.optimize` works.

    Attributes:
        memory_budget: the most device memory a step may use: bytes, a text such as "10GiB" or "800MB", a fraction of
            the device's memory (a float of at most 1), or None for all that TensorFlow may use of a GPU (and no limit
            on a CPU); then a graph that cannot be planned (unknown shapes, no gradient) is left as it was.
        passes: the passes to run, in the pipeline's order: "recurrent" swaps recurrent layers for persistent kernels,
            "offload" keeps a step within its memory budget.
        offload: options of the offload pass, its policy among them.
        recurrent: options of the recurrent pass, its precision among them.
        input_shapes: static shapes of inputs, by name, where the graph leaves a dimension open.
        device: the device whose memory is planned, as TensorFlow names it; "" for the first GPU, else the CPU.
        observe: whether the first steps measure op times and memory before the plan is made final. Without, the plan
            rests on a cached profile or on estimates.
        cache_directory: where profiles and GPU kernels are kept; "" keeps none.
        progress: whether a line on stderr says what is going on where that takes more than two seconds.
    """

    memory_budget: Budget = None
    passes: tuple[PassName, ...] = ("recurrent", "offload")
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    recurrent: RecurrentOptions = field(default_factory=RecurrentOptions)
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device: str = ""
    observe: bool = True
    cache_directory: str = field(default_factory=lambda: str(Path.home() / ".cache" / "tfmem"))
    progress: bool = True

    def __post_init__(self) -> None:
        for name in self.passes:
            if name not in get_args(PassName):
                known = ", ".join(get_args(PassName))
                raise OptionsError(f"passes={self.passes!r}: no pass '{name}'; there are: {known}")
        parse_budget(self.memory_budget, 1 << 62)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Options:
        """The defaults, with what these environment variables say instead:

        TFMEM_MEMORY_BUDGET, TFMEM_POLICY, TFMEM_SPILL_DIR, TFMEM_SPILL_BUDGET, TFMEM_HOST_BUDGET, TFMEM_CACHE_DIR,
        TFMEM_DEVICE, TFMEM_OBSERVE (0 or 1), TFMEM_PROGRESS (0 or 1).

        Raises:
            OptionsError: a variable has a value that its option does not take.
        """
        found = os.environ if environ is None else environ
        offload: dict[str, Any] = {}
        if "TFMEM_POLICY" in found:
            offload["policy"] = found["TFMEM_POLICY"]
        if "TFMEM_SPILL_DIR" in found:
            offload["spill_directory"] = found["TFMEM_SPILL_DIR"]
        for variable, name in (("TFMEM_SPILL_BUDGET", "spill_budget"), ("TFMEM_HOST_BUDGET", "host_budget")):
            if variable in found:
                offload[name] = parse_budget(found[variable], 1 << 62)
        values: dict[str, Any] = {}
        for variable, name in (
            ("TFMEM_MEMORY_BUDGET", "memory_budget"),
            ("TFMEM_CACHE_DIR", "cache_directory"),
            ("TFMEM_DEVICE", "device"),
        ):
            if variable in found:
                values[name] = found[variable]
        for variable, name in (("TFMEM_OBSERVE", "observe"), ("TFMEM_PROGRESS", "progress")):
            if variable in found:
                if found[variable] not in ("0", "1"):
                    raise OptionsError(f"{variable}={found[variable]!r}: expected 0 or 1")
                values[name] = found[variable] == "1"
        return cls(**values, offload=OffloadOptions(**offload))


def kernel_flags(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that choose kernels, and so how long they run and how much workspace they take."""
    found = os.environ if environ is None else environ
    return {name: value for name, value in sorted(found.items()) if name.startswith(_KERNEL_FLAGS)}


def workspace_limits(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Bytes of workspace that TensorFlow allows a convolution, and one that is fused with what follows.

    As `GetDnnWorkspaceLimitOrDefault` and `ConvolveScratchSize` in its sources have them.
    """
    given = kernel_flags(environ).get("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "")
    return (int(given) << 20, int(given) << 20) if given.isdecimal() else (8 << 30, 4 << 30)


def parse_budget(budget: Budget, device_memory: int) -> int | None:
    """A memory budget in bytes; None for None.

    Args:
        budget: see `Options.memory_budget`.
        device_memory: bytes of the device, which a fraction is taken of and a budget must not exceed.

    Raises:
        InvalidBudgetError: the budget is zero, negative, over the device's memory, or not a size.
    """
    expected = 'expected bytes, a text such as "10GiB", or a fraction of at most 1.0'
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise InvalidBudgetError(f"memory_budget={budget!r}: {expected}")
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*", budget)
        if not match or match[2].upper() not in _UNITS:
            raise InvalidBudgetError(f"memory_budget={budget!r} is not a size; {expected}")
        # "0.5" without a unit is the fraction it looks like
        if not match[2] and "." in match[1]:
            return parse_budget(float(match[1]), device_memory)
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise InvalidBudgetError(f"memory_budget={budget!r}: a fraction lies above 0 and at most at 1; {expected}")
        size = int(budget * device_memory)
    else:
        size = budget
    if size <= 0:
        raise InvalidBudgetError(f"memory_budget={budget!r} leaves no memory at all; {expected}")
    if size > device_memory:
        raise InvalidBudgetError(
            f"memory_budget={budget!r} is {size:,} bytes, but the device has {device_memory:,}; "
            "give a smaller budget, or None for all of it"
        )
    return size


def merged(options: Options | None, memory_budget: Budget, policy: str | None, **changes: Any) -> Options:
    """`options` (or the environment's) with the shorthand arguments of the public functions laid over it."""
    result = Options.from_env() if options is None else options
    if memory_budget is not None:
        changes["memory_budget"] = memory_budget
    if policy is not None:
        changes["offload"] = replace(result.offload, policy=policy)  # type: ignore[arg-type]
    unknown = set(changes) - set(Options.__dataclass_fields__)
    if unknown:
        raise OptionsError(
            f"no option {', '.join(sorted(unknown))}; there are: {', '.join(Options.__dataclass_fields__)}"
        )
    return replace(result, **changes) if changes else result
