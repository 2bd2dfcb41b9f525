"""What every form is made of: sizes, weights, and the four usual ways to write a loop over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

ROWS, STEPS, INPUTS, UNITS = 4, 6, 3, 8

# One step: the item of the input and the states before it -> an output and the states after it.
Step: TypeAlias = Callable[..., tuple[Any, tuple[Any, ...]]]
Run: TypeAlias = Callable[[Any], Any]
Maker: TypeAlias = Callable[["Kit"], Run]


class Kit:
    """Makes the weights of one form, and remembers them for its gradient.

    Attributes:
        training: whether the function is being traced for training.
        layers: Keras's layers of the form.
        variables: its other weights.
    """

    def __init__(self) -> None:
        self.training = False
        self.layers: list[Any] = []
        self.variables: list[tf.Variable] = []
        self._dice = np.random.default_rng(0)

    def numbers(self, *shape: int, scale: float = 1.0) -> Any:
        return (self._dice.normal(size=shape) * scale).astype("float32")

    def weight(self, *shape: int, scale: float = 0.5) -> tf.Variable:
        """A weight of the form."""
        size = max(int(np.prod(shape[:-1])), 1) ** 0.5
        self.variables.append(tf.Variable(self.numbers(*shape, scale=scale / size * 2)))
        return self.variables[-1]

    def layer(self, layer: Any) -> Any:
        """A Keras layer, whose weights are weights of the form."""
        self.layers.append(layer)
        return layer

    def generators(self) -> list[Any]:
        """What the layers draw on from: each call starts where the one before it ended."""
        return [variable for layer in self.layers for variable in getattr(layer, "non_trainable_variables", ())]

    def weights(self) -> list[Any]:
        """All weights, once the form has run."""
        found = [weight for layer in self.layers for weight in layer.trainable_weights]
        return [*self.variables, *(weight.value if isinstance(weight, keras.Variable) else weight for weight in found)]


def time_major(x: Any) -> Any:
    """`[time, batch, ...]` of `[batch, time, ...]`, or the other way round."""
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])


def zeros(*sizes: int) -> tuple[Any, ...]:
    """Initial states of the given widths."""
    return tuple(tf.zeros([ROWS, size]) for size in sizes)


class StepCell(keras.layers.Layer):
    """A step as a cell of `keras.layers.RNN`."""

    def __init__(self, step: Step, sizes: Sequence[int], output: int) -> None:
        super().__init__()
        self.step, self.state_size, self.output_size = step, list(sizes), output

    def call(self, x: Any, states: Sequence[Any]) -> Any:
        """One step."""
        output, after = self.step(x, *states)
        return output, list(after)


def by_keras(step: Step, sizes: Sequence[int], x: Any, output: int = 0) -> Any:
    """The outputs of all steps, by `keras.layers.RNN`."""
    cell = StepCell(step, sizes, output or sizes[0])
    return keras.layers.RNN(cell, return_sequences=True)(x)


def by_scan(step: Step, sizes: Sequence[int], x: Any, output: int = 0) -> Any:
    """A loop by `tf.scan`."""

    def scanned(carry: Any, item: Any) -> Any:
        made, after = step(item, *carry[1:])
        return (made, *after)

    start = (tf.zeros([ROWS, output or sizes[0]]), *zeros(*sizes))
    return tf.scan(scanned, time_major(x), start)[0]


def by_while(step: Step, sizes: Sequence[int], x: Any, output: int = 0) -> Any:
    """A loop by `tf.while_loop` with a TensorArray; the states after the last step, too."""
    del output
    items = time_major(x)

    def body(index: Any, array: Any, *states: Any) -> Any:
        made, after = step(items[index], *states)
        return (index + 1, array.write(index, made), *after)

    array = tf.TensorArray(tf.float32, STEPS)
    done = tf.while_loop(lambda index, *_: index < STEPS, body, (0, array, *zeros(*sizes)))
    return [done[1].stack(), *done[2:]]


def by_for(step: Step, sizes: Sequence[int], x: Any, output: int = 0) -> Any:
    """A loop by `for`, which autograph converts."""
    del output
    items, states = time_major(x), zeros(*sizes)
    array = tf.TensorArray(tf.float32, STEPS)
    for index in tf.range(STEPS):
        made, states = step(items[index], *states)
        array = array.write(index, made)
    return array.stack(), states
