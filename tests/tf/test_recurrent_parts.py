"""Parts of TfmemRecurrent that need no TensorFlow: GPU programs on a fake CUDA driver, phases on a poor thread pool."""

from __future__ import annotations

from collections.abc import Callable


def test_programs_are_launched_and_phases_are_run(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("recurrent_parts")
