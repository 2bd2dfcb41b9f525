"""Ops on a GPU that none of their programs fits, without a GPU: its driver is a fake."""

from __future__ import annotations

import pytest

from tests.tf import fake_gpu


@pytest.mark.timeout(660)
def test_the_cpu_computes_them() -> None:
    fake_gpu.run_file("without_programs", "without_programs_on_fake_gpu")
