"""TfmemStepDraws on a GPU, without one: its kernels run on the CPU, its driver is a fake."""

from __future__ import annotations

import pytest

from tests.tf import fake_gpu


@pytest.mark.timeout(1200)
def test_draws_on_a_fake_gpu() -> None:
    fake_gpu.run_file("step_draws", "step_draws_on_fake_gpu")
