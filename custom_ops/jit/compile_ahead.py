"""Compiles kernels in another process, into a cache that this one then reads: NVRTC does one at a time in each."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.program import build
from custom_ops.spec import Configuration, RecurrentSpec


def compile_ahead(spec: RecurrentSpec, configurations: Sequence[Configuration], arch: int, cache: Cache) -> None:
    """Compile in a process of its own. What goes wrong there goes wrong again, and is told, where it is needed."""
    task = pickle.dumps((spec, list(configurations), arch, cache.folder))
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    try:
        subprocess.run(
            [sys.executable, "-c", program],
            input=task,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:  # no interpreter to start: this one compiles
        return


def main() -> None:
    """What the other process does: its task is on its standard input."""
    spec, configurations, arch, folder = pickle.load(sys.stdin.buffer)
    for configuration in configurations:
        try:
            build(spec, configuration, arch, Cache(folder))
        except KernelError:
            continue
