"""Workers of benchmarks: one that ends without a result, or does not end, says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import ROOT
from benchmarks.runs import in_process

WORKER = """
import json, os, sys, threading, time
task, result = json.loads(sys.argv[1]), sys.argv[2]
if "pid" in task:
    open(task["pid"] + ".part", "w").write(str(os.getpid()))
    os.rename(task["pid"] + ".part", task["pid"])
if "wrote" in task["does"]:
    open(result, "w").write(json.dumps({"status": "ok"}))
def waits_for_ever():
    open(task.get("there", os.devnull), "w").close()
    time.sleep(600)
if "hangs" in task["does"]:
    waits_for_ever()
if "fails" in task["does"]:
    raise RuntimeError("out of luck")
"""


@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("hangs", "timeout", "waits_for_ever"),
        ("wrote, then hangs", "ok", ""),
        ("fails", "error", "RuntimeError: out of luck"),
    ],
)
def test_a_worker_says_why_there_is_no_result(
    does: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seconds begin when it hangs: how long it takes to start is the machine's affair."""
    (tmp_path / "some_worker.py").write_text(WORKER)
    there, in_vain = tmp_path / "there", list[float | None]()

    class Started(subprocess.Popen[str]):
        def communicate(self, *given: Any, timeout: float | None = None) -> tuple[str, str]:
            _until(lambda: there.exists() or self.poll() is not None)
            try:
                return super().communicate(*given, timeout=timeout)
            except subprocess.TimeoutExpired:
                in_vain.append(timeout)
                raise

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = in_process("some_worker", {"does": does, "there": str(there)}, timeout=0.1)
    assert found["status"] == status
    assert said in found.get("message", "")
    assert in_vain == [0.1] * ("hangs" in does)  # it ends when it is asked to


def test_a_worker_ends_with_who_began_it(tmp_path: Path) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    pid = tmp_path / "pid"
    imports = "import json, sys; from benchmarks.runs import in_process"
    begin = f"{imports}; in_process('some_worker', json.loads(sys.argv[1]), 60)"
    task = json.dumps({"does": "hangs", "pid": str(pid)})
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    process = subprocess.Popen([sys.executable, "-c", begin, task], env={**os.environ, **paths})
    _until(pid.exists)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    _until(lambda: not Path("/proc", pid.read_text()).exists())


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
