"""Dynamic nets on a GPU, without one: their kernel runs on the CPU, its driver is a fake."""

from __future__ import annotations

import pytest

from tests.tf import fake_gpu


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", ["dynamic", pytest.param("dynamic_tiles", marks=pytest.mark.long)])
def test_nets_on_a_fake_gpu(file: str) -> None:
    fake_gpu.run_file(file, "dynamic_on_fake_gpu")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_long_ones_on_a_fake_gpu() -> None:
    fake_gpu.run_file("dynamic", "dynamic_on_fake_gpu", long="only")
