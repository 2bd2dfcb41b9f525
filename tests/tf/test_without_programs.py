"""Ops on a GPU that none of their programs fits, without a GPU: its driver is a fake."""

from __future__ import annotations

import pytest

from tests.tf import fake_gpu


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("long", ["none", pytest.param("only", marks=pytest.mark.long)])
def test_the_cpu_computes_them(long: str) -> None:
    fake_gpu.run_file("without_programs", "without_programs_on_fake_gpu", long=long)
