"""Sizes, a tolerance and random numbers: what the tests of training share."""

from __future__ import annotations

from typing import Any

import numpy as np

INPUTS, UNITS, STEPS = 3, 7, 5
TOLERANCE = 2e-5


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")
