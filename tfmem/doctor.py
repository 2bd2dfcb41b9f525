"""What works on this machine, what does not, and what to do: the lines of `tfmem doctor`."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from custom_ops import build_flags
from custom_ops.errors import KernelError, TfmemError
from graph_passes.device_report import many, size
from tfmem.options import Options

DAY = 24 * 3600


class FindingState(StrEnum):
    """How a line of the doctor ends."""

    WORKS = "works"
    LACKS = "lacks"  # tfmem runs without it, and does less
    BROKEN = "broken"  # tfmem does not run


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        what: the thing that was looked at.
        state: whether it works.
        found: what was found.
        cure: what the user can do; "" if nothing has to be done.
    """

    what: str
    state: FindingState
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the doctor looks at, so that a test can break each part.

    Attributes:
        options: those of the environment.
        python_headers: the folder that holds Python.h.
        cards: files of NVIDIA's cards.
        driver: the file in which NVIDIA's driver says its version.
        imported: imports a module.
    """

    options: Options
    python_headers: Path
    cards: tuple[Path, ...] = ()
    driver: Path = Path("/proc/driver/nvidia/version")
    imported: Callable[[str], Any] = importlib.import_module

    @classmethod
    def here(cls) -> Surroundings:
        """This machine, with the options of the environment."""
        cards = tuple(sorted(Path("/dev").glob("nvidia[0-9]*")))
        return cls(Options.from_env(), build_flags.python_include(), cards)


def examine(machine: Surroundings) -> Iterator[Finding]:
    """Look at one part after another. If a look fails, that is a finding as well."""
    for what, look in LOOKS.items():
        try:
            yield Finding(what, *look(machine))
        except Exception as error:
            cure = "" if isinstance(error, TfmemError) else "report this, with what `tfmem doctor --json` prints"
            yield Finding(what, FindingState.BROKEN, f"{type(error).__name__}: {error}", cure)


Look = tuple[FindingState, str] | tuple[FindingState, str, str]


def _tensorflow(machine: Surroundings) -> Look:
    try:
        tf = machine.imported("tensorflow")
    except ImportError as error:
        return FindingState.BROKEN, f"cannot be imported: {error}", "pip install 'tensorflow>=2.21,<2.22'"
    version = str(tf.__version__)
    if version.split(".")[:2] != ["2", "21"]:
        return FindingState.BROKEN, f"{version}; tfmem is for 2.21", "pip install 'tensorflow>=2.21,<2.22'"
    return FindingState.WORKS, version


def _keras(machine: Surroundings) -> Look:
    try:
        keras = machine.imported("keras")
    except ImportError as error:
        return FindingState.LACKS, f"cannot be imported: {error}", "pip install keras"
    backend = keras.backend.backend()
    if backend != "tensorflow":
        return FindingState.LACKS, f"{keras.__version__} on {backend}", "export KERAS_BACKEND=tensorflow"
    return FindingState.WORKS, f"{keras.__version__} on TensorFlow"


def _onednn(machine: Surroundings) -> Look:
    stats = machine.imported("tfmem.devices").memory(machine.imported("custom_ops.load").load(), "/device:CPU:0")
    if stats.bytes_in_use < 0:
        found = "off: the CPU's allocator counts nothing, so plans for a CPU rest on estimates"
        return FindingState.LACKS, found, "export TF_ENABLE_ONEDNN_OPTS=1"
    return FindingState.WORKS, "on: memory of CPU steps is measured"


def _headers(machine: Surroundings) -> Look:
    if not (machine.python_headers / "Python.h").is_file():
        found = f"no Python.h in {machine.python_headers}: a checkout cannot be built"
        return FindingState.LACKS, found, "apt-get install python3-dev g++"
    return FindingState.WORKS, str(machine.python_headers)


def _library(machine: Surroundings) -> Look:
    library = machine.imported("custom_ops.load").load()
    return FindingState.WORKS, library.path.name


def _driver(machine: Surroundings) -> Look:
    try:
        line = machine.driver.read_text().partition("\n")[0]
    except OSError:
        cure = "install NVIDIA's driver, version 525 or later" if machine.cards else ""
        return (FindingState.BROKEN if machine.cards else FindingState.LACKS), "no NVIDIA driver", cure
    return FindingState.WORKS, line


def _gpus(machine: Surroundings) -> Look:
    tf = machine.imported("tensorflow")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
        return FindingState.WORKS, ", ".join(names)
    if machine.cards:
        cure = "pip install 'tensorflow[and-cuda]', and check CUDA_VISIBLE_DEVICES"
        return FindingState.BROKEN, f"TensorFlow sees none of {many(len(machine.cards), 'card')}", cure
    return FindingState.LACKS, "none: steps run on the CPU"


def _link(machine: Surroundings) -> Look:
    api = machine.imported("tfmem.api")
    link = api.make_engine(machine.options).link
    return (
        FindingState.WORKS,
        f"{size(round(link.offload))}/s out of the device's memory, {size(round(link.prefetch))}/s back",
    )


def _nvrtc(machine: Surroundings) -> Look:
    try:
        version = machine.imported("custom_ops.jit.nvrtc").compiler_version()
    except KernelError as error:
        needed = FindingState.BROKEN if machine.cards else FindingState.LACKS
        why = str(error).partition(" (")[0]
        return needed, f"no kernels for GPUs can be compiled: {why}", "pip install 'tfmem[gpu]'"
    return FindingState.WORKS, str(version)


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be made in a folder: permissions do not say so of every file system, nor to root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cache(machine: Surroundings) -> Look:
    given = machine.options.cache_directory
    if not given:
        return FindingState.LACKS, "none: each process profiles and compiles again", "unset TFMEM_CACHE_DIR"
    folder = Path(given)
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    above = next(each for each in (folder, *folder.parents) if each.exists())
    if not _can_be_written(above):
        return FindingState.LACKS, f"{folder} cannot be written", "set TFMEM_CACHE_DIR to a folder of yours"
    if not files:
        return FindingState.WORKS, f"{folder}, empty"
    oldest = many(round((time.time() - min(file.stat().st_mtime for file in files)) / DAY), "day")
    total = size(sum(file.stat().st_size for file in files))
    return FindingState.WORKS, f"{folder}: {many(len(files), 'file')}, {total}, the oldest {oldest} old"


LOOKS: dict[str, Callable[[Surroundings], Look]] = {
    "TensorFlow": _tensorflow,
    "Keras": _keras,
    "op library": _library,
    "oneDNN": _onednn,
    "headers": _headers,
    "driver": _driver,
    "GPUs": _gpus,
    "link": _link,
    "NVRTC": _nvrtc,
    "cache": _cache,
}


def worst(findings: Sequence[Finding]) -> FindingState:
    """`BROKEN` if anything is; else `WORKS`: what is only lacking keeps no step from running."""
    return FindingState.BROKEN if any(each.state is FindingState.BROKEN for each in findings) else FindingState.WORKS
