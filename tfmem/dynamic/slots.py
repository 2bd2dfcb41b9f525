"""What an optimizer keeps of a net from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfmem.dynamic.dtypes import computed
from tfmem.dynamic.optimizers import Optimizer


class Slots(tf.Module):
    """The number of steps, and a variable beside each parameter for each of the optimizer's slots.

    TensorFlow's checkpoints and SavedModels find them here by their names, `steps`, `m` and `v`, or `momentum`.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[tf.Variable]) -> None:
        """Make all slots, for the first step."""
        super().__init__()
        self._names = optimizer.slots
        for slot in self._names:
            made = [_beside(parameter, f"{slot}_{number}") for number, parameter in enumerate(parameters)]
            setattr(self, slot, made)
        with tf.device("/CPU:0"):  # where the op reads it, also for a GPU
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")

    @property
    def in_order(self) -> tuple[tf.Variable, ...]:
        """The slots in the op's order: the first slot of each parameter, then the next slot of each."""
        return tuple(variable for slot in self._names for variable in getattr(self, slot))


def _beside(parameter: tf.Variable, name: str) -> tf.Variable:
    """Zeros on the parameter's device, where the op updates both."""
    with tf.device(parameter.device):
        shape = [size or 0 for size in parameter.shape]  # an input has no rows, and is not trained
        return tf.Variable(tf.zeros(shape, computed(parameter.dtype)), trainable=False, name=name)
