"""A test is marked by the folder it lies in: tests/pure, tests/tf, tests/jit, tests/gpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read by TensorFlow when it is first imported, so it is set before any test module is.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow turns oneDNN on by itself on some processors only; without it the CPU's allocator keeps no statistics.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

TIERS = ("pure", "tf", "jit", "gpu")
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return None
    if not tf.test.is_built_with_cuda():
        return f"TensorFlow {tf.__version__} here is built without CUDA"
    return "TensorFlow finds no GPU on this machine"
