"""How the op library and the extension module are compiled and linked: the one place that setup.py and tests ask.

Plain g++ and TensorFlow's own flags; neither nvcc nor a CUDA toolkit, because the ops find the
CUDA driver when they first need it.
"""

import os
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
EXTENSION = "_extension.abi3.so"  # for every Python from 3.11 on
PRECOMPILED = PACKAGE / "ops" / "precompiled.h"
WARNINGS = ("-Wall", "-Wextra")
GENERATED = PACKAGE.parent / "build" / "generated"  # not where Bazel finds its own


def library_name(tensorflow_version: str) -> str:
    """The library's file name; TensorFlow's C++ interface is stable within a minor version."""
    major, minor = tensorflow_version.split(".")[:2]
    return f"_tfmem_ops.tf{major}.{minor}.so"


def sources() -> list[Path]:
    """All C++ sources of the op library, in a fixed order."""
    return sorted((PACKAGE / "ops").rglob("*.cc"))


def headers() -> list[Path]:
    """All C++ headers of the op library: when one changes, everything has to be compiled again."""
    return sorted((PACKAGE / "ops").rglob("*.h"))


def extension_sources() -> list[Path]:
    """All C++ sources of the extension module, in a fixed order."""
    return sorted((PACKAGE / "extension").glob("*.cc"))


def extension_headers() -> list[Path]:
    """All its C++ headers."""
    return sorted((PACKAGE / "extension").glob("*.h"))


def write_generated() -> None:
    """Writes the headers that are generated, if they are not there as they would be written now."""
    from custom_ops.expr import cpp  # NumPy is only found once TensorFlow is

    target, text = GENERATED / cpp.HEADER, cpp.header()
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as scratch:
            scratch.write(text)
        Path(scratch.name).replace(target)


def compiler() -> str:
    """The C++ compiler: $CXX, or g++."""
    return os.environ.get("CXX", "g++")


def compile_command(source: Path, object_file: Path) -> list[str]:
    """The command that compiles one source; what is generated is there for it."""
    import tensorflow as tf

    write_generated()

    # NDEBUG, because TensorFlow is built with it and some of its headers depend on it.
    own = ["-std=c++17", "-O2", "-fPIC", "-DNDEBUG", *WARNINGS, f"-I{PACKAGE.parent}", f"-I{GENERATED}"]
    # TensorFlow's headers as system headers: their warnings are not ours to repair.
    include = ["-isystem", tf.sysconfig.get_include()]
    flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]
    return [compiler(), *flags, *own, *include, "-c", str(source), "-o", str(object_file)]


def precompile_command(target: Path) -> list[str]:
    """The command that compiles `PRECOMPILED` to `target`, for sources that are compiled with the same flags."""
    *command, _, source, _, place = compile_command(PRECOMPILED, target)
    return [*command, "-x", "c++-header", "-c", source, "-o", place]


def precompiled_flags(header: Path) -> list[str]:
    """The flags with which a source is compiled as if it included `header` first, from `header`.gch if that fits."""
    return ["-include", str(header), "-Winvalid-pch"]


def link_command(objects: Sequence[Path], library: Path) -> list[str]:
    """The command that links the library."""
    import tensorflow as tf

    flags = tf.sysconfig.get_link_flags()
    return [
        compiler(),
        "-shared",
        "-o",
        str(library),
        *map(str, objects),
        *flags,
        "-ldl",
        "-pthread",
    ]


def python_include() -> Path:
    """Where Python's C headers are, if they are installed."""
    return Path(sysconfig.get_path("include"))


def extension_compile_command(source: Path, object_file: Path) -> list[str]:
    """The command that compiles one source of the extension module, which knows neither TensorFlow nor NumPy."""
    own = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", *WARNINGS, f"-I{PACKAGE.parent}"]
    return [compiler(), *own, "-isystem", str(python_include()), "-c", str(source), "-o", str(object_file)]


def extension_link_command(objects: Sequence[Path], library: Path) -> list[str]:
    """The command that links the extension module; the Python that loads it has what it calls."""
    return [compiler(), "-shared", "-o", str(library), *map(str, objects)]
