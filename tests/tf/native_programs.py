"""C++ programs of this folder with parts of the op library: no GPU needed, only g++.

In this folder because the parts' errors are absl's, which TensorFlow's library holds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from custom_ops import build_flags

HERE = Path(__file__).parent
FAKE_DRIVER = ("fake_cuda.cc", "fake_cuda_graphs.cc", "fake_cuda_kernels.cc")


def build(program: str, parts: Sequence[str], folder: Path, flags: Sequence[str] = ("-O1",)) -> Path:
    """Compiles `program`.cc with `parts` of the op library, and links them into `folder`; the path of what comes out.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its words are on standard error.
    """
    sources = [build_flags.PACKAGE / "ops" / f"{part}.cc" for part in parts]
    sources.append(HERE / f"{program}.cc")
    objects = [folder / f"{build_flags.object_stem(source)}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        command = build_flags.compile_command(source, target)
        subprocess.run([*command, f"-I{HERE}", *flags], check=True)
    binary = folder / program
    link = [flag for flag in build_flags.link_command(objects, binary) if flag != "-shared"]
    driver = folder / "libcuda.so.1"
    subprocess.run([*link, *flags, *([str(driver)] if driver.exists() else [])], check=True)
    return binary


def build_fake_driver(folder: Path) -> None:
    """The fake CUDA driver, which programs of `folder` find through LD_LIBRARY_PATH."""
    shared = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wl,-soname,libcuda.so.1"]
    sources, target = [str(HERE / name) for name in FAKE_DRIVER], str(folder / "libcuda.so.1")
    subprocess.run([build_flags.compiler(), *shared, *sources, "-ldl", "-o", target], check=True)


def environment(folder: Path) -> dict[str, str]:
    """In which a program of `folder` finds the fake driver, and TensorFlow."""
    libraries = os.pathsep.join([str(folder), tf.sysconfig.get_lib()])
    return {**os.environ, "LD_LIBRARY_PATH": libraries}
