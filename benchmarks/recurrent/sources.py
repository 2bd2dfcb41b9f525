"""What benchmarks.recurrent.context runs, pure data, and the sources of FlashRNN and Haste, copied aside and made to
build with CUDA 13, PyTorch 2.11 and Python 3.12."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recurrent.cases import BATCHES, BOUNDS, UNITS, Case

# library, for FlashRNN its backend, and what is stored or, of float32, multiplied
SYSTEMS = (
    *(f"flashrnn fused {kind}" for kind in ("bfloat16", "float16", "tf32")),
    *(f"flashrnn alternating {kind}" for kind in ("bfloat16", "float16", "float32")),
    *(f"haste {kind}" for kind in ("float32", "tf32")),
)
GPU_INFO = "flashrnn/flashrnn/gpu_info/gpu_info.cc"
LOADER = "flashrnn/flashrnn/cuda_init.py"
# what CUDA 13 took out of cudaDeviceProp; FlashRNN only lists them
GONE = (
    "clockRate",
    "computeMode",
    "cooperativeMultiDeviceLaunch",
    "deviceOverlap",
    "kernelExecTimeoutEnabled",
    "maxTexture1DLinear",
    "memoryClockRate",
    "singleToDoublePrecisionPerfRatio",
)


@dataclass(frozen=True)
class Shape:
    """An LSTM whose units are in independent heads, or a plain one.

    Attributes:
        case: with the units of all heads.
        heads: how many; they have no recurrent weights between them.
        figure: whether it is one of FlashRNN's own figure.
    """

    case: Case
    heads: int = 1
    figure: bool = False

    @property
    def name(self) -> str:
        """Unique: that of the grid's case, or `figure/lstm/768/16/12 heads`."""
        words = ["figure"] * self.figure + [self.case.name]
        if self.heads > 1:
            words.append(f"{self.heads} heads")
        return "/".join(words)

    @property
    def precisions(self) -> tuple[str, ...]:
        """What ours is measured in."""
        return ("highest",) if self.case.training else tuple(BOUNDS)


def all_shapes() -> list[Shape]:
    """Those of FlashRNN's figure first."""
    figure = Case("lstm", 768, 16, steps=1024)
    shapes = [Shape(figure, figure=True), Shape(figure, heads=12, figure=True)]
    shapes.append(Shape(Case("lstm", 768, 16, steps=1024, training=True), figure=True))
    shapes += [Shape(Case("lstm", units, batch)) for units in UNITS for batch in BATCHES]
    return shapes + [Shape(Case("lstm", units, 20, training=True)) for units in UNITS]


@dataclass(frozen=True)
class Patch:
    """What is replaced in one file, wherever it is found, and it has to be found."""

    file: str
    pattern: str  # a regular expression
    text: str

    def applied(self, source: str) -> str:
        """The text of the file after it.

        Raises:
            ValueError: nothing in it is what the patch replaces.
        """
        found, count = re.subn(self.pattern, self.text, source)
        if not count:
            raise ValueError(f"{self.file} has nothing like '{self.pattern}'; is it another version of these sources?")
        return found


PATCHES = {
    "flashrnn": (
        *(Patch(GPU_INFO, rf'dict\["{field}"\] =\s*prop\.{field};', "") for field in GONE),
        # machine code for this GPU, where it has that of an older one made by the driver
        Patch(LOADER, "arch=compute_80,code=compute_80", "arch=compute_90,code=sm_90"),
        # a wait of up to ten seconds before each of its builds, for programs that build the same at once
        Patch(LOADER, r"time\.sleep\(random\.random\(\) \* 10\)", "pass"),
        # pages of the compiler's output
        Patch(LOADER, '"verbose": True', '"verbose": False'),
    ),
    "haste": (
        # the module is built of the LSTM alone
        Patch("frameworks/pytorch/support.cc", r"(?m)^.*\b(?!lstm_init)\w+_init\(.*\n", ""),
        Patch(
            "frameworks/pytorch/__init__.py",
            r"(?s)import torch as _.*",
            "from .lstm import LSTM\n\n__all__ = ['LSTM']\n",
        ),
    ),
}
# PyTorch's builder knows what is CUDA by the end of its name
HASTE_KERNELS = ("lstm_forward_gpu", "lstm_backward_gpu")


def prepared(library: str, source: Path, folder: Path) -> Path:
    """A patched copy of a clone, in `folder`; where Python finds its package.

    Raises:
        ValueError: `source` does not hold the library, or not a version that the patches are for.
    """
    place = folder / library
    shutil.copytree(source, place, ignore=shutil.ignore_patterns(".git"))
    for patch in PATCHES[library]:
        file = place / patch.file
        if not file.is_file():
            raise ValueError(f"{source} has no {patch.file}; is it a clone of {library}?")
        file.write_text(patch.applied(file.read_text()))
    if library == "haste":
        for name in HASTE_KERNELS:
            (place / "lib" / f"{name}.cu.cc").rename(place / "lib" / f"{name}.cu")
        (place / "frameworks" / "pytorch").rename(place / "haste_pytorch")
    return place


def haste_sources(place: Path) -> list[str]:
    """What the module of a patched Haste is built of."""
    glue = [place / "haste_pytorch" / f"{name}.cc" for name in ("lstm", "support")]
    return [str(file) for file in (*glue, *(place / "lib" / f"{name}.cu" for name in HASTE_KERNELS))]


def build_variables(folder: Path, loaded: Sequence[str]) -> dict[str, str]:
    """Environment variables for PyTorch's builder, whose results go to `folder`.

    CUDA's libraries, when pip installed them, have no names without a version, and their headers lie beside them, not
    beside the compiler. So they are linked to, and named as where to look last.

    Args:
        folder: an existing folder.
        loaded: paths of the libraries that this process has loaded.
    """
    links = folder / "libraries"
    links.mkdir()
    variables = {
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "LIBRARY_PATH": str(links),
    }
    for name in ("libcudart", "libcublas"):
        path = next((Path(each) for each in loaded if Path(each).name.startswith(f"{name}.so")), None)
        if path is None:
            continue
        (links / f"{name}.so").symlink_to(path)
        headers = path.parent.parent / "include"
        if headers.is_dir():
            variables["CPLUS_INCLUDE_PATH"] = str(headers)
    return variables
