"""A Keras recurrent layer before and after `tfmem.optimize`, as calls to be timed: a pass, or a training step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.recurrent.cases import Case

LAYERS: dict[str, Callable[[int], keras.layers.Layer]] = {
    "lstm": lambda units: keras.layers.LSTM(units, return_sequences=True),
    "gru": lambda units: keras.layers.GRU(units, return_sequences=True),
    "canonical_gru": lambda units: keras.layers.GRU(units, return_sequences=True, reset_after=False),
}
COMPARED = 10  # steps of training whose losses are compared
RATE = 1 / 32  # of SGD, for each unit: the loss is a mean over units. It falls by 5 to 90% in those steps


@dataclass(frozen=True)
class Pair:
    """A computation before and after `tfmem.optimize`.

    Attributes:
        before: enqueues it as Keras has it.
        after: enqueues it as tfmem has it.
        error: how far what they compute is apart, relatively.
        seconds: that optimising took, and what ran to compare.
        replaced: the report's lines about layers that are one kernel now.
    """

    before: Callable[[], Any]
    after: Callable[[], Any]
    error: float
    seconds: float
    replaced: list[str]


def pair(case: Case) -> Pair:
    """Both sides of a case, compared.

    Raises:
        TfmemError: it cannot be optimised.
    """
    inputs = tf.random.stateless_normal((case.batch, case.steps, case.units), seed=(0, 1))
    return training(case, inputs) if case.training else inference(case, inputs)


def inference(case: Case, inputs: tf.Tensor) -> Pair:
    """A pass, by functions for any batch; the seconds are of a layer's first case, the others have the same kernels."""
    began = time.perf_counter()
    before, after = functions(case.layer, case.units, case.steps, case.layers)
    found = np.asarray(after(inputs))
    seconds = time.perf_counter() - began
    expected = np.asarray(before(inputs))
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return Pair(lambda: before(inputs), lambda: after(inputs), error, seconds, list(tfmem.report(after).replaced))


@functools.cache
def functions(layer: str, units: int, steps: int, layers: int) -> tuple[Any, Any]:
    """The layer's functions before and after, for any batch."""
    made = model(layer, units, steps, layers)

    @tf.function(input_signature=[tf.TensorSpec((None, steps, units), tf.float32)])
    def before(batch: tf.Tensor) -> tf.Tensor:
        return made(batch, training=False)

    return before, tfmem.optimize(before, passes=("recurrent", "offload"))


def training(case: Case, inputs: tf.Tensor) -> Pair:
    """A step of two models that start from the same weights.

    The targets are zeros, so that all of the loss is the layer's own; the error is that of the losses. A step is a call
    of the train function that `fit` and `train_on_batch` call, with tensors that are on the device already.
    """
    targets = tf.zeros_like(inputs)
    before, after = (model(case.layer, case.units, case.steps, case.layers) for _ in range(2))
    for each in (before, after):
        each.compile(keras.optimizers.SGD(case.units * RATE), "mean_squared_error")

    def losses(trained: keras.Model) -> np.ndarray:
        return np.array([trained.train_on_batch(inputs, targets) for _ in range(COMPARED)], float)

    def step(trained: keras.Model) -> Any:
        return trained.train_function(iter([(inputs, targets, None)]))

    began = time.perf_counter()
    tfmem.optimize(after, passes=("recurrent", "offload"))
    found = losses(after)
    seconds = time.perf_counter() - began
    expected = losses(before)
    error = float(np.max(np.abs(found / expected - 1)))
    return Pair(lambda: step(before), lambda: step(after), error, seconds, list(tfmem.report(after).replaced))


def model(layer: str, units: int, steps: int, layers: int) -> keras.Model:
    """The layer, or a stack of it, with the same weights each time."""
    keras.utils.set_random_seed(0)
    stack = [LAYERS[layer](units) for _ in range(layers)]
    return keras.Sequential([keras.Input((steps, units)), *stack])
