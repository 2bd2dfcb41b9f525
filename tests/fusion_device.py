"""Fixtures of tests whose fusion kernels run on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from custom_ops import build_flags
from custom_ops.jit.device import DeviceContext
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    """g++ for kernels."""
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    return Compiler()


@pytest.fixture(scope="module")
def device(compiler: Compiler) -> Iterator[DeviceContext]:
    """A device whose kernels run on the CPU."""
    with CpuDevice(driver=Driver(), compile_source=compiler) as found:
        yield found
