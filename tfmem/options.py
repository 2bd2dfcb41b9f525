"""All options of `tfmem.optimize`, in one frozen value. Only this module reads environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args

from custom_ops.errors import TfmemError
from graph_passes.checks import LARGEST, directory, instance, one_of, series, shapes, shown, text, truth
from graph_passes.errors import OptionsError
from graph_passes.passes.fuse.options import FusionOptions
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.options import RecurrentOptions
from tfmem.budgets import Budgets, checked_budget, parse_size

PassName = Literal["recurrent", "fusion", "offload"]

_KERNEL_FLAGS = (
    *("CUDNN_", "DNNL_", "NVIDIA_TF32", "ONEDNN_", "OMP_", "TF_CUDNN_", "TF_DETERMINISTIC", "TF_ENABLE_"),
    *("TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_USE_", "TF_XLA_FLAGS"),
)


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
            on a CPU). A dict gives each device a budget, {"GPU:0": "10GiB", "GPU:1": "8GiB"}; a device without an
            entry has that of None. With None a graph that cannot be planned (unknown shapes, no gradient) stays.
        passes: the passes to run: "recurrent" replaces recurrent layers by persistent kernels, "fusion" compiles
            elementwise ops, reductions and updates into few kernels, "offload" keeps a step within its memory budget.
            None: all three for a `tf.function` or Keras model on a GPU with `observe=True` and `fusion.tune` other
            than "off"; otherwise "recurrent" and "offload". On a CPU None also fuses such a step without a budget,
            where that is timed to be faster.
        offload: options of the offload pass, its policy among them.
        recurrent: options of the recurrent pass, its precision among them.
        fusion: options of the fusion pass: how much is timed before a fused step is used.
        input_shapes: static shapes of inputs, by name, where the graph leaves a dimension open.
        device: the device whose memory is planned, as TensorFlow names it; "" for the first GPU, else the CPU.
        observe: whether tfmem profiles the first steps. If not, the plan rests on a cached profile or on estimates.
        cache_directory: the directory for profiles and GPU kernels; "" keeps none.
        progress: whether a line on stderr shows what tfmem is doing if it takes more than two seconds.
    """

    memory_budget: Budgets = None
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
            "memory_budget": checked_budget(self.memory_budget),
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
    fuses = timed and options.observe and options.fusion.tune != "off"
    return ("recurrent", "fusion", "offload") if fuses else ("recurrent", "offload")


def passes_of(options: Options, timed: bool) -> tuple[PassName, ...]:
    """The passes that run: the user's, or the default ones; see `default_passes`."""
    return default_passes(options, timed) if options.passes is None else options.passes


def _passes(given: object) -> tuple[Any, ...]:
    known = get_args(PassName)
    passes = series("passes", given, f"a tuple of passes; there are: {', '.join(known)}")
    for name in passes:
        if not isinstance(name, str) or name not in known:
            raise OptionsError(f"passes={shown(given)}: no pass {shown(name)}; there are: {', '.join(known)}")
    return passes


def _size(given: str) -> int:
    """Bytes from a text such as "64GiB"; a fraction is refused, since it has no whole here."""
    size, is_fraction = parse_size(given) or (Decimal(-1), False)
    if is_fraction or not 0 <= size <= LARGEST:
        raise OptionsError(f'{shown(given)} is not a size; expected bytes, or a text such as "64GiB"')
    return int(size)


def _flag(given: str) -> bool:
    one_of("value", given, ("0", "1"))
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


def tensorflow_flags() -> dict[str, str]:
    """The environment variables of TensorFlow."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("TF_")}


def workspace_limits(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Bytes of workspace that TensorFlow allows a convolution, and one that is fused with what follows.

    As `GetDnnWorkspaceLimitOrDefault` and `ConvolveScratchSize` in its sources have them.
    """
    given = kernel_flags(environ).get("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "")
    is_size = re.fullmatch("[0-9]{1,12}", given) is not None
    return (int(given) << 20, int(given) << 20) if is_size else (8 << 30, 4 << 30)


def merged(options: Options | None, memory_budget: Budgets, policy: str | None, **changes: Any) -> Options:
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
        nested: dict[str, Any] = {"offload": OffloadOptions, "fusion": FusionOptions, "recurrent": RecurrentOptions}
        cures = [
            f"; pass {name}=tfmem.{kind.__name__}({field}=...)"
            for name, kind in nested.items()
            for field in sorted(unknown & set(kind.__dataclass_fields__))
        ]
        raise OptionsError(
            f"there is no option {', '.join(sorted(unknown))}; there are: {', '.join(Options.__dataclass_fields__)}"
            f"{''.join(cures)}"
        )
    return replace(result, **changes) if changes else result
