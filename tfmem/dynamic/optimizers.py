"""Update rules that the op applies itself, by Keras's formulas and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np
import tensorflow as tf

from custom_ops.errors import DynamicError

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SGD:
    """`keras.optimizers.SGD`. With `momentum`, a step updates only the rows of a table that its batch looks up.

    Keras also moves the other rows, by their momentum.
    """

    learning_rate: float = 0.01
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

    def rates(self, _: tf.Tensor) -> tf.Tensor:
        """The numbers that the op gets in a step."""
        return tf.constant([self.learning_rate, self.momentum] if self.momentum else [self.learning_rate])

    def update(self, _: tf.Tensor, gradient: tf.Tensor, value: tf.Tensor, *slots: tf.Tensor) -> list[tf.Tensor]:
        """A parameter and its slots after a step, as the op computes them."""
        if not self.momentum:
            return [value - self.learning_rate * gradient]
        velocity = slots[0] * self.momentum - self.learning_rate * gradient
        return [value + velocity, velocity]


@dataclass(frozen=True)
class Adam:
    """`keras.optimizers.Adam`. A step updates only the rows of a table that its batch looks up (lazy Adam).

    Keras also moves the other rows, by their moments.
    """

    learning_rate: float = 0.001
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

    def rates(self, step: tf.Tensor) -> tf.Tensor:
        """The numbers that the op gets in a step; the first step is 1."""
        return tf.stack([self.learning_rate, self.beta_1, self.beta_2, self.epsilon, tf.cast(step, tf.float32)])

    def update(
        self, step: tf.Tensor, gradient: tf.Tensor, value: tf.Tensor, m: tf.Tensor, v: tf.Tensor
    ) -> list[tf.Tensor]:
        """A parameter and its slots after a step, as the op computes them; the first step is 1."""
        number = tf.cast(step, tf.float64)
        first, second = 1 - tf.constant(self.beta_1, tf.float64) ** number, 1 - self.beta_2**number
        rate = tf.cast(self.learning_rate * tf.sqrt(second) / first, tf.float32)
        m = m + (gradient - m) * (1 - self.beta_1)
        v = v + (gradient * gradient - v) * (1 - self.beta_2)
        return [value - m * rate / (tf.sqrt(v) + self.epsilon), m, v]


Optimizer = SGD | Adam


def checked(optimizer: Any) -> Optimizer | None:
    """The optimizer that `specialize` is given, checked.

    Raises:
        DynamicError: it is no update rule that the op knows.
    """
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    raise DynamicError(
        f"optimizer={optimizer!r}; expected tfmem.dynamic.SGD(...) or tfmem.dynamic.Adam(...). To use another one, "
        "give it the gradients of Handle.forward_backward"
    )


def _number(optimizer: Any, name: str) -> float:
    """A field as the op computes with it, in float32."""
    given = getattr(optimizer, name)
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if is_number and abs(given) <= _LARGEST:  # which NaN is not
        return float(np.float32(given))
    raise DynamicError(
        f"{type(optimizer).__name__}({name}={given!r}): expected a finite number, equal in all steps. For a schedule, "
        "give the gradients of Handle.forward_backward to a Keras optimizer"
    )
