"""A pytest plugin for tests that need a GPU and no framework: `pytest_plugins = ("tests.gpu_device",)`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceContext]:
    """The GPU, current while a module's tests run; without one they are skipped, and say why."""
    try:
        found = DeviceContext()
    except KernelError as error:
        pytest.skip(str(error))
    with found:
        yield found
