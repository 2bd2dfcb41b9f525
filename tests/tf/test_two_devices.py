"""Steps that lie on two devices of a CPU, stitched."""

from __future__ import annotations

import subprocess
import sys


def test_two_devices_of_a_cpu() -> None:
    program = [sys.executable, "-m", "tests.tf.stitched_on_two_devices", "CPU"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
