"""What tests of loops that end before their bound share: sizes, weights, and the check against TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import INPUTS, TOLERANCE, UNITS, numbers
from tests.tf.vectors import AVX512

BATCH, BOUND, WORDS = 3, 60, 5
R = tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.4)
W = tf.Variable(numbers(INPUTS, UNITS) * 0.5)


def check(function: Any, *arguments: Any, replaced: bool = True) -> tfmem.Report:
    """What each tuple of arguments gives."""
    optimized = tfmem.optimize(function, passes=("recurrent",))
    for given in arguments:
        expected = [np.asarray(each) for each in tf.nest.flatten(function(*given))]
        found = [np.asarray(each) for each in tf.nest.flatten(optimized(*given))]
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert b.dtype == bool or np.isfinite(b).all()
            most = 1.0 if AVX512 else np.max(np.abs(b.astype(float)), initial=1.0)
            np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * most)
    report = tfmem.report(optimized)
    assert bool(report.replaced) == replaced, report.not_replaced
    assert bool(report.not_replaced) == (not replaced), report.not_replaced
    return report
