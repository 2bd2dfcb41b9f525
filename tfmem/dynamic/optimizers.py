"""Update rules that the op applies itself, by Keras's formulas and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from custom_ops.errors import DynamicError

Schedule: TypeAlias = keras.optimizers.schedules.LearningRateSchedule
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SGD:
    """`keras.optimizers.SGD`. With `momentum`, a step updates only the rows of a table that its batch looks up.

    Keras also moves the other rows, by their momentum.
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not (_number(self, "learning_rate") >= 0 and 0 <= _number(self, "momentum") < 1):
            raise DynamicError(f"{self}: expected 0 <= momentum < 1 and no negative learning rate")

    @property
    def rule(self) -> Literal["sgd", "momentum"]:
        """The rule's name in the op."""
        return "momentum" if self.momentum else "sgd"

    @property
    def slots(self) -> tuple[str, ...]:
        """Variables beside each parameter."""
        return ("momentum",) if self.momentum else ()

    def rates(self, step: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The numbers that the op gets in a step; the first step is 1."""
        rate = _rate(self.learning_rate, step, dtype)
        return tf.stack([rate, self.momentum] if self.momentum else [rate])

    def update(self, step: tf.Tensor, gradient: tf.Tensor, value: tf.Tensor, *slots: tf.Tensor) -> list[tf.Tensor]:
        """A parameter and its slots after a step, as the op computes them."""
        if not self.momentum:
            return [value - _rate(self.learning_rate, step, gradient.dtype) * gradient]
        velocity = slots[0] * self.momentum - _rate(self.learning_rate, step, gradient.dtype) * gradient
        return [value + velocity, velocity]


@dataclass(frozen=True)
class Adam:
    """`keras.optimizers.Adam`. A step updates only the rows of a table that its batch looks up (lazy Adam).

    Keras also moves the other rows, by their moments.
    """

    learning_rate: float | Schedule = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    rule: ClassVar[Literal["adam"]] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        names = ("learning_rate", "beta_1", "beta_2", "epsilon")
        rate, beta_1, beta_2, epsilon = (_number(self, name) for name in names)
        if not (rate >= 0 and 0 <= beta_1 < 1 and 0 <= beta_2 < 1 and epsilon > 0):
            raise DynamicError(f"{self}: expected 0 <= beta < 1, a positive epsilon and no negative learning rate")

    def rates(self, step: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The numbers that the op gets in a step; the first step is 1."""
        rate = _rate(self.learning_rate, step, dtype)
        return tf.stack([rate, self.beta_1, self.beta_2, self.epsilon, tf.cast(step, dtype)])

    def update(
        self, step: tf.Tensor, gradient: tf.Tensor, value: tf.Tensor, m: tf.Tensor, v: tf.Tensor
    ) -> list[tf.Tensor]:
        """A parameter and its slots after a step, as the op computes them; the first step is 1."""
        number = tf.cast(step, tf.float64)
        first, second = 1 - tf.constant(self.beta_1, tf.float64) ** number, 1 - self.beta_2**number
        own = tf.cast(_rate(self.learning_rate, step, gradient.dtype), tf.float64)
        rate = tf.cast(own * tf.sqrt(second) / first, gradient.dtype)
        m = m + (gradient - m) * (1 - self.beta_1)
        v = v + (gradient * gradient - v) * (1 - self.beta_2)
        return [value - m * rate / (tf.sqrt(v) + self.epsilon), m, v]


Optimizer = SGD | Adam
Given: TypeAlias = Optimizer | keras.optimizers.Optimizer | None


def checked(optimizer: Any) -> Given:
    """The optimizer that `specialize` is given, checked.

    Raises:
        DynamicError: it is no update rule that the op knows.
    """
    if optimizer is None or isinstance(optimizer, Optimizer | keras.optimizers.Optimizer):
        return optimizer
    raise DynamicError(
        f"optimizer={optimizer!r}; expected tfmem.dynamic.SGD(...), tfmem.dynamic.Adam(...) or one of "
        "keras.optimizers. To use another one, give it the gradients of Handle.forward_backward"
    )


def _rate(given: float | Schedule, step: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The learning rate of a step; the first step is 1, which Keras's schedules count as 0."""
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return tf.cast(given(tf.cast(step, tf.int64) - 1), dtype)
    return tf.constant(given, dtype)


def _number(optimizer: Any, name: str) -> float:
    """A field as the op computes with it, in float32; 0 for a schedule."""
    given = getattr(optimizer, name)
    if name == "learning_rate" and isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return 0.0
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if is_number and abs(given) <= _LARGEST:  # which NaN is not
        return float(np.float32(given))
    raise DynamicError(
        f"{type(optimizer).__name__}({name}={given!r}): expected a finite number, or for learning_rate a "
        "schedule of keras.optimizers.schedules"
    )
