"""A program without Python that serves a SavedModel: serve_saved_model.cc, built against TensorFlow's wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from custom_ops import build_flags
from tests.tf import native_programs


def served(
    model: Path, *inputs: str, library: Path | str | None = None, preloaded: bool = False, linked: bool = False
) -> subprocess.CompletedProcess[str]:
    """What the program says of a model's signature; its first output is on stdout.

    Args:
        model: the SavedModel.
        inputs: as the program takes them; the names are those of the signature.
        library: the op library; None: tfmem's; "": none.
        preloaded: whether the system's loader loads it, as for a program that cannot be changed.
        linked: whether the ops are linked into the program, as into a server that is built with them.
    """
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    folder = Path(tf.sysconfig.get_lib())
    libraries = [str(folder / name) for name in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2")]
    source = Path(__file__).with_name("serve_saved_model.cc")
    compile_only = [build_flags.compiler(), "-std=c++17", "-Wall", f"-I{tf.sysconfig.get_include()}", str(source)]
    objects = _objects() if linked else []
    program = native_programs.built(
        f"serve_saved_model{'_with_ops' if linked else ''}",
        [source, *objects],
        lambda target: [
            *[*compile_only, *map(str, objects), *libraries, "-ldl", "-pthread"],
            *[f"-Wl,-rpath,{folder}", "-o", str(target)],
        ],
    )
    if library is None:
        library = build_flags.PACKAGE / build_flags.library_name(tf.__version__)
    named = [f"serving_default_{given}" for given in inputs]
    environment = {**os.environ, **({"LD_PRELOAD": str(library)} if preloaded else {})}
    command = [str(program), "" if preloaded or linked else str(library), str(model), "StatefulPartitionedCall", *named]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)


def _objects() -> list[Path]:
    """What the op library was linked from; setup.py keeps it."""
    name = build_flags.library_name(tf.__version__)
    built = sorted(native_programs.OBJECTS.glob(f"*/{name}"), key=lambda file: file.stat().st_mtime)
    if not built:
        pytest.skip("needs the object files of `make build`")
    return sorted(built[-1].parent.glob("*.o"))


def numbers(done: subprocess.CompletedProcess[str]) -> np.ndarray:
    """The numbers that the program printed."""
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array([float(line) for line in done.stdout.split()])
