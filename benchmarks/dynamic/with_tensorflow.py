"""One process of the benchmark: the same Tree-LSTM in TensorFlow, eager, node by node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dynamic.timing import measure, parts_of, show, words_of

EMBEDDING, CLASSES = 128, 5


def main(data: str, hidden: int, seconds: float, batch_sizes: list[int]) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(False)
    given = json.loads(Path(data).read_text())
    words = 1 + max(max(words_of(tree)) for tree in given)
    glorot = tf.keras.initializers.GlorotUniform(0)
    table = tf.Variable(tf.random.uniform([words, EMBEDDING], -0.1, 0.1))
    word, word_bias = tf.Variable(glorot([EMBEDDING, 3 * hidden])), tf.Variable(tf.zeros([3 * hidden]))
    pair, pair_bias = tf.Variable(glorot([2 * hidden, 5 * hidden])), tf.Variable(tf.zeros([5 * hidden]))
    output, output_bias = tf.Variable(glorot([hidden, CLASSES])), tf.Variable(tf.zeros([CLASSES]))
    variables = [table, word, word_bias, pair, pair_bias, output, output_bias]
    adam = tf.keras.optimizers.Adam(0.003)
    adam.build(variables)

    def walk(tree: list, states: list, labels: list) -> tuple[tf.Tensor, tf.Tensor]:
        if len(tree) == 2:
            i, o, u = tf.split(tf.gather(table, [tree[1]]) @ word + word_bias, 3, 1)
            c = tf.sigmoid(i) * tf.tanh(u)
        else:
            (left_h, left_c), (right_h, right_c) = walk(tree[1], states, labels), walk(tree[2], states, labels)
            i, f_left, f_right, o, u = tf.split(tf.concat([left_h, right_h], 1) @ pair + pair_bias, 5, 1)
            c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(f_left) * left_c + tf.sigmoid(f_right) * right_c
        h = tf.sigmoid(o) * tf.tanh(c)
        states.append(h)
        labels.append(tree[0])
        return h, c

    def train(trees: list) -> tf.Tensor:
        with tf.GradientTape() as tape:
            states: list[tf.Tensor] = []
            labels: list[int] = []
            for tree in trees:
                walk(tree, states, labels)
            logits = tf.concat(states, 0) @ output + output_bias
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for size in batch_sizes:
        batches = [(part, len(part)) for part in parts_of(given, size)]
        found = measure(batches, train, lambda loss: loss.numpy(), seconds)
        show(system="tensorflow eager", hidden=hidden, batch=size, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), [int(size) for size in sys.argv[4:]])
