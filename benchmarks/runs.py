"""What benchmarks share: their command line, which cases are asked for, and cases in separate processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from benchmarks.records import ROOT, commit, load

ENDING = 10.0  # seconds that a process which took too long has to say where it was
SHOWN = 4000  # characters of what a process wrote


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str:
        """Unique; parts are separated by slashes."""


AnyCase = TypeVar("AnyCase", bound=Named)


def command_line(module: str, document: str | None, output: str = "") -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.MODULE`.

    Args:
        module: without `benchmarks.`.
        document: its docstring.
        output: the file that results go to if no other is named; "" for a module that runs no cases.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=document,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if output:
        parser.add_argument("--output", type=Path, default=Path(output), help="results (JSON)")
        parser.add_argument("--resume", type=Path, help="earlier results to start from")
        parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX", help="cases to run, by start of name")
        parser.add_argument("--again", action="store_true", help="run cases that have a result, too")
        parser.add_argument("--list", action="store_true", help="name the cases and stop")
        parser.add_argument("--total-seconds", type=float, default=540, help="begin no case when this is over (540)")
    return parser


def asked(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    cases: Sequence[AnyCase],
    table: Callable[[Mapping[str, Mapping[str, Any]]], list[str]] | None = None,
) -> tuple[argparse.Namespace, list[AnyCase]]:
    """The options, and the cases to run; none where their names or a `table` of results were asked for, and printed.

    Raises:
        ValueError: a pattern of `--only` fits no case.
    """
    if table:
        parser.add_argument("--table", type=Path, help="results to make a table of, and run nothing")
    options = parser.parse_args(arguments)
    if table and options.table:
        print("\n".join(table(existing(parser, options.table)["cases"])))
        return options, []
    found = named(cases, options.only)
    if options.list:
        print("\n".join(case.name for case in found))
        return options, []
    return options, found


def existing(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """Results that have to be there; without them the command ends with a message."""
    results = load(path)
    if results is None:
        parser.error(f"{path} does not exist; run the benchmark that writes it first")
    return results


def waiting(cases: Sequence[AnyCase], results: Mapping[str, Any], options: argparse.Namespace) -> Iterator[AnyCase]:
    """The cases without a result, one after the other until the time is over."""
    deadline = time.monotonic() + options.total_seconds
    for case in cases:
        if time.monotonic() < deadline and (options.again or case.name not in results["cases"]):
            yield case


def named(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """The cases whose names start with one of `patterns`; all of them for none.

    Raises:
        ValueError: a pattern fits no case.
    """
    for pattern in patterns:
        if not any(case.name.startswith(pattern) for case in cases):
            raise ValueError(f"no case starts with '{pattern}'; --list shows them")
    return [case for case in cases if not patterns or case.name.startswith(tuple(patterns))]


def in_process(module: str, task: Mapping[str, Any], timeout: float, **environment: str) -> dict[str, Any]:
    """Runs `python -m MODULE TASK RESULT`, the task as JSON, the result a file; the task with what it measured.

    Args:
        module: of a worker.
        task: what it is to do.
        timeout: seconds.
        environment: variables besides those of this process.

    Returns:
        The task, the result's values, "commit" and "process_seconds". Where there is no result, "status" is "timeout"
        or "error", and "message" says more.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, json.dumps(task), str(path)]
        # Without oneDNN, which TensorFlow turns on by itself on some processors only, the CPU's allocator keeps no
        # statistics. Profiles of earlier cases must not help later ones.
        defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}
        variables = {**defaults, **os.environ, "TFMEM_CACHE_DIR": "", **environment}
        began = time.monotonic()
        outcome: dict[str, Any]
        status, said = _run(command, variables, timeout)
        for place in sorted({str(ROOT), *sys.path} - {""}, key=len, reverse=True):  # results name no machine's paths
            said = said.replace(f"{place}/", "")
        if path.exists():
            outcome = json.loads(path.read_text())
        elif status is None:
            outcome = {"status": "timeout", "message": f"no result in {timeout:.0f} s; its threads were at: {said}"}
        else:
            outcome = {"status": "error", "message": f"exit status {status}, and no result: {said}"}
        if outcome["status"] in ("error", "timeout"):
            print(said, file=sys.stderr, flush=True)
    return {**task, **outcome, "commit": commit(), "process_seconds": round(time.monotonic() - began, 1)}


def _run(command: list[str], variables: Mapping[str, str], timeout: float) -> tuple[int | None, str]:
    """The exit status, None if it took too long; and the end of what it wrote, then with where its threads were.

    It ends with this process, where that is asked to end: it would disturb whatever is measured next.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**variables, "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that processes which it started end with it
    )
    main = threading.current_thread() is threading.main_thread()  # other threads may set no handler
    before = signal.signal(signal.SIGTERM, _end) if main else None
    status: int | None = None
    try:
        said = process.communicate(timeout=timeout)[1]
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        try:
            said = process.communicate(timeout=ENDING)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[1]
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return status, said.partition("\nExtension modules: ")[0][-SHOWN:]  # which come behind where threads were


def _end(signum: int, frame: FrameType | None) -> None:
    """End the run as ctrl-C does, with clean-up."""
    raise SystemExit(128 + signum)
