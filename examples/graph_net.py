"""Properties of small molecules by a graph net: atoms sum what their neighbours know, trained with `tfmem.dynamic`.

python -m examples.graph_net
python -m examples.graph_net --hidden 128 --layers 4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from examples import dynamic_training, molecules
from tfmem import dynamic

CLASSES = 2


class GraphNet:
    """`h = relu(A h + B (sum of the neighbours' h) + b)` for each atom in each layer; their sum answers.

    The features of atoms are rows that come with each batch.
    """

    def __init__(
        self, hidden: int = 64, layers: int = 3, seed: int = 0, optimizer: Any = dynamic_training.OPTIMIZER
    ) -> None:
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.features = dynamic.inputs(molecules.FEATURES, "features")
        self.encode = tf.Variable(glorot([molecules.FEATURES, hidden]))
        self.own = tf.Variable(glorot([layers, hidden, hidden]))
        self.near = tf.Variable(glorot([layers, hidden, hidden]))
        self.bias = tf.Variable(tf.zeros([layers, hidden]))
        self.output = tf.Variable(glorot([hidden, CLASSES]) / molecules.MOST_ATOMS)
        self.output_bias = tf.Variable(tf.zeros([CLASSES]))
        kinds = {"atom": dynamic.trace(self.of_atom)}
        self.kinds = [f"layer{layer}" for layer in range(layers)]
        for layer, name in enumerate(self.kinds):
            kinds[name] = dynamic.trace(self.of_layer(layer), children=range(2, 6))
        kinds["whole"] = dynamic.trace(self.of_whole, children=range(2, molecules.MOST_ATOMS + 1))
        weights = [self.encode, self.own, self.near, self.bias, self.output, self.output_bias]
        self.handle = dynamic.specialize([*weights, self.features], kinds, state=hidden, optimizer=optimizer)

    def of_atom(self, children: Any, row: Any) -> Any:
        return tf.linalg.matvec(self.encode, tf.gather(self.features, row), transpose_a=True)

    def of_layer(self, layer: int) -> Any:
        def update(children: Any) -> Any:
            own, *near = children
            total = tf.linalg.matvec(self.own[layer], own, transpose_a=True) + self.bias[layer]
            return tf.nn.relu(total + tf.linalg.matvec(self.near[layer], tf.add_n(near), transpose_a=True))

        return update

    def of_whole(self, children: Any, label: Any) -> dynamic.Result:
        logits = tf.linalg.matvec(self.output, tf.add_n(children), transpose_a=True) + self.output_bias
        return dynamic.Result((), tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits), logits)

    def graph(self, example: molecules.Molecule) -> dynamic.Node:
        """The graph of a molecule; its atoms' arguments count its own rows."""
        node = self.handle.node
        nodes = [node("atom", row) for row in range(len(example.atoms))]
        for kind in self.kinds:
            below = nodes
            nodes = [
                node(kind, own, *[below[other] for other in near])
                for own, near in zip(below, example.neighbours, strict=True)
            ]
        return node("whole", *nodes, example.label)

    def rows(self, examples: Sequence[molecules.Molecule]) -> list[tf.RaggedTensor]:
        """The features of all atoms, `[molecules, (atoms), features]`."""
        rows = [example.features for example in examples]
        splits = np.cumsum([0, *map(len, rows)])
        return [tf.RaggedTensor.from_row_splits(np.concatenate(rows), splits, validate=False)]

    def labels(self, example: molecules.Molecule) -> list[int]:
        """The molecule's label."""
        return [example.label]

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The last node of each molecule."""
        return batch.kinds.row_limits() - 1


def main(given: Sequence[str] | None = None) -> list[float]:
    parser = dynamic_training.options(__doc__, data="molecules")
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args(given)
    train, test = dynamic_training.data(args, None, molecules.made)
    net = GraphNet(args.hidden, args.layers)
    return dynamic_training.fit(net, train, test, args, "molecules")


if __name__ == "__main__":
    main()
