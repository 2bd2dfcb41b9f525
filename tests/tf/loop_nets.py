"""Training steps with loops, whose lists wait for gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

STEPS = 40


def weights(seed: int) -> tf.Variable:
    return tf.Variable(0.2 * tf.random.stateless_normal([64, 64], [seed, 2]))


class TwoLoops:
    """What the first loop keeps for its gradient waits while the second one runs both ways."""

    def __init__(self) -> None:
        self.variables = [weights(1), weights(5)]

    def step(self, x: Any) -> Any:
        first, second = self.variables
        with tf.GradientTape() as tape:
            h = x
            for _ in tf.range(STEPS):
                h = tf.tanh(h @ first)
            for _ in tf.range(STEPS):
                h = tf.tanh(h @ second)
            loss = tf.reduce_mean(h * h)
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


class Scan:
    """`tf.scan` over rows; each step reads its own."""

    def __init__(self) -> None:
        self.variables = [weights(1)]

    def step(self, x: Any) -> Any:
        (variable,) = self.variables
        rows = tf.reshape(x, [16, -1, 64])
        with tf.GradientTape() as tape:
            states = tf.scan(lambda h, row: tf.sin(h @ variable + row), rows, initializer=tf.zeros_like(rows[0]))
            loss = tf.reduce_mean(states * states)
        return descended(loss, tape, self.variables)


class Mapped:
    """`tf.map_fn`: its steps are independent."""

    def __init__(self) -> None:
        self.variables = [weights(1)]

    def step(self, x: Any) -> Any:
        (variable,) = self.variables
        rows = tf.reshape(x, [16, -1, 64])
        with tf.GradientTape() as tape:
            found = tf.map_fn(lambda row: tf.reduce_mean(tf.tanh(tf.sin(row @ variable) @ variable)), rows)
            loss = tf.reduce_mean(found * found)
        return descended(loss, tape, self.variables)


class Between:
    """A loop of two states between other ops; it begins with what one of these made."""

    def __init__(self) -> None:
        self.variables = [weights(1), weights(5), weights(7)]

    def step(self, x: Any) -> Any:
        first, second, last = self.variables
        with tf.GradientTape() as tape:
            h = c = tf.nn.relu(x @ first)
            for _ in tf.range(STEPS):
                c = tf.sin(c + h)
                h = tf.tanh(c @ second)
            loss = tf.reduce_mean(tf.square(tf.sin(h @ last)))
        return descended(loss, tape, self.variables)


class Branching:
    """A loop whose steps take one of two ways, each with tensors that only its gradient reads."""

    def __init__(self) -> None:
        self.variables = [weights(1)]

    def step(self, x: Any) -> Any:
        (variable,) = self.variables
        with tf.GradientTape() as tape:
            h = x
            for number in tf.range(20):
                h = tf.tanh(h @ variable) if number % 2 == 0 else tf.sin(h @ variable) * 0.9
            loss = tf.reduce_mean(h * h)
        return descended(loss, tape, self.variables)


class Drawing:
    """A loop that draws random numbers: it runs once, in one piece."""

    def __init__(self) -> None:
        self.variables = [weights(1)]

    def step(self, x: Any) -> Any:
        (variable,) = self.variables
        with tf.GradientTape() as tape:
            h = x
            for _ in tf.range(20):
                h = tf.tanh(h @ variable) * tf.cast(tf.random.uniform(tf.shape(h), seed=5) > 0.1, tf.float32)
            loss = tf.reduce_mean(h * h)
        return descended(loss, tape, self.variables)


def descended(loss: Any, tape: tf.GradientTape, variables: list[tf.Variable]) -> Any:
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return loss
