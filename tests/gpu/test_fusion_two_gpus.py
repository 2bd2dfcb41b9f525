"""Steps that lie on two GPUs, stitched; one GPU is split in two where there is but one."""

from __future__ import annotations

import subprocess
import sys


def test_two_gpus() -> None:
    program = [sys.executable, "-m", "tests.tf.stitched_on_two_devices", "GPU"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
