"""Steps that lie on two devices of a CPU, stitched."""

from __future__ import annotations

from tests.tf.python_server import run_python


def test_two_devices_of_a_cpu() -> None:
    done = run_python(["-m", "tests.tf.stitched_on_two_devices", "CPU"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
