"""Small steps whose regions are stitched, and what they make beside TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from graph_passes.report import STITCHED

PASSES = ("recurrent", "fusion")
BY_MODEL = tfmem.FusionOptions(tune="off")
RATE = 0.5
ROWS, FEATURES, CLASSES = 32, 12, 5


class Softmax:
    """Softmax regression by gradient descent; the loss and the largest logit come back.

    Attributes:
        variables: weights and bias.
        step: takes features and labels.
    """

    def __init__(self, extra: Callable[[Any], Any] | None = None) -> None:
        """`extra` is called with the logits while the step is traced."""
        self.variables = [tf.Variable(tf.zeros([FEATURES, CLASSES])), tf.Variable(tf.zeros([CLASSES]))]
        self._extra = extra
        self.step = tf.function(self.run)

    def run(self, x: Any, y: Any) -> Any:
        weights, bias = self.variables
        with tf.GradientTape() as tape:
            logits = x @ weights + bias
            if self._extra is not None:
                self._extra(logits)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, logits))
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(RATE * gradient)
        return loss, tf.reduce_max(logits)


def batch(seed: int = 0, rows: int = ROWS) -> tuple[tf.Tensor, tf.Tensor]:
    source = np.random.default_rng(seed)
    x = source.uniform(size=(rows, FEATURES)).astype(np.float32)
    y = np.eye(CLASSES, dtype=np.float32)[source.integers(CLASSES, size=rows)]
    return tf.constant(x), tf.constant(y)


def optimized(step: Any, **options: Any) -> Any:
    """Stitched from the first call on, but for what `options` say."""
    return tfmem.optimize(step, **{"passes": PASSES, "fusion": BY_MODEL, "cache_directory": "", **options})


def stitched_ops(report: tfmem.Report) -> list[str]:
    """Types of all ops that are in a region."""
    return [op for region in report.regions for step in region.steps for _, op in step.ops]


def require_stitched(x: Any, *ops: str) -> tfmem.Report:
    """That `x` runs regions, which hold ops of these types."""
    report = tfmem.report(x)
    assert report.decision == STITCHED, report
    assert set(ops) <= set(stitched_ops(report)), report
    return report


def close(results: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for result, other in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(np.asarray(result), np.asarray(other), tolerance, tolerance)


def run(step: Callable[..., Any], count: int = 5, *arguments: Any) -> list[Any]:
    """Results of so many steps, each on a different batch."""
    return [step(*(arguments or batch(seed))) for seed in range(count)]


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]
