"""Parts of TfmemRecurrent that need no TensorFlow: GPU programs on a fake CUDA driver, phases on a poor thread pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTS = (
    "cuda/cuda_driver",
    "memory/faults",
    "cuda/gpu_kernel",
    "memory/gpu_link",
    "memory/host_memory",
    "cuda/kernel_image",
    "text_reader",
    "cpu/phases",
    "memory/pinned_pool",
    "recurrent/recurrent_kernel",
    "recurrent/recurrent_program",
    "sha256",
)


def test_programs_are_launched_and_phases_are_run(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("recurrent_parts", PARTS)
