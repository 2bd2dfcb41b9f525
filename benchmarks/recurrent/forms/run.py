"""One form, plain and optimised: what tfmem did, and whether values and gradients are equal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.recurrent.forms import cells, gated, layers, loops, models, returns
from benchmarks.recurrent.forms.kit import INPUTS, ROWS, STEPS, Kit, Maker

FORMS: dict[str, Maker] = layers.FORMS | loops.FORMS | gated.FORMS | cells.FORMS | models.FORMS | returns.FORMS
TOLERANCE = 1e-4  # of the largest number of a tensor


@dataclass(frozen=True)
class Outcome:
    """What became of a form in one mode.

    Attributes:
        kind: "replaced"; "small" (replaced with an op for each number of a row, for small states alone); "part" (some
            loops were); "loop".
        error: the largest difference from plain TensorFlow, as a share of the largest number of its tensor.
        reason: why it stays.
    """

    kind: str
    error: float
    reason: str = ""

    @property
    def right(self) -> bool:
        """Whether the optimised form computes the same."""
        return self.error <= TOLERANCE


def outcome(name: str, training: bool) -> Outcome:
    """Run one form."""
    kit = Kit()
    run = FORMS[name](kit)
    x = tf.constant(np.random.default_rng(1).normal(size=[ROWS, STEPS, INPUTS]).astype("float32"))
    kit.training = training
    forward = tf.function(run)
    shapes = [tensor.shape for tensor in _floats(forward(x))]  # makes the weights
    dice = np.random.default_rng(2)
    factors = [tf.constant(dice.normal(size=shape).astype("float32")) for shape in shapes]
    weights = kit.weights()

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = _floats(run(x))
            loss = tf.add_n([tf.reduce_sum(t * factor) for t, factor in zip(found, factors, strict=True)])
        return loss, tape.gradient(loss, [*weights, x], unconnected_gradients="zero")

    function = step if training else forward
    optimized = tfmem.optimize(function, passes=("recurrent",))
    generators = kit.generators()
    starts = list(map(tf.identity, generators))
    plain, found = (_outputs(each, x, generators, starts) for each in (function, optimized))
    report = tfmem.report(optimized)
    error = max((_difference(a, b) for a, b in zip(plain, found, strict=True)), default=0.0)
    kind = ("part" if report.not_replaced else "replaced") if report.replaced else "loop"
    small = re.search(r"\b1 units, (\d+) states", " ".join(report.replaced))
    kind = "small" if kind == "replaced" and small and int(small[1]) > 1 else kind
    reason = "; ".join(line.partition(": ")[2] or line for line in report.not_replaced)
    return Outcome(kind, error, reason or ("" if report.replaced else "not found"))


def _outputs(function: Any, x: Any, generators: list[Any], starts: list[Any]) -> list[Any]:
    """What `function` gives, and what it leaves in the generators."""
    for generator, start in zip(generators, starts, strict=True):
        generator.assign(start)
    return [*tf.nest.flatten(function(x)), *map(tf.identity, generators)]


def _floats(found: Any) -> list[Any]:
    return [tensor for tensor in tf.nest.flatten(found) if tf.convert_to_tensor(tensor).dtype.is_floating]


def _difference(plain: Any, found: Any) -> float:
    a, b = (np.asarray(tf.convert_to_tensor(tensor), "float64") for tensor in (plain, found))
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    return float(np.abs(a - b)[finite].max(initial=0) / max(np.abs(a[finite]).max(initial=0), 1e-6))
