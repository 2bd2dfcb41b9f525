"""Keras models whose steps draw, trained under a budget; each in a process of its own, for TensorFlow's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("draws_training.py")


@pytest.mark.parametrize("model", ["vae", "gan"])
def test_a_model_of_random_numbers_trains_as_without_a_budget(model: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFMEM_CACHE_DIR": "",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), model],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
