"""Whatever sizes, types and attributes a graph brings, an op answers with a status and never ends the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tf.extreme_attributes import CASES, MODES, Case

SECONDS = 500


def outcomes(mode: str) -> dict[int, str]:
    """What became of each case; children that die are started again behind the case that killed them."""
    found: dict[int, str] = {}
    while len(found) < len(CASES):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # with it, each allocation that fails takes ten seconds
        command = [sys.executable, "-m", "tests.tf.extreme_attributes", mode, str(len(found))]
        try:
            result = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
            status, printed, said = result.returncode, result.stdout, result.stderr
        except subprocess.TimeoutExpired as late:
            status, printed, said = -1, late.stdout or b"", late.stderr or b""
        for line in printed.decode().splitlines():
            if line.startswith("DONE "):
                _, place, outcome = line.split(" ", 2)
                found[int(place)] = outcome
        if len(found) < len(CASES):
            assert f"CASE {len(found)}" in printed.decode(), said.decode()[-2000:]
            found[len(found)] = f"KILLED by {status}: {said.decode()[-300:]}"
    return found


@pytest.mark.sampled(3)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
def test_no_case_ends_the_process(mode: str) -> None:
    found = outcomes(mode)
    killed = [f"{CASES[place]}: {outcome}" for place, outcome in found.items() if outcome.startswith("KILLED")]
    assert not killed, "\n".join(killed)
    assert sum(outcome == "ran" for outcome in found.values()) > 50  # the table is not only refused as a whole
    for place, case in enumerate(CASES):
        if must_be_refused(case):
            assert found[place] != "ran", case


def must_be_refused(case: Case) -> bool:
    if case.op == "TfmemRecurrent":
        return not 1 <= case.attributes["units"] < 2**31 or case.attributes["directions"] != 1
    if case.op == "MemOpReserve":
        return min(case.attributes["sizes"], default=-1) < 0
    if case.op in ("MemOpOffload", "MemOpRelease", "MemOpAwait", "MemOpPrefetch"):
        return case.attributes["T"].name in ("string", "resource", "variant")
    return False
