"""What a workload is, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Workload:
    """One step of training or inference, with static shapes.

    Attributes:
        step: a `tf.function`. Of training, its result is the loss. Of inference it is a tuple: a scalar, whose way to
            the host ends a timed step, then what was computed.
        inputs: its arguments, which stay on the device.
        weights: the variables that it reads, but for `slots`.
        slots: gives the variables of an optimizer that makes them in the first step; None for inference.
        draws: whether it draws random numbers from a stateful op. XLA has another stream for these.
        moved: bytes that it reads and writes at least, if all it computes is in one kernel; 0 where that says little.
        calls: how many steps are timed together, the last of which is waited for.
    """

    step: Any
    inputs: tuple[tf.Tensor, ...]
    weights: Sequence[tf.Variable]
    slots: Callable[[], Sequence[tf.Variable]] | None = None
    draws: bool = False
    moved: int = 0
    calls: int = 1

    @property
    def training(self) -> bool:
        """Whether the step updates variables."""
        return self.slots is not None

    @property
    def state(self) -> list[tf.Variable]:
        """All variables, once the first step has run."""
        return [*self.weights, *(self.slots() if self.slots else ())]


class Source:
    """Weights and synthetic data, in float32 and of seed 0.

    Attributes:
        variables: all that were made, in order.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.variables: list[tf.Variable] = []

    def normal(self, *shape: int, scale: float = 1.0) -> tf.Variable:
        """A variable, N(0, scale^2)."""
        return self._variable(self._random.normal(0, scale, shape))

    def zeros(self, *shape: int) -> tf.Variable:
        """A variable."""
        return self._variable(np.zeros(shape))

    def ones(self, *shape: int) -> tf.Variable:
        """A variable."""
        return self._variable(np.ones(shape))

    def uniform(self, *shape: int) -> tf.Tensor:
        """Data in [0, 1)."""
        return tf.constant(self._random.random(shape, np.float32))

    def gaussian(self, *shape: int) -> tf.Tensor:
        """Data, N(0, 1)."""
        return tf.constant(self._random.normal(size=shape).astype(np.float32))

    def integers(self, least: int, end: int, shape: Sequence[int]) -> tf.Tensor:
        """Data in [least, end), int32."""
        return tf.constant(self._random.integers(least, end, shape).astype(np.int32))

    def one_hot(self, count: int, classes: int) -> tf.Tensor:
        """Labels, `[count, classes]`."""
        return tf.one_hot(self.integers(0, classes, [count]), classes)

    def _variable(self, value: np.ndarray) -> tf.Variable:
        self.variables.append(tf.Variable(value.astype(np.float32)))
        return self.variables[-1]
