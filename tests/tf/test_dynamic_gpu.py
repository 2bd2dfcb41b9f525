"""Dynamic nets on a GPU, without one: their kernel runs on the CPU, its driver is a fake."""

from __future__ import annotations

import pytest

from tests.tf import fake_gpu


@pytest.mark.timeout(660)
@pytest.mark.parametrize("file", ["dynamic", "dynamic_tiles"])
def test_nets_on_a_fake_gpu(file: str) -> None:
    fake_gpu.run_files(f"tests/tf/{file}_on_fake_gpu.py", op="dynamic_on_fake_gpu")
