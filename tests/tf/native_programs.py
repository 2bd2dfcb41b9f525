"""C++ programs of this folder that call the op library: no GPU needed, only g++.

In this folder because the library's errors are absl's, which TensorFlow's library holds. What is compiled is kept
(`tests.compiled`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from custom_ops import build_flags
from tests.compiled import compiler_key, kept

HERE = Path(__file__).parent
OPS = build_flags.PACKAGE / "ops"
OBJECTS = build_flags.PACKAGE.parent / "build" / "objects"  # of setup.py
FAKE_DRIVER = ("fake_cuda.cc", "fake_cuda_graphs.cc", "fake_cuda_kernels.cc")
SECONDS = 280  # for one call of the compiler


def built(name: str, reads: Sequence[Path], command: Callable[[Path], list[str]]) -> Path:
    """The file that a compiler's command makes, as `tests.compiled.kept` keeps it.

    Raises:
        subprocess.CalledProcessError: the compiler failed; what it said is on standard error.
    """

    def make(target: Path) -> None:
        subprocess.run(command(target), check=True, timeout=SECONDS)

    return kept(name, [*compiler_key(), tf.__version__, *command(Path(name)), *reads], make)


def object_file(source: Path, flags: Sequence[str] = ()) -> Path:
    """The object file of a C++ source that may include the op library's headers."""
    build_flags.write_generated()
    headers = [*build_flags.headers(), *HERE.parent.rglob("*.h"), *build_flags.GENERATED.rglob("*.h")]
    name = f"{source.parent.name}.{source.stem}.o"
    more = flags or _precompiled()
    return built(
        name,
        [source, *sorted(headers)],
        lambda target: [*build_flags.compile_command(source, target), f"-I{HERE}", *more],
    )


def _precompiled() -> list[str]:
    """The flags with which a source finds what setup.py precompiled; g++ reads the header where that does not fit."""
    found = sorted(OBJECTS.glob(f"*/{build_flags.PRECOMPILED.name}.gch"), key=lambda file: file.stat().st_mtime)
    return [flag for file in found[-1:] for flag in build_flags.precompiled_flags(file.with_suffix(""))]


def shared_library(name: str, objects: Sequence[Path], *libraries: Path) -> Path:
    """A shared library of objects that calls other libraries."""
    return built(
        f"{name}.so",
        [*objects, *libraries],
        lambda target: [*build_flags.link_command(objects, target), *map(str, libraries)],
    )


def build(program: str) -> Path:
    """The binary of `program`.cc, which calls the op library and the fake driver."""
    library, driver = build_flags.PACKAGE / build_flags.library_name(tf.__version__), fake_driver()
    return _program(program, [object_file(HERE / f"{program}.cc", ["-O1"])], [library, driver], ())


def build_with_parts(program: str, parts: Sequence[str], flags: Sequence[str]) -> Path:
    """The binary of `program`.cc and of sources of the op library, all compiled with more flags."""
    sources = [*(OPS / f"{part}.cc" for part in parts), HERE / f"{program}.cc"]
    return _program(program, [object_file(source, flags) for source in sources], [], flags)


def _program(name: str, objects: Sequence[Path], libraries: Sequence[Path], flags: Sequence[str]) -> Path:
    def command(target: Path) -> list[str]:
        link = [flag for flag in build_flags.link_command(objects, target) if flag != "-shared"]
        return [*link, *flags, *map(str, libraries), *(f"-Wl,-rpath,{library.parent}" for library in libraries)]

    return built(name, [*objects, *libraries], command)


def fake_driver() -> Path:
    """The fake CUDA driver."""
    shared = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wl,-soname,libcuda.so.1"]
    sources = [HERE / name for name in FAKE_DRIVER]
    reads = [*sources, *sorted(HERE.glob("*.h")), *sorted((HERE.parent / "cuda_on_cpu").glob("*.h"))]
    return built(
        "libcuda.so.1",
        reads,
        lambda target: [build_flags.compiler(), *shared, *map(str, sources), "-ldl", "-o", str(target)],
    )


def environment() -> dict[str, str]:
    """The environment in which a program finds TensorFlow, and the op library the fake driver."""
    libraries = os.pathsep.join([str(fake_driver().parent), tf.sysconfig.get_lib()])
    return {**os.environ, "LD_LIBRARY_PATH": libraries}
