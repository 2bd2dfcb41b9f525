"""Compiles kernels in another process, into a cache that this one then reads: NVRTC does one at a time in each.

`python -m custom_ops.jit.compile_ahead` is that other process; it is told what to do over its standard input."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.program import build
from custom_ops.spec import Configuration, RecurrentSpec


def compile_ahead(spec: RecurrentSpec, configurations: Sequence[Configuration], arch: int, cache: Cache) -> None:
    """Compile in a process of its own. What goes wrong there goes wrong again, and is told, where it is needed."""
    task = pickle.dumps((spec, list(configurations), arch, cache.folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        subprocess.run(
            [sys.executable, "-m", "custom_ops.jit.compile_ahead"],
            input=task,
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:  # no interpreter to start: this one compiles
        return


def main() -> None:
    spec, configurations, arch, folder = pickle.load(sys.stdin.buffer)
    for configuration in configurations:
        try:
            build(spec, configuration, arch, Cache(folder))
        except KernelError:
            continue


if __name__ == "__main__":
    main()
