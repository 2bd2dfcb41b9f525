"""What copies and kernels touch outlives them, on a fake CUDA driver that fails when asked to."""

from __future__ import annotations

from collections.abc import Callable


def test_nothing_is_given_back_while_it_is_used(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("lifetimes")
