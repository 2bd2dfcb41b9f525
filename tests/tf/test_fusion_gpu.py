"""TfmemFusion on a GPU, without one: its kernels run on the CPU, its driver is a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from custom_ops import build_flags
from tests.tf import fake_gpu

ON_FAKE_GPU = (
    "tests/tf/library_products_on_fake_gpu.py",
    "tests/tf/on_fake_gpu.py",
    "tests/tf/orders_on_fake_gpu.py",
    "tests/tf/product_steps_on_fake_gpu.py",
    "tests/tf/products_on_fake_gpu.py",
    "tests/tf/random_on_fake_gpu.py",
    "tests/tf/steps_on_fake_gpu.py",
)
PARTS = (
    "cuda/cuda_driver",
    "cuda/gpu_graph",
    "cuda/gpu_kernel",
    "cuda/kernel_image",
    "text_reader",
    "memory/faults",
    "memory/gpu_link",
    "memory/host_memory",
    "memory/pinned_pool",
    "sha256",
)


def test_launches_in_flight_have_addresses_of_their_own(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("graph_launches", PARTS)


def test_steps_run_in_any_order_that_they_allow(on_fake_driver: Callable[[str, Sequence[str]], None]) -> None:
    on_fake_driver("step_schedule", ("fusion/step_schedule",))


def test_regions_on_a_fake_gpu(tmp_path: Path) -> None:
    """In a process of their own: see `fake_gpu`."""
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    fake_gpu.build(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ON_FAKE_GPU]
    environment = {**os.environ, fake_gpu.FOLDER: str(tmp_path)}
    root = build_flags.PACKAGE.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
