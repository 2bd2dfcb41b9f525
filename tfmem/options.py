"""All options of `tfmem.optimize`, in one frozen value. Only this module reads environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from custom_ops.errors import TfmemError
from graph_passes.checks import LARGEST, directory, instance, one_of, series, shapes, shown, text, truth
from graph_passes.errors import InvalidBudgetError, OptionsError
from graph_passes.passes.fuse.options import FusionOptions
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.options import RecurrentOptions

Budget = int | float | str | None
PassName = Literal["recurrent", "fusion", "offload"]

_KERNEL_FLAGS = (
    *("CUDNN_", "DNNL_", "NVIDIA_TF32", "ONEDNN_", "OMP_", "TF_CUDNN_", "TF_DETERMINISTIC", "TF_ENABLE_"),
    *("TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_USE_", "TF_XLA_FLAGS"),
)
_EXPECTED = 'bytes, a text such as "10GiB", or a fraction of at most 1.0'
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def _home_cache() -> str:
    """The cache in the user's home directory; "" if there is none, as in a container whose user has no entry."""
    try:
        return str(Path.home() / ".cache" / "tfmem")
    except RuntimeError:
        return ""


@dataclass(frozen=True)
class Options:
    """Options of `tfmem.optimize`.

    Attributes:
        memory_budget: the most device memory a step may use: bytes, a text such as "10GiB" or "800MB", a fraction of
            the device's memory (a float of at most 1), or None for all that TensorFlow may use of a GPU (and no limit
            on a CPU). With None a graph that cannot be planned (unknown shapes, no gradient) is not changed.
        passes: the passes to run: "recurrent" replaces recurrent layers by persistent kernels, "fusion" compiles
            elementwise ops, reductions and updates into few kernels, "offload" keeps a step within its memory budget.
            None: all three for a `tf.function` or Keras model on a GPU with no `memory_budget`, `observe=True` and
            `fusion.tune` other than "off"; otherwise "recurrent" and "offload".
        offload: options of the offload pass, its policy among them.
        recurrent: options of the recurrent pass, its precision among them.
        fusion: options of the fusion pass: how much is timed before a fused step is used.
        input_shapes: static shapes of inputs, by name, where the graph leaves a dimension open.
        device: the device whose memory is planned, as TensorFlow names it; "" for the first GPU, else the CPU.
        observe: whether tfmem profiles the first steps. If not, the plan rests on a cached profile or on estimates.
        cache_directory: the directory for profiles and GPU kernels; "" keeps none.
        progress: whether a line on stderr shows what tfmem is doing if it takes more than two seconds.
    """

    memory_budget: Budget = None
    passes: tuple[PassName, ...] | None = None
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    recurrent: RecurrentOptions = field(default_factory=RecurrentOptions)
    fusion: FusionOptions = field(default_factory=FusionOptions)
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device: str = ""
    observe: bool = True
    cache_directory: str = field(default_factory=_home_cache)
    progress: bool = True

    def __post_init__(self) -> None:
        checked = {
            "passes": None if self.passes is None else _passes(self.passes),
            "input_shapes": shapes("input_shapes", self.input_shapes),
            "device": text("device", self.device),
            "observe": truth("observe", self.observe),
            "progress": truth("progress", self.progress),
            "cache_directory": directory("cache_directory", self.cache_directory, ', or "" for none'),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        instance("offload", self.offload, OffloadOptions)
        instance("recurrent", self.recurrent, RecurrentOptions)
        instance("fusion", self.fusion, FusionOptions)
        parse_budget(self.memory_budget, LARGEST)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Options:
        """The defaults, changed by these environment variables:

        TFMEM_MEMORY_BUDGET, TFMEM_POLICY, TFMEM_SPILL_DIR, TFMEM_SPILL_BUDGET, TFMEM_HOST_BUDGET, TFMEM_CACHE_DIR,
        TFMEM_DEVICE, TFMEM_OBSERVE (0 or 1), TFMEM_PROGRESS (0 or 1).

        Raises:
            OptionsError: a variable has a value that its option does not take.
        """
        found = os.environ if environ is None else environ
        result = cls()
        for variable, name, read in _VARIABLES:
            if variable not in found:
                continue
            try:
                value = read(found[variable])
                if name in OffloadOptions.__dataclass_fields__:
                    result = replace(result, offload=replace(result.offload, **{name: value}))
                else:
                    result = replace(result, **{name: value})
            except TfmemError as error:
                raise type(error)(f"environment variable {variable}: {error}") from error
        return result


def default_passes(options: Options, timed: bool) -> tuple[PassName, ...]:
    """The passes that run if the user names none: "recurrent" and "offload", and "fusion" if it can be timed.

    Args:
        options: the user's.
        timed: whether this process calls the steps, on a GPU, so that a fused step can be timed against the original.
    """
    fuses = timed and options.memory_budget is None and options.observe and options.fusion.tune != "off"
    return ("recurrent", "fusion", "offload") if fuses else ("recurrent", "offload")


def passes_of(options: Options, timed: bool) -> tuple[PassName, ...]:
    """The passes that run: the user's, or the default ones; see `default_passes`."""
    return default_passes(options, timed) if options.passes is None else options.passes


def budget_of(options: Options, passes: Collection[str], memory: int, limited: bool) -> tuple[int | None, bool]:
    """The bytes that a step may use, None for no limit; and whether the user gave them.

    Args:
        options: the user's.
        passes: those that run.
        memory: bytes of the device.
        limited: whether that is the limit where the user gives none.

    Raises:
        InvalidBudgetError: see `parse_budget`.
    """
    given = parse_budget(options.memory_budget, memory)
    if "offload" not in passes:
        return None, False
    return (memory if limited else None, False) if given is None else (given, True)


def _passes(given: object) -> tuple[Any, ...]:
    known = get_args(PassName)
    passes = series("passes", given, f"a tuple of passes; there are: {', '.join(known)}")
    for name in passes:
        if not isinstance(name, str) or name not in known:
            raise OptionsError(f"passes={shown(given)}: no pass {shown(name)}; there are: {', '.join(known)}")
    return passes


def _size(given: str) -> int:
    """Bytes from a text such as "64GiB"; a fraction is refused, since it has no whole here."""
    size, is_fraction = _parsed(given) or (Decimal(-1), False)
    if is_fraction or not 0 <= size <= LARGEST:
        raise OptionsError(f'{shown(given)} is not a size; expected bytes, or a text such as "64GiB"')
    return int(size)


def _flag(given: str) -> bool:
    one_of("it", given, ("0", "1"))
    return given == "1"


_VARIABLES: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("TFMEM_MEMORY_BUDGET", "memory_budget", str),
    ("TFMEM_POLICY", "policy", str),
    ("TFMEM_SPILL_DIR", "spill_directory", str),
    ("TFMEM_SPILL_BUDGET", "spill_budget", _size),
    ("TFMEM_HOST_BUDGET", "host_budget", _size),
    ("TFMEM_CACHE_DIR", "cache_directory", str),
    ("TFMEM_DEVICE", "device", str),
    ("TFMEM_OBSERVE", "observe", _flag),
    ("TFMEM_PROGRESS", "progress", _flag),
)


def kernel_flags(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that choose kernels, and so their run time and workspace."""
    found = os.environ if environ is None else environ
    return {name: value for name, value in sorted(found.items()) if name.startswith(_KERNEL_FLAGS)}


def workspace_limits(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Bytes of workspace that TensorFlow allows a convolution, and one that is fused with what follows.

    As `GetDnnWorkspaceLimitOrDefault` and `ConvolveScratchSize` in its sources have them.
    """
    given = kernel_flags(environ).get("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "")
    is_size = re.fullmatch("[0-9]{1,12}", given) is not None
    return (int(given) << 20, int(given) << 20) if is_size else (8 << 30, 4 << 30)


def parse_budget(budget: Budget, device_memory: int) -> int | None:
    """A memory budget in bytes; None for None.

    Args:
        budget: see `Options.memory_budget`.
        device_memory: bytes of the device, which a fraction is taken of and a budget must not exceed.

    Raises:
        InvalidBudgetError: the budget is zero, negative, over the device's memory, or not a size.
    """
    if budget is None:
        return None
    size: Any
    if isinstance(budget, str):
        if (parsed := _parsed(budget)) is None:
            raise _no_budget(budget, f"is not a size; expected {_EXPECTED}")
        size, is_fraction = parsed
    elif isinstance(budget, Real) and not isinstance(budget, bool):
        size, is_fraction = budget, not isinstance(budget, Integral)
    else:
        raise InvalidBudgetError(f"memory_budget={shown(budget)}: expected {_EXPECTED}")
    if is_fraction:
        if not 0 < size <= 1:  # nor is NaN
            raise InvalidBudgetError(
                f"memory_budget={shown(budget)}: a fraction must be above 0 and at most 1; expected {_EXPECTED}"
            )
        size = float(size) * device_memory
    if size < 1:
        raise _no_budget(budget, f"leaves no memory at all; expected {_EXPECTED}")
    if size > device_memory:
        found = "more than any device has"
        if device_memory < size <= LARGEST:
            found = f"{int(size):,} bytes, but the device has {device_memory:,}"
        raise _no_budget(budget, f"is {found}; give a smaller budget, or None for all of it")
    return int(size)


def _no_budget(budget: Budget, why: str) -> InvalidBudgetError:
    return InvalidBudgetError(f"memory_budget={shown(budget)} {why}")


def _parsed(given: str) -> tuple[Decimal, bool] | None:
    """The size in a text, and whether it is a fraction: "0.5" without a unit is one."""
    match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})\s*([A-Za-z]*)\s*", given)
    if not match or match[2].upper() not in _UNITS:
        return None
    return Decimal(match[1]) * _UNITS[match[2].upper()], not match[2] and "." in match[1]


def merged(options: Options | None, memory_budget: Budget, policy: str | None, **changes: Any) -> Options:
    """`options` (or the environment's) with the shorthand arguments of the public functions laid over it."""
    if options is not None:
        instance("options", options, Options)
    result = Options.from_env() if options is None else options
    if memory_budget is not None:
        changes["memory_budget"] = memory_budget
    if policy is not None:
        offload = changes.get("offload", result.offload)
        instance("offload", offload, OffloadOptions)
        changes["offload"] = replace(offload, policy=policy)
    unknown = set(changes) - set(Options.__dataclass_fields__)
    if unknown:
        raise OptionsError(
            f"no option {', '.join(sorted(unknown))}; there are: {', '.join(Options.__dataclass_fields__)}"
        )
    return replace(result, **changes) if changes else result
