"""Other processes that compile, and do other work that would keep this one's interpreter busy.

NVRTC compiles one source at a time in each process, whatever its threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO

from custom_ops.background import POLL, has_ended
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cores import usable_cores

_LOG = logging.getLogger(__name__)

SECONDS = 600  # for one source; the slowest takes a few
NICE = 10  # how far they stand back: steps may be running meanwhile
ENDING = 5.0  # seconds that a process which answers no more may take to end
ENDED = "the program has ended"
WORDS = 2000  # characters of what a process said when it died


class Compilers:
    """A `CompileSource`, and a `Run` of other functions: any thread may call them, and so many run at once.

    A process is started when there is a source for it, and ends when this object goes, or, while it compiles, when the
    program ends. What a compiler does to its process costs that source alone. Where no process can be started, this one
    compiles.
    """

    def __init__(self, most: int | None = None, seconds: int = SECONDS) -> None:
        """
        Args:
            most: processes; one for each core if not given.
            seconds: that one source may take.
        """
        self._seconds = seconds
        self._room = threading.BoundedSemaphore(most or usable_cores())
        self._idle: list[_Process] = []
        weakref.finalize(self, _end, self._idle)

    def __call__(self, source: str, arch: int, features: str = "", contract: bool = True) -> bytes:
        """See `nvrtc.compile_source`.

        Raises:
            KernelError: as there, or how the process that compiled it died, or the program has ended.
        """
        return bytes(self.run(nvrtc.compile_source, source, arch, features, contract))

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of some module gives in another process; its arguments and its result are pickled.

        Raises:
            KernelError: the function raised one, or its process died, or the program has ended.
        """
        with self._room:
            if has_ended():
                raise KernelError(ENDED)
            process = self._begun()
            if process is None:
                return function(*arguments)
            answer = process.ask(((function, arguments), self._seconds))
            if answer is None:
                raise KernelError(process.death(self._seconds))
            self._idle.append(process)
        done, found = answer
        if not done:
            raise KernelError(found)
        return found

    def _begun(self) -> _Process | None:
        """A process that waits for a task; None if none can be started."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        try:
            process = _Process()
        except OSError as error:
            words = str(error)
        else:
            if process.ask(None) is not None:
                return process
            words = process.death(self._seconds)
        _LOG.warning("kernels are compiled one at a time, no other process could be started: %s", words)
        return None


class _Process:
    """One other process; see `main`."""

    def __init__(self) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        self._process = subprocess.Popen(
            [sys.executable or "python3", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def ask(self, task: Any) -> Any:
        """What it answers; None if it ended.

        Raises:
            KernelError: the program has ended; so has this process, then.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()
            while not select.select([self._process.stdout], [], [], POLL)[0]:
                if has_ended():
                    self._process.kill()
                    self.end()
                    raise KernelError(ENDED)
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def death(self, seconds: int) -> str:
        """How it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        self._process.kill()  # it may have closed its output and go on; one that ended is left alone
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-WORDS:] or "it said nothing"
        self.end()
        if status == -signal.SIGALRM:
            return f"compiling it took more than {seconds} seconds"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the process that compiled it ended with {how}: {said}"

    def end(self) -> None:
        """Let it end, and wait until it has."""
        with contextlib.suppress(OSError):
            self._process.communicate()
        self._errors.close()


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


def main() -> None:
    """What the other process does: tasks are on its standard input, its answers go to its standard output. A task that
    is None asks whether it has begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the process that waits for it
    os.nice(NICE)
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no answer
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(asked), answers)
        answers.flush()


def _answer(asked: Any) -> tuple[bool, Any]:
    if asked is None:
        return True, b""
    (function, arguments), seconds = asked
    signal.alarm(seconds)  # ends the process even while it is inside the compiler
    try:
        return True, function(*arguments)
    except KernelError as error:
        return False, str(error)
    finally:
        signal.alarm(0)
