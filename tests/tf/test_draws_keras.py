"""Keras models whose steps draw, trained under a budget; each in a separate process, for TensorFlow's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tf.python_server import run_python

PROGRAM = Path(__file__).with_name("draws_training.py")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["vae", "gan"])
def test_a_model_of_random_numbers_trains_as_without_a_budget(model: str) -> None:
    environment = {
        **os.environ,
        "TFMEM_CACHE_DIR": "",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }
    done = run_python([str(PROGRAM), model], environment)
    assert done.returncode == 0, done.stderr[-4000:]
