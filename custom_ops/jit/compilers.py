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
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from custom_ops.background import POLL, has_ended
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.forked import Parent, said, serve

_LOG = logging.getLogger(__name__)

SECONDS = 600  # for one source; the slowest takes a few
NICE = 10  # how far they stand back: steps may be running meanwhile
ENDED = "the program has ended"


class Compilers:
    """A `CompileSource`, and a `Run` of other functions: any thread may call them, and so many run at once.

    A process is started when there is a source for it, and ends when this object goes, or, while it compiles, when the
    program ends. What a compiler does to its process costs that source alone. Where no process can be started, this one
    compiles. Equal sources compile once, also where several threads give one at the same time.
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
        self._parents: list[Parent] = []  # one, or none
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str, int, str, bool], Future[bytes]] = {}
        weakref.finalize(self, _end, self._idle, self._parents)

    def begin(self) -> None:
        """Start the process that the others are forks of: it imports what they need before there is work for them."""
        with contextlib.suppress(OSError), self._lock:
            self._parent()

    def __call__(self, source: str, arch: int, features: str = "", contract: bool = True) -> bytes:
        """See `nvrtc.compile_source`.

        Raises:
            KernelError: as there, or how the process that compiled it died, or the program has ended.
        """
        key = source, arch, features, contract
        with self._lock:
            known, compiled = self._compiled.get(key), Future[bytes]()
            if known is None:
                self._compiled[key] = compiled
        if known is not None:
            return known.result()
        try:
            compiled.set_result(bytes(self.run(nvrtc.compile_source, *key)))
        except BaseException as error:
            with self._lock:
                del self._compiled[key]  # the next one tries it again
            compiled.set_exception(error)
        return compiled.result()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of some module gives in another process; its arguments and its result are pickled.

        Raises:
            KernelError: the function raised one, or its process died, or the program has ended.
        """
        with self._room:
            if has_ended():
                raise KernelError(ENDED)
            process = self._begun(getattr(function, "__module__", ""))
            if process is None:
                return function(*arguments)
            answer = process.ask((function, arguments, self._seconds))
            if answer is None:
                raise KernelError(process.death(self._seconds))
            self._idle.append(process)
        done, found = answer
        if not done:
            raise KernelError(found)
        return found

    def _begun(self, module: str) -> _Process | None:
        """A process that waits for a task; None if none can be started."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        try:
            with self._lock:
                parent = self._parent()
            return _Process(parent, module)
        except OSError as error:
            with self._lock:
                self._parents.clear()  # the next task tries another one
            _LOG.warning("kernels are compiled one at a time, no other process could be started: %s", error)
            return None

    def _parent(self) -> Parent:
        if not self._parents:
            program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(int(sys.argv[1]))"
            self._parents.append(Parent(program))
        return self._parents[0]


class _Process:
    """One other process; see `work`."""

    def __init__(self, parent: Parent, module: str) -> None:
        """A fork of `parent`, in which `module` is imported.

        Raises:
            OSError: the parent has died.
        """
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        tasks, self._tasks = _pipe()
        self._answers, answers = _pipe()
        with tasks, answers:
            found = parent.fork(module, [tasks.fileno(), answers.fileno(), self._errors.fileno()])
        if found is None:
            raise OSError(parent.words())
        self._parent, self._number = parent, found

    def ask(self, task: Any) -> Any:
        """What it answers; None if it ended.

        Raises:
            KernelError: the program has ended; so has this process, then.
        """
        try:
            pickle.dump(task, self._tasks)
            self._tasks.flush()
            while not select.select([self._answers], [], [], POLL)[0]:
                if has_ended():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._number, signal.SIGKILL)
                    self.end()
                    raise KernelError(ENDED)
            return pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def death(self, seconds: int) -> str:
        """How it ended."""
        status = self._parent.status(self._number)
        words = said(self._errors)
        self.end()
        if status is None:
            return f"the process that started it ended: {self._parent.words()}"
        if status == -signal.SIGALRM:
            return f"compiling it took more than {seconds} seconds"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the process that compiled it ended with {how}: {words}"

    def end(self) -> None:
        """Let it end."""
        for file in (self._tasks, self._answers, self._errors):
            with contextlib.suppress(OSError):
                file.close()


def _pipe() -> tuple[Any, Any]:
    """Both ends, as files of bytes."""
    read, write = os.pipe()
    return os.fdopen(read, "rb"), os.fdopen(write, "wb")


def _end(processes: list[_Process], parents: list[Parent]) -> None:
    for process in processes:
        process.end()
    for parent in parents:
        parent.end()


def main(number: int) -> None:
    """What the process does that the others are forks of; `number` is that of its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the process that waits for it
    os.nice(NICE)
    with contextlib.suppress(KernelError):
        nvrtc.compiler_version()  # the library is loaded once
    serve(number, work)


def work(tasks: int, answers: int) -> None:
    """What the others do: tasks come from one file, and answers go into the other."""
    os.dup2(2, 1)  # whatever libraries print is no answer
    with os.fdopen(tasks, "rb") as asked, os.fdopen(answers, "wb") as told:
        while True:
            try:
                task = pickle.load(asked)
            except EOFError:
                return
            pickle.dump(_answer(*task), told)
            told.flush()


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: int) -> tuple[bool, Any]:
    signal.alarm(seconds)  # ends the process even while it is inside the compiler
    try:
        return True, function(*arguments)
    except KernelError as error:
        return False, str(error)
    finally:
        signal.alarm(0)
