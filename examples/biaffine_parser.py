"""Heads of words by a biaffine parser (Dozat and Manning 2017) over LSTMs, trained with `tfmem.dynamic`.

python -m examples.biaffine_parser
python -m examples.biaffine_parser --train train.conllu --test dev.conllu --hidden 128
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from examples import dependencies, dynamic_training
from examples.bilstm_tagger import LSTM
from tfmem import dynamic

MOST_HEADS = dependencies.MOST_WORDS + 1  # all words, and the root
NEVER = -1e9  # the score of a head that a shorter sentence has not


class Parser:
    """LSTMs in both directions; a word scores all words and the root as its head.

    Each word has one vector as a head and one as a dependent. The score of a pair is `h U d + u h`: a product of two
    states.
    """

    def __init__(
        self,
        words: dict[str, int],
        embedding: int = 64,
        hidden: int = 64,
        score: int = 48,
        seed: int = 0,
        optimizer: Any = dynamic_training.OPTIMIZER,
    ) -> None:
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.words = words
        self.table = tf.Variable(tf.random.stateless_uniform([len(words) + 2, embedding], [seed, 1], -0.1, 0.1))
        self.forth, self.back = LSTM(embedding, hidden, glorot), LSTM(embedding, hidden, glorot)
        self.head = tf.Variable(glorot([score, 2 * hidden]))
        self.dependent = tf.Variable(glorot([score, 2 * hidden]))
        self.pairs = tf.Variable(glorot([score, score]))
        self.alone = tf.Variable(tf.zeros([score]))
        state = (hidden, hidden)
        kinds = self.forth.kinds("forth", self.table, state) | self.back.kinds("back", self.table, state)
        kinds["head"] = dynamic.trace(self.of_head, children=[state, state])
        kinds["dependent"] = dynamic.trace(self.of_dependent, children=[state, state])
        kinds["arc"] = dynamic.trace(self.of_arc, children=range(3, MOST_HEADS + 2))
        weights = [self.head, self.dependent, self.pairs, self.alone]
        parameters = [self.table, *self.forth.parameters, *self.back.parameters, *weights]
        self.handle = dynamic.specialize(parameters, kinds, state=score, optimizer=optimizer)
        self.arcs = [self.handle.number_of("arc", count) for count in range(3, MOST_HEADS + 2)]

    def of_head(self, children: Any) -> Any:
        (forth, _), (back, _) = children
        return tf.nn.relu(tf.linalg.matvec(self.head, tf.concat([forth, back], 0)))

    def of_dependent(self, children: Any) -> Any:
        """What all heads are multiplied by: `U d + u`."""
        (forth, _), (back, _) = children
        dependent = tf.nn.relu(tf.linalg.matvec(self.dependent, tf.concat([forth, back], 0)))
        return tf.linalg.matvec(self.pairs, dependent) + self.alone

    def of_arc(self, children: Any, head: Any) -> dynamic.Result:
        dependent, *heads = children
        scores = tf.linalg.matvec(tf.stack(heads), dependent)
        all_scores = tf.concat([scores, tf.fill([MOST_HEADS - len(heads)], NEVER)], 0)
        return dynamic.Result((), tf.nn.sparse_softmax_cross_entropy_with_logits(head, all_scores), all_scores)

    def chain(self, name: str, rows: Sequence[int]) -> list[dynamic.Node]:
        """Nodes of one direction."""
        nodes = [self.handle.node(f"{name}_first", rows[0])]
        for row in rows[1:]:
            nodes.append(self.handle.node(name, nodes[-1], row))
        return nodes

    def graph(self, example: dependencies.Sentence) -> list[dynamic.Node]:
        """The nodes of all arcs, in order. The root is row 1 of the table, an unknown word row 0."""
        rows = [1, *(self.words.get(word, -1) + 1 for word, _ in example)]
        forth, back = self.chain("forth", rows), self.chain("back", rows[::-1])[::-1]
        both = list(zip(forth, back, strict=True))
        heads = [self.handle.node("head", *pair) for pair in both]
        dependents = [self.handle.node("dependent", *pair) for pair in both[1:]]
        return [
            self.handle.node("arc", dependent, *heads, head)
            for dependent, (_, head) in zip(dependents, example, strict=True)
        ]

    def labels(self, example: dependencies.Sentence) -> list[int]:
        """The head of each word."""
        return [head for _, head in example]

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The nodes that are arcs, which have the last kinds."""
        return tf.where(batch.kinds.values >= min(self.arcs))[:, 0]


def main(given: Sequence[str] | None = None) -> list[float]:
    args = dynamic_training.options(__doc__).parse_args(given)
    train, test = dynamic_training.data(args, dependencies.read, dependencies.made)
    words = dynamic_training.numbered([word for sentence in train for word, _ in sentence])
    net = Parser(words, args.embedding, args.hidden)
    return dynamic_training.fit(net, train, test, args, "words")


if __name__ == "__main__":
    main()
