"""Processes that are ready at once: one imports what the others need, and these are forks of it.

Starting Python, importing what ranks kernels, and loading NVRTC take 0.6 s of a core. With a process for each of 64
cores that was five times what a net's kernels took. A fork takes some milliseconds. The program itself cannot be
forked: TensorFlow and CUDA have threads in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import IO

from custom_ops.background import POLL

ENDING = 5.0  # seconds that a process which answers no more may take to end
WORDS = 2000  # characters of what a process said when it died
_LONGEST = 4096  # bytes of a message
_FORK, _STATUS = "fork", "status"


class Parent:
    """The process that is forked. Any thread may call."""

    def __init__(self, program: str) -> None:
        """
        Args:
            program: Python code that ends with `serve(number, ...)`; it finds the number as its argument.

        Raises:
            OSError: there is no such Python.
        """
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-c", program, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )

    def fork(self, module: str, files: Sequence[int]) -> int | None:
        """The number of a new process, in which `module` is imported and which has these three files; None if this one
        has died."""
        return self._ask(f"{_FORK} {module}", files)

    def status(self, process: int) -> int | None:
        """How a process ended, as `Popen.returncode`; it is killed if it does not end. None if this one has died."""
        return self._ask(f"{_STATUS} {process}", ())

    def words(self) -> str:
        """What the process said before it died."""
        self.end()
        return said(self._errors)

    def end(self) -> None:
        """Let it end, and wait until it and its children have."""
        self._socket.close()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: str, files: Sequence[int]) -> int | None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            socket.send_fds(self._socket, [message.encode()], files)
            return int(self._socket.recv(_LONGEST))
        return None


def said(errors: IO[bytes]) -> str:
    """The end of what was written into a file."""
    errors.seek(0)
    return errors.read().decode(errors="replace").strip()[-WORDS:] or "it said nothing"


def serve(number: int, work: Callable[[int, int], None]) -> None:
    """What the process does that is forked, until the program closes its end of the socket `number`.

    Args:
        number: of the socket.
        work: what a fork does: it reads tasks from the first of its files, and writes answers into the second. The
            third is its standard error.
    """
    ended: dict[int, int] = {}
    with socket.socket(fileno=number) as asked:
        while True:
            message, files, _, _ = socket.recv_fds(asked, _LONGEST, 3)
            if not message:
                break
            what, _, name = message.decode().partition(" ")
            _reap(ended)
            found = _forked(asked, name, files, work) if what == _FORK else _status(int(name), ended)
            asked.send(str(found).encode())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _forked(asked: socket.socket, module: str, files: Sequence[int], work: Callable[[int, int], None]) -> int:
    with contextlib.suppress(ImportError):  # the fork will say so
        import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library of BLAS has
        process = os.fork()
    if process:
        for file in files:
            os.close(file)
        return process
    status = 1
    try:
        asked.close()
        tasks, answers, errors = files
        os.dup2(errors, 2)
        work(tasks, answers)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _reap(ended: dict[int, int]) -> None:
    """Notes how children ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def _status(process: int, ended: dict[int, int]) -> int:
    until = time.monotonic() + ENDING
    while process not in ended:
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)  # it may have closed its output and go on
        time.sleep(POLL)
        _reap(ended)
    return ended.pop(process)
