"""Python programs in new processes that have imported TensorFlow already: the import takes longer than most programs.

A process of pytest has one server for each set of the variables that are read while TensorFlow is imported. The server
imports TensorFlow and what most programs import besides, and forks for each program. TensorFlow has run nothing by
then, and so has neither threads nor devices. What depends on how Python itself starts needs a separate interpreter
(`subprocess.run`).
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280
IMPORT_SECONDS, FORK_SECONDS = 280, 60
IMPORTED = ("tensorflow", "pulp", "pytest", "tfmem.api")  # before the server forks: what nearly all programs import
READ_AT_IMPORT = ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "TF_USE_LEGACY_KERAS")
CALL = """
import pickle, sys
function, arguments = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(function(*arguments), open(sys.argv[2], "wb"))
"""


def run_python(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs a program as `python *arguments` does, and captures what it prints.

    Args:
        arguments: "-c" and a program, "-m" and a module, or a file; then those of the program.
        environment: the program's; by default this process's.
        cwd: its folder; by default this process's.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    environment = dict(os.environ if environment is None else environment)
    server = _server(tuple((name, environment[name]) for name in READ_AT_IMPORT if name in environment))
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        task = {"arguments": list(arguments), "environment": environment, "cwd": str(cwd or Path.cwd())}
        status = server.run({**task, "output": str(output), "errors": str(errors)}, timeout)
        printed = [file.read_text(errors="replace") for file in (output, errors)]
    if status is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, *(text.encode() for text in printed))
    return subprocess.CompletedProcess(list(arguments), status, *printed)


def call(function: Callable[..., Any], *arguments: Any, timeout: float = SECONDS) -> Any:
    """What a function of a module returns in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        given, returned = Path(folder, "given"), Path(folder, "returned")
        given.write_bytes(pickle.dumps((function, arguments)))
        done = run_python(["-c", CALL, str(given), str(returned)], cwd=ROOT, timeout=timeout)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return pickle.loads(returned.read_bytes())


class Ended(NamedTuple):
    """How a program of `forked` ended.

    Attributes:
        status: its exit status, less than zero for a signal.
        output: what it printed, errors included.
        seconds: of the CPU, which it used.
    """

    status: int
    output: str
    seconds: float


def forked(*programs: Callable[[], object]) -> list[Ended]:
    """Runs programs side by side, each in a fork of this process that ends as Python does.

    For functions that `call` runs: TensorFlow must not have run anything in this process.
    """
    pipes, children = [os.pipe() for _ in programs], []
    for program, (_, end) in zip(programs, pipes, strict=True):
        child = os.fork()
        if not child:  # it prints to a pipe, for a program may limit the size of files
            for descriptor in (1, 2):
                os.dup2(end, descriptor)
            for descriptor in (each for pair in pipes for each in pair):
                os.close(descriptor)
            program()
            sys.exit()
        children.append(child)
    for _, end in pipes:
        os.close(end)
    with ThreadPoolExecutor(len(pipes)) as readers:
        printed = list(readers.map(_read_all, [begin for begin, _ in pipes]))
    ended = []
    for child, output in zip(children, printed, strict=True):
        _, status, used = os.wait4(child, 0)
        ended.append(Ended(os.waitstatus_to_exitcode(status), output, used.ru_utime + used.ru_stime))
    return ended


def _read_all(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        return file.read().decode(errors="replace")


class Server:
    """A process that forks for each program; it ends when this process does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.tf.python_server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        if self._number(IMPORT_SECONDS) is None:
            self._process.kill()
            raise TimeoutError(f"`{' '.join(command)}` takes more than {IMPORT_SECONDS} s to start")

    def run(self, task: Mapping[str, Any], seconds: float) -> int | None:
        """The exit status of a program, less than zero for a signal; None if it was killed because of its time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        child, status = self._number(FORK_SECONDS), self._number(seconds)
        if child and status is None:
            os.killpg(child, signal.SIGKILL)
            self._number(FORK_SECONDS)
        return status

    def _number(self, seconds: float) -> int | None:
        """The next number that the server prints; None if there is none in this time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of Python programs has ended; what it said is on standard error")
        return int(line)


@functools.cache
def _server(read_at_import: tuple[tuple[str, str], ...]) -> Server:
    others = {name: value for name, value in os.environ.items() if name not in READ_AT_IMPORT}
    return Server({**others, **dict(read_at_import)})


def _serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # else a program's last collection looks at all that was imported, for seconds
    print(0, flush=True)  # ready
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(**json.loads(line))
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(arguments: list[str], environment: dict[str, str], cwd: str, output: str, errors: str) -> None:
    os.setsid()
    for path, descriptor in ((os.devnull, 0), (output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    kind, *rest = arguments
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, cwd)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
