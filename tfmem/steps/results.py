"""Whether two runners of a step compute the same but for rounding: what one call of each makes, on copies.

A result may depend on rounding alone. A bias in front of a normalisation has a gradient of zero, of which rounding
leaves some 1e-9, and Adam makes a step of the learning rate out of its sign. So where results differ by more than
`MOST`, the first runner is called on numbers that are moved by rounding: what its own results differ by then counts as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfmem.steps.variable_copies import Copies, Run

MOST = 0.05  # of the largest number of a result: more is no order of sums
SENSITIVE = 4.0  # times what a result differs by on numbers that are moved by rounding
_HALF = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8}  # what rounding to a dtype moves a number by, as a share of it
_SINGLE, _TF32 = 2.0**-24, 2.0**-11


@dataclass(frozen=True)
class StepResults:
    """What one call makes: what it returns, and what its variables hold then; floats alone."""

    numbers: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, copies: Copies, run: Run) -> StepResults:
        """A call on copies."""
        returned = [each for each in tf.nest.flatten(copies.run(run)) if isinstance(each, tf.Tensor)]
        found = [each for each in (*returned, *copies.values()) if each.dtype.is_floating]
        return cls(tuple(tf.cast(each, tf.float64).numpy() for each in found))

    def differences(self, other: StepResults) -> list[float]:
        """The largest difference of each tensor, as a share of its largest number; infinite where NaN differs."""
        return [_difference(*pair) for pair in zip(self.numbers, other.numbers, strict=True)]


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    finite = np.isfinite(one)
    most = float(np.max(np.abs(one[finite]), initial=0.0))
    return float(np.max(np.abs(one[finite] - other[finite]), initial=0.0)) / (most or 1.0)


def unexplained(differs: Sequence[float], own: Callable[[], Sequence[float]]) -> float | None:
    """The largest difference that rounding does not explain; None if it explains all.

    Args:
        differs: of each result, between two runners.
        own: of each result, of one runner on numbers that are moved by rounding; asked only if it matters.
    """
    if all(each <= MOST for each in differs):
        return None
    allowed = [MOST + SENSITIVE * each if np.isfinite(each) else MOST for each in own()]
    return max((each for each, most in zip(differs, allowed, strict=True) if not each <= most), default=None)


def moved_by_rounding(copies: Copies, tf32: bool) -> Copies:
    """`copies`, their floats moved by about what rounding moves them by; no random stream of the program is drawn from.

    Args:
        copies: they are changed.
        tf32: whether factors of float32 are rounded to TensorFloat-32.
    """

    def moved(value: tf.Tensor, number: int) -> tf.Tensor:
        share = _HALF.get(value.dtype, _TF32 if tf32 else _SINGLE)
        signs = tf.random.stateless_uniform(tf.shape(value), (number, 0), -2 * share, 2 * share, tf.float32)
        return tf.cast(tf.cast(value, tf.float64) * (1 + tf.cast(signs, tf.float64)), value.dtype)

    copies.change(lambda value, number: moved(value, number) if value.dtype.is_floating else value)
    return copies
