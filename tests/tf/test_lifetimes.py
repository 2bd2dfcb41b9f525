"""What copies and kernels touch outlives them, on a fake CUDA driver that fails when asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTS = (
    "cuda_driver",
    "faults",
    "gpu_kernel",
    "gpu_link",
    "gpu_tickets",
    "host_memory",
    "kernel_image",
    "pinned_pool",
    "recurrent_kernel",
    "recurrent_program",
    "sha256",
)


def test_nothing_is_given_back_while_it_is_used(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("lifetimes", PARTS)
