"""Sentiment of sentences by a time-delay net, h_t = tanh(W x_t + sum over d in {1, 2, 4} of U_d h_(t-d) + b).

python -m examples.td_rnn
python -m examples.td_rnn --train trees/train.txt --test trees/dev.txt --hidden 128
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from examples import dynamic_training, sentences
from tfmem import dynamic

CLASSES = 2
DELAYS = (1, 2, 4)


class TDNet:
    """A net over sentences: a word's node has the words before it at each delay as children, as far as there are any.

    A sentence's answer is computed from its last word. Subclasses say what a word computes.
    """

    gates = 1
    vectors = 1  # of a word's state
    vocabulary: dict[str, int]

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: int,
        seed: int = 0,
        optimizer: dynamic.SGD | dynamic.Adam = dynamic_training.OPTIMIZER,
    ) -> None:
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.table = tf.Variable(tf.random.stateless_uniform([words, embedding], [seed, 1], -0.1, 0.1))
        self.input = tf.Variable(glorot([self.gates * hidden, embedding]))
        # Their sum is no larger than one matrix would be, lest states grow chaotic over a long sentence.
        self.delayed = [tf.Variable(glorot([self.gates * hidden, hidden]) / len(DELAYS)) for _ in DELAYS]
        self.bias = tf.Variable(tf.zeros([self.gates * hidden]))
        self.output = tf.Variable(glorot([CLASSES, hidden]))
        self.output_bias = tf.Variable(tf.zeros([CLASSES]))
        kinds = {
            "word": dynamic.node(self.of_word, children=range(len(DELAYS) + 1)),
            "answer": dynamic.node(self.of_answer, children=1),
        }
        self.handle = dynamic.specialize(
            [self.table, self.input, *self.delayed, self.bias, self.output, self.output_bias],
            kinds,
            state=(hidden,) * self.vectors,
            optimizer=optimizer,
        )

    def sums(self, word, states):
        """W x + sum of U_d h_(t-d) + b."""
        total = dynamic.affine(self.input, dynamic.embedding_lookup(self.table, word), self.bias)
        return dynamic.add_n([total, *map(dynamic.matvec, self.delayed, states)])

    def of_word(self, children, word):
        raise NotImplementedError

    def of_answer(self, children, label):
        h = children[0] if self.vectors == 1 else children[0][0]
        logits = dynamic.affine(self.output, h, self.output_bias)
        return dynamic.Result((), dynamic.sparse_softmax_cross_entropy(label, logits), logits)

    def graph(self, example: sentences.Sentence) -> dynamic.Node:
        """The graph of a sentence; an unknown word is word 0."""
        (text, label), node = example, self.handle.node
        states: list[dynamic.Node] = []
        for word in text.split():
            before = [states[-delay] for delay in DELAYS if delay <= len(states)]
            states.append(node("word", *before, self.vocabulary.get(word, 0)))
        return node("answer", states[-1], label)

    def labels(self, example: sentences.Sentence) -> list[int]:
        """The sentence's label."""
        return [example[1]]

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The last node of each sentence."""
        return batch.kinds.row_limits() - 1


class TDRNN(TDNet):
    """`h = tanh(sums)`."""

    def of_word(self, children, word):
        return dynamic.tanh(self.sums(word, children))


def read(path) -> list[sentences.Sentence]:
    """All sentences of a file."""
    kept, held_out = sentences.read(path)
    return kept + held_out


def train(net_class: type[TDNet], description: str | None, given: Sequence[str] | None) -> list[float]:
    """Trains a net over sentences as the command line says."""
    args = dynamic_training.options(description).parse_args(given)
    train, test = dynamic_training.data(args, read, sentences.made)
    vocabulary = dynamic_training.numbered([word for text, _ in train for word in text.split()])
    net = net_class(len(vocabulary) + 1, args.embedding, args.hidden)
    net.vocabulary = vocabulary
    return dynamic_training.fit(net, train, test, args, "sentences")


def main(given: Sequence[str] | None = None) -> list[float]:
    return train(TDRNN, __doc__, given)


if __name__ == "__main__":
    main()
