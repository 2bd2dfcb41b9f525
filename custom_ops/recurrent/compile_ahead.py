"""Compiles kernels in another process, into a cache that this one then reads: NVRTC does one at a time in each."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.recurrent.program import build
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

_LOG = logging.getLogger(__name__)

SECONDS = 600  # for one kernel; the slowest takes a few
WORDS = 2000  # characters of what a process said when it died


def compile_ahead(
    spec: RecurrentSpec, configurations: Sequence[Configuration], arch: int, cache: Cache, seconds: int = SECONDS
) -> dict[Configuration, str]:
    """Compile in a process of its own; whatever the compiler does there, this one goes on.

    Args:
        spec: what the kernels compute.
        configurations: the kernels.
        arch: compute capability, 90 for 9.0.
        cache: where they go.
        seconds: that one kernel may take.

    Returns:
        Those that cannot be compiled, with the compiler's words, or how its process died. What is neither here nor in
        the cache was not tried, because no process could be started.
    """
    refused: dict[Configuration, str] = {}
    left = list(configurations)
    while left:
        answers, death = _run(spec, left, arch, cache, seconds)
        if not answers:  # it did not even begin: this process compiles
            _LOG.warning("kernels are compiled one at a time, no other process could be started: %s", death)
            break
        done = answers[1:]
        refused |= {configuration: words for configuration, words in zip(left, done, strict=False) if words}
        left = left[len(done) :]
        if not left or not death:
            break
        refused[left.pop(0)] = death  # it died over this one; the others get a new process
    return refused


def _run(
    spec: RecurrentSpec, configurations: Sequence[Configuration], arch: int, cache: Cache, seconds: int
) -> tuple[list[str], str]:
    """What another process said: first that it began, then of each kernel "", or the compiler's words; and how it died,
    if it did."""
    task = pickle.dumps((spec, list(configurations), arch, cache.folder, seconds))
    # The alarm ends the process even while it is inside the compiler.
    program = f"import signal, sys; signal.alarm({seconds}); sys.path[:] = {sys.path!r}; "
    program += f"from {__name__} import main; main()"
    limit = seconds * (len(configurations) + 1)
    try:
        done = subprocess.run(
            [sys.executable or "python3", "-c", program], input=task, capture_output=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        return _answers(error.stdout or b""), _TOO_LONG.format(seconds)
    except OSError as error:
        return [], str(error)
    if done.returncode == -signal.SIGALRM:
        return _answers(done.stdout), _TOO_LONG.format(seconds)
    said = done.stderr.decode(errors="replace").strip()[-WORDS:] or "it said nothing"
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    death = f"the process that compiled it ended with {how}: {said}"
    return _answers(done.stdout), death if done.returncode else ""


_TOO_LONG = "compiling it took more than {} seconds"


def _answers(output: bytes) -> list[str]:
    """One JSON text a line; the last may be cut off."""
    return [str(json.loads(line)) for line in output.split(b"\n")[:-1]]


def main() -> None:
    """What the other process does: its task is on its standard input, its answers go to its standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    print(json.dumps("begun"), file=answers, flush=True)
    spec, configurations, arch, folder, seconds = pickle.load(sys.stdin.buffer)
    for configuration in configurations:
        signal.alarm(seconds)
        try:
            build(spec, configuration, arch, Cache(folder))
            words = ""
        except KernelError as error:
            words = str(error)
        print(json.dumps(words), file=answers, flush=True)
