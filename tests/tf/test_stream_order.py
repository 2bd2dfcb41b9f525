"""The GPU mechanism's order of streams, on a fake CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTS = (
    "cuda/cuda_driver",
    "memory/faults",
    "memory/gpu_link",
    "memory/gpu_tickets",
    "memory/host_memory",
    "memory/pinned_pool",
)


def test_every_kernel_sees_its_data(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("stream_order", PARTS)
