"""What copies and kernels touch outlives them, on a fake CUDA driver that fails when asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTS = (
    "cuda/cuda_driver",
    "memory/faults",
    "cuda/gpu_kernel",
    "memory/gpu_link",
    "memory/gpu_tickets",
    "memory/host_memory",
    "cuda/kernel_image",
    "text_reader",
    "memory/pinned_pool",
    "recurrent/recurrent_kernel",
    "recurrent/recurrent_program",
    "sha256",
)


def test_nothing_is_given_back_while_it_is_used(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("lifetimes", PARTS)
