"""A net of two layers and its training step, for tests of what a budget does to other parts of a function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TwoLayers(tf.Module):
    """Both layers have the same weights, `[4, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(0.3 * tf.random.stateless_normal([4, 4], [1, 2]))

    def train(self, x: Any) -> Any:
        """A step of gradient descent on `[batch, 4]`; the loss."""
        with tf.GradientTape() as tape:
            h = tf.tanh(tf.tanh(x @ self.w) @ self.w)
            loss = tf.reduce_mean(h * h)
        self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
        return loss
