"""Some steps of a model on random data: measured time and peak, beside the predicted ones."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graph_passes.device_report import duration, size
from graph_passes.errors import GraphError
from graph_passes.plan_file import Plan
from graph_passes.report import Report
from tfmem.api import optimize, report
from tfmem.budgets import Budgets
from tfmem.capture import keras_functions
from tfmem.frontends.sample import specs_of
from tfmem.planner import plan
from tfmem.runtime.progress import shown

WARM_UP = 7  # steps that trace, observe and try plans


@dataclass(frozen=True)
class StepProfile:
    """What some steps took.

    Attributes:
        plan: what was predicted before the first step.
        report: of the step after the last.
        seconds: of each step after the warm-up.
        peak: the allocator's peak of a step, in bytes; None where the allocator does not count.
    """

    plan: Plan
    report: Report
    seconds: tuple[float, ...]
    peak: int | None

    def rows(self) -> list[tuple[str, str, str]]:
        """Lines of a table."""
        measured = statistics.median(self.seconds)
        return [
            ("step", duration(round(self.plan.seconds * 1e9)), duration(round(measured * 1e9))),
            ("peak", size(self.plan.peak), size(self.peak)),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The numbers and the report, for JSON."""
        return {
            "step": self.plan.subject,
            "seconds": list(self.seconds),
            "peak": self.peak,
            "predicted_seconds": self.plan.seconds,
            "predicted_peak": self.plan.peak,
            "report": json.loads(self.report.to_json()),
        }


def profile_step(x: Any, batch: int, memory_budget: Budgets, steps: int) -> StepProfile:
    """Run `steps` training steps of a compiled Keras model on random data. The model trains in this process only.

    Raises:
        GraphError: `x` is no compiled Keras model.
    """
    if not keras_functions.is_keras_model(x):
        raise GraphError(f"cannot profile a {type(x).__name__}; expected a compiled Keras model")
    budget: Any = memory_budget
    planned = plan(x, batch, budget=budget, curve=False)
    inputs, labels = tf.nest.map_structure(_random, specs_of(x, batch))
    optimize(x, memory_budget=memory_budget)
    seconds, peak = [], None
    with shown(True, lambda: f"running {steps} steps of {planned.subject}"):
        for _ in range(steps):
            counted = _reset_peak()
            began = time.perf_counter()
            x.train_on_batch(inputs, labels)
            seconds.append(time.perf_counter() - began)
            peak = int(tf.config.experimental.get_memory_info(_device())["peak"]) if counted else None
    return StepProfile(planned, report(x), tuple(seconds[WARM_UP:]), peak)


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    """Zeros for classes, which every loss takes; else random numbers."""
    return tf.random.uniform(spec.shape) if spec.dtype.is_floating else tf.zeros(spec.shape, spec.dtype)


def _device() -> str:
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _reset_peak() -> bool:
    try:
        tf.config.experimental.reset_memory_stats(_device())
    except ValueError:  # TensorFlow counts no memory of this device
        return False
    return True
