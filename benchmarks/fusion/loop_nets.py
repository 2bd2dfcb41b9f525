"""Nets whose loops the recurrent pass leaves: two decoders with attention, and Sinkhorn's iterations.

bahdanau    D. Bahdanau, K. Cho, Y. Bengio, arXiv 1409.0473: additive attention, before an LSTM's step
luong       M.-T. Luong, H. Pham, C. Manning, arXiv 1508.04025: general attention behind a GRU's step, its result fed
            to the next step
sinkhorn    M. Cuturi, arXiv 1306.0895: a matching of two sets of points, whose embeddings are trained through it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import tensorflow as tf

RATE = 0.1
WORDS, EMBEDDED = 500, 64


class LoopNet(ABC):
    """A net with a loop; two of the same sizes begin with the same weights.

    Attributes:
        variables: what is trained.
        inputs: of `infer` and `train`.
        infer: what the net computes.
        train: a step of gradient descent: the loss, and the gradients.
    """

    def __init__(self, shapes: list[list[int]], inputs: tuple[Any, ...]) -> None:
        """Draw weights of these shapes."""
        random = np.random.default_rng(1)
        self.variables = [tf.Variable(random.normal(0, 0.08, shape).astype(np.float32)) for shape in shapes]
        self.inputs = inputs
        self.infer = tf.function(self.outputs)
        self.train = tf.function(self._train)

    @abstractmethod
    def outputs(self, *inputs: Any) -> Any:
        """What the net computes of its inputs."""

    @abstractmethod
    def loss(self, *inputs: Any) -> Any:
        """What is minimised."""

    def _train(self, *inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(*inputs)
        gradients = [tf.convert_to_tensor(found) for found in tape.gradient(loss, self.variables)]
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        return loss, gradients


class _Decoder(LoopNet):
    """Takes a memory [batch, time, units] and words [batch, steps]; gives logits [steps, batch, WORDS]."""

    def __init__(self, shapes: list[list[int]], batch: int, time: int, units: int, steps: int) -> None:
        random = np.random.default_rng(0)
        memory = tf.constant(random.normal(size=(batch, time, units)).astype(np.float32))
        words = tf.constant(random.integers(WORDS, size=(batch, steps)).astype(np.int32))
        super().__init__([[WORDS, EMBEDDED], [units, WORDS], *shapes], (memory, words))
        self.units = units

    def loss(self, *inputs: Any) -> Any:
        labels = tf.transpose(inputs[1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.outputs(*inputs)))

    def outputs(self, *inputs: Any) -> Any:
        memory, words = inputs
        embedded = tf.nn.embedding_lookup(self.variables[0], tf.transpose(words))
        steps, keys = tf.shape(words)[1], self.keys(memory)
        written = tf.TensorArray(tf.float32, steps, element_shape=[None, self.units])

        def body(step: Any, first: Any, second: Any, written: Any) -> Any:
            first, second = self.step(embedded[step], first, second, keys, memory)
            return step + 1, first, second, written.write(step, first)

        zeros = tf.zeros([tf.shape(memory)[0], self.units])
        *_, written = tf.while_loop(lambda step, *_: step < steps, body, (0, zeros, zeros, written))
        return tf.einsum("sbu,uw->sbw", written.stack(), self.variables[1])

    @abstractmethod
    def keys(self, memory: Any) -> Any:
        """What is attended to, [batch, time, units]."""

    @abstractmethod
    def step(self, word: Any, first: Any, second: Any, keys: Any, memory: Any) -> tuple[Any, Any]:
        """The next two states, [batch, units]; the first is the output."""


class Bahdanau(_Decoder):
    """Additive attention by the last output, and an LSTM that reads what it finds."""

    def __init__(self, batch: int, time: int, units: int, steps: int) -> None:
        """Sizes; `units` is those of the memory, too."""
        cell = [[EMBEDDED + 2 * units, 4 * units], [4 * units]]
        super().__init__([[units, units], [units, units], [units], *cell], batch, time, units, steps)

    def keys(self, memory: Any) -> Any:
        """See `_Decoder`."""
        return tf.einsum("btf,fu->btu", memory, self.variables[2])

    def step(self, word: Any, first: Any, second: Any, keys: Any, memory: Any) -> tuple[Any, Any]:
        """See `_Decoder`."""
        query, score, kernel, bias = self.variables[3:]
        scores = tf.einsum("btu,u->bt", tf.tanh(keys + (first @ query)[:, None]), score)
        context = tf.einsum("bt,btf->bf", tf.nn.softmax(scores), memory)
        gates = tf.concat([word, context, first], 1) @ kernel + bias
        given, forget, new, out = tf.split(gates, 4, 1)
        second = tf.sigmoid(forget) * second + tf.sigmoid(given) * tf.tanh(new)
        return tf.sigmoid(out) * tf.tanh(second), second


class Luong(_Decoder):
    """A GRU that reads the last output, and general attention behind it."""

    def __init__(self, batch: int, time: int, units: int, steps: int) -> None:
        """Sizes; `units` is those of the memory, too."""
        cell = [[EMBEDDED + 2 * units, 2 * units], [EMBEDDED + 2 * units, units]]
        super().__init__([[units, units], [2 * units, units], *cell], batch, time, units, steps)

    def keys(self, memory: Any) -> Any:
        """See `_Decoder`."""
        return tf.einsum("btf,fu->btu", memory, self.variables[2])

    def step(self, word: Any, first: Any, second: Any, keys: Any, memory: Any) -> tuple[Any, Any]:
        """See `_Decoder`."""
        combine, gate, new = self.variables[3:]
        reset, update = tf.split(tf.sigmoid(tf.concat([word, first, second], 1) @ gate), 2, 1)
        proposed = tf.tanh(tf.concat([word, first, reset * second], 1) @ new)
        second = update * second + (1.0 - update) * proposed
        weights = tf.nn.softmax(tf.einsum("bu,btu->bt", second, keys))
        context = tf.einsum("bt,btf->bf", weights, memory)
        return tf.tanh(tf.concat([context, second], 1) @ combine), second


class Sinkhorn(LoopNet):
    """Two sets of points [batch, points, features] to a matching [batch, points, points], rows and columns of sum 1."""

    def __init__(self, batch: int, points: int, features: int, steps: int) -> None:
        """Sizes, and how often rows and columns are normalised."""
        random = np.random.default_rng(0)
        sets = [tf.constant(random.normal(size=(batch, points, features)).astype(np.float32)) for _ in range(2)]
        super().__init__([[features, features]], tuple(sets))
        self.steps = steps

    def outputs(self, *inputs: Any) -> Any:
        """See `LoopNet`."""
        left, right = (tf.einsum("bnf,fg->bng", points, self.variables[0]) for points in inputs)
        scores = tf.einsum("bng,bmg->bnm", left, right)

        def body(step: Any, rows: Any, columns: Any) -> Any:
            rows = -tf.reduce_logsumexp(scores + columns[:, None], 2)
            return step + 1, rows, -tf.reduce_logsumexp(scores + rows[:, :, None], 1)

        zeros = tf.zeros_like(scores[:, 0])
        _, rows, columns = tf.while_loop(lambda step, *_: step < self.steps, body, (0, zeros, zeros))
        return tf.exp(scores + rows[:, :, None] + columns[:, None])

    def loss(self, *inputs: Any) -> Any:
        """The points of equal place are to match."""
        return -tf.reduce_mean(tf.math.log(tf.linalg.diag_part(self.outputs(*inputs)) + 1e-6))
