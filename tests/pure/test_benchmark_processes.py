"""Workers of benchmarks: one that ends without a result, or does not end, says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runs import in_process

WORKER = """
import json, sys, threading, time
task, result = json.loads(sys.argv[1]), sys.argv[2]
if "wrote" in task["does"]:
    open(result, "w").write(json.dumps({"status": "ok"}))
def waits_for_ever():
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
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = in_process("some_worker", {"does": does}, timeout=2)
    assert found["status"] == status
    assert said in found.get("message", "")
    assert found["process_seconds"] < 8
