"""Distribution strategies: steps of several replicas keep their numbers, whether tensors move or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

TIMEOUT = 220  # seconds; what waits for itself would never end


def started(module: str, *arguments: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", f"tests.tf.{module}", *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def require_equal(process: subprocess.Popen[str]) -> None:
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors[-3000:]
    assert output.endswith("equal\n")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cases", ["loops", "keras", pytest.param("tf_keras", marks=pytest.mark.long)])
def test_two_replicas(cases: str) -> None:
    with started("in_replicas", cases) as process:
        require_equal(process)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cases", ["loops", "keras", pytest.param("tf_keras", marks=pytest.mark.long)])
def test_two_fused_replicas(cases: str) -> None:
    with started("fused_replicas", cases) as process:
        require_equal(process)
