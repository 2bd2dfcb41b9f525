"""Tags of words by LSTMs in both directions (neulab/dynet-benchmark's sizes), trained with `tfmem.dynamic`.

python -m examples.bilstm_tagger
python -m examples.bilstm_tagger --train tagged.txt --characters

With --characters a rare word is not a row of the table, but the last states of LSTMs over its characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from examples import dynamic_training, tags
from tfmem import dynamic

COMMON = 6  # how often a word has to occur to have an embedding


class LSTM:
    """The parameters of one direction, and its cell."""

    def __init__(self, inputs: int, hidden: int, glorot: Any) -> None:
        self.input = tf.Variable(glorot([4 * hidden, inputs]))
        self.hidden = tf.Variable(glorot([4 * hidden, hidden]))
        self.bias = tf.Variable(tf.zeros([4 * hidden]))
        self.parameters = [self.input, self.hidden, self.bias]

    def cell(self, x, previous=None):
        """The state (h, c) after the input `x`; the first node has no state before it."""
        gates = dynamic.affine(self.input, x, self.bias)
        if previous is not None:
            gates = gates + dynamic.matvec(self.hidden, previous[0])
        i, f, o, u = dynamic.split(gates, 4)
        c = dynamic.sigmoid(i) * dynamic.tanh(u)
        if previous is not None:
            c = c + dynamic.sigmoid(f) * previous[1]
        return dynamic.sigmoid(o) * dynamic.tanh(c), c

    def kinds(self, name: str, inputs: tf.Variable, state: tuple[int, int]) -> dict[str, dynamic.NodeKind]:
        """Kinds of nodes over rows of a table: `name` follows another node, `name`_first follows none."""
        return {
            f"{name}_first": dynamic.node(lambda children, row: self.cell(dynamic.embedding_lookup(inputs, row))),
            name: dynamic.node(
                lambda children, row: self.cell(dynamic.embedding_lookup(inputs, row), children[0]), children=[state]
            ),
        }

    def kinds_over_words(self, name: str, word: tuple[int], state: tuple[int, int]) -> dict[str, dynamic.NodeKind]:
        """Kinds of nodes whose last child is a word: `name` follows another node, `name`_first follows none."""
        return {
            f"{name}_first": dynamic.node(lambda children: self.cell(children[0]), children=[word]),
            name: dynamic.node(lambda children: self.cell(children[1], children[0]), children=[state, word]),
        }


class Tagger:
    """LSTMs in both directions over words, tanh(W [f; b]) and a softmax for each word."""

    def __init__(
        self,
        words: dict[str, int],
        names: dict[str, int],
        embedding: int = 128,
        hidden: int = 50,
        middle: int = 32,
        seed: int = 0,
        optimizer: dynamic.SGD | dynamic.Adam = dynamic_training.OPTIMIZER,
    ) -> None:
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.words, self.tags = words, names
        self.table = tf.Variable(tf.random.stateless_uniform([len(words) + 1, embedding], [seed, 1], -0.1, 0.1))
        self.forth, self.back = LSTM(embedding, hidden, glorot), LSTM(embedding, hidden, glorot)
        self.middle = tf.Variable(glorot([middle, 2 * hidden]))
        self.output = tf.Variable(glorot([len(names) + 1, middle]))
        self.state = (hidden, hidden)
        kinds = self.kinds()
        kinds["tag"] = dynamic.node(self.of_tag, children=[self.state, self.state])
        self.tag = list(kinds).index("tag")
        self.handle = dynamic.specialize(self.parameters(), kinds, optimizer=optimizer)

    def parameters(self) -> list[tf.Variable]:
        return [self.table, *self.forth.parameters, *self.back.parameters, self.middle, self.output]

    def kinds(self) -> dict[str, dynamic.NodeKind]:
        return self.forth.kinds("forth", self.table, self.state) | self.back.kinds("back", self.table, self.state)

    def of_tag(self, children, label):
        (forth, _), (back, _) = children
        middle = dynamic.tanh(dynamic.matvec(self.middle, dynamic.concat([forth, back])))
        logits = dynamic.matvec(self.output, middle)
        return dynamic.Result((), dynamic.sparse_softmax_cross_entropy(label, logits), logits)

    def chain(self, name: str, inputs: Sequence[Any]) -> list[dynamic.Node]:
        """Nodes of one direction."""
        nodes: list[dynamic.Node] = []
        for given in inputs:
            nodes.append(
                self.handle.node(name, nodes[-1], given) if nodes else self.handle.node(f"{name}_first", given)
            )
        return nodes

    def inputs(self, example: tags.Tagged) -> list[Any]:
        """The integers for the nodes of both directions: rows of the table, 0 for an unknown word."""
        return [self.words.get(word, 0) for word, _ in example]

    def graph(self, example: tags.Tagged) -> list[dynamic.Node]:
        """The nodes of all tags, in order."""
        inputs = self.inputs(example)
        forth, back = self.chain("forth", inputs), self.chain("back", inputs[::-1])[::-1]
        return [self.handle.node("tag", *word) for word in zip(forth, back, self.labels(example), strict=True)]

    def labels(self, example: tags.Tagged) -> list[int]:
        """The number of each word's tag; 0 for an unknown one."""
        return [self.tags.get(tag, 0) for _, tag in example]

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The nodes that are tags."""
        return tf.where(batch.kinds.values == self.tag)[:, 0]


class CharacterTagger(Tagger):
    """A word without a row in the table is [f; b], the last states of LSTMs in both directions over its characters."""

    def __init__(
        self,
        words: dict[str, int],
        names: dict[str, int],
        characters: dict[str, int],
        embedding: int = 128,
        **rest: Any,
    ) -> None:
        if embedding % 2:
            raise ValueError(f"words of {embedding} numbers; expected an even number, half from each direction")
        glorot = tf.keras.initializers.GlorotUniform(rest.get("seed", 0) + 1)
        self.characters, self.embedding = characters, embedding
        self.spelling = tf.Variable(tf.random.stateless_uniform([len(characters) + 1, 20], [1, 2], -0.1, 0.1))
        self.forth_spelled, self.back_spelled = LSTM(20, embedding // 2, glorot), LSTM(20, embedding // 2, glorot)
        super().__init__(words, names, embedding, **rest)

    def parameters(self) -> list[tf.Variable]:
        spelled = [self.spelling, *self.forth_spelled.parameters, *self.back_spelled.parameters]
        return [*super().parameters(), *spelled]

    def kinds(self) -> dict[str, dynamic.NodeKind]:
        half, word = (self.embedding // 2, self.embedding // 2), (self.embedding,)
        kinds = self.forth_spelled.kinds("forth_spelled", self.spelling, half)
        kinds |= self.back_spelled.kinds("back_spelled", self.spelling, half)
        kinds["known"] = dynamic.node(lambda children, row: dynamic.embedding_lookup(self.table, row))
        kinds["spelled"] = dynamic.node(
            lambda children: dynamic.concat([children[0][0], children[1][0]]), children=[half, half]
        )
        kinds |= self.forth.kinds_over_words("forth", word, self.state)
        kinds |= self.back.kinds_over_words("back", word, self.state)
        return kinds

    def inputs(self, example: tags.Tagged) -> list[Any]:
        """The nodes of the words."""
        return [self.word(word) for word, _ in example]

    def word(self, word: str) -> dynamic.Node:
        """A word's node: a row of the table, or the LSTMs over its characters."""
        if word in self.words:
            return self.handle.node("known", self.words[word])
        spelled = [self.characters.get(character, 0) for character in word]
        ends = (self.chain("forth_spelled", spelled)[-1], self.chain("back_spelled", spelled[::-1])[-1])
        return self.handle.node("spelled", *ends)


def tagger(train: list[tags.Tagged], characters: bool, **sizes: Any) -> Tagger:
    """A net for the words, tags and characters of these sentences."""
    counts = Counter(word for sentence in train for word, _ in sentence)
    words = dynamic_training.numbered([word for word, count in counts.items() if count >= COMMON])
    names = dynamic_training.numbered([tag for sentence in train for _, tag in sentence])
    if not characters:
        return Tagger(words, names, **sizes)
    return CharacterTagger(words, names, dynamic_training.numbered(list("".join(counts))), **sizes)


def main(given: Sequence[str] | None = None) -> list[float]:
    parser = dynamic_training.options(__doc__, hidden=50, embedding=128)
    parser.add_argument("--characters", action="store_true", help="spell rare words")
    args = parser.parse_args(given)
    train, test = dynamic_training.data(args, tags.read, tags.made, held_out=5)
    net = tagger(train, args.characters, embedding=args.embedding, hidden=args.hidden)
    return dynamic_training.fit(net, train, test, args, "words")


if __name__ == "__main__":
    main()
