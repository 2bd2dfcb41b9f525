"""The GPU mechanism's order of streams, on a fake CUDA driver."""

from __future__ import annotations

from collections.abc import Callable


def test_every_kernel_sees_its_data(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("stream_order")
