"""Shared parts of the examples of dynamic nets: options, the loop over batches, held-out accuracy, the curve."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from tfmem import dynamic

OPTIMIZER = dynamic.Adam(0.003)
Given = tuple[dynamic.Batch, tuple[Any, ...]]  # a batch, and the rows of its inputs


class Net(Protocol):
    """A net with its parameters.

    Attributes:
        handle: the handle that trains it.
    """

    handle: dynamic.Handle

    def graph(self, example: Any) -> Any:
        """The example's root, or the list of its roots."""

    def labels(self, example: Any) -> list[int]:
        """The labels of an example."""

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The positions of the nodes whose outputs answer the labels, in their order."""


def options(
    description: str | None, *, hidden: int = 64, embedding: int = 64, data: str = "sentences"
) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="a file to train on; none: made data")
    parser.add_argument("--test", type=Path, help="a file to test with; none: part of the other")
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--embedding", type=int, default=embedding)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(f"--{data}", dest="sentences", type=int, default=2000, help="how many to make")
    parser.add_argument("--curve", type=Path, help="a picture of the loss")
    return parser


def data(args: argparse.Namespace, read: Any, made: Any, held_out: int = 10) -> tuple[list[Any], list[Any]]:
    """Examples to train on and to test with: every `held_out`th, where there is no file of them."""
    train = read(args.train) if args.train else made(args.sentences)
    if args.test:
        return train, read(args.test)
    return [example for number, example in enumerate(train) if number % held_out], train[::held_out]


def numbered(names: Sequence[str]) -> dict[str, int]:
    """Numbers of all different names from 1 on, in alphabetical order; 0 is an unknown name."""
    return {name: number for number, name in enumerate(sorted(set(names)), start=1)}


def rows_of(net: Net, examples: Sequence[Any]) -> tuple[Any, ...]:
    """What a net's inputs get for some examples; nothing, if it has none."""
    given = getattr(net, "rows", None)
    return () if given is None else tuple(given(examples))


def accuracy(net: Net, batches: Sequence[Given], labels: Sequence[Sequence[int]]) -> float:
    """The share of right answers."""
    right = []
    for (batch, rows), expected in zip(batches, labels, strict=True):
        outputs = net.handle.forward(batch, inputs=rows or None).outputs[0]
        right.append(np.argmax(tf.gather(outputs, net.answers(batch)), 1) == np.asarray(expected))
    return float(np.mean(np.concatenate(right)))


def fit(net: Net, train: list[Any], test: list[Any], args: argparse.Namespace, what: str) -> list[float]:
    """Trains, shows accuracy on held-out `what` after each epoch, and draws the curve.

    Returns:
        The mean loss of an example in each step.
    """

    @tf.function(reduce_retracing=True)
    def step(batch: dynamic.Batch, rows: tuple[Any, ...]) -> tf.Tensor:
        return tf.reduce_mean(net.handle.step(batch, inputs=rows or None).losses)

    def parts(examples: list[Any]) -> list[list[Any]]:
        return [examples[first : first + args.batch] for first in range(0, len(examples), args.batch)]

    batches, tests = (
        [(net.handle.batch([net.graph(example) for example in part]), rows_of(net, part)) for part in parts(examples)]
        for examples in (train, test)
    )
    labels = [[label for example in part for label in net.labels(example)] for part in parts(test)]
    losses: list[float] = []
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(batches))
        progress = tqdm(order, desc=f"epoch {epoch + 1}", unit=" batches")
        losses += [float(step(*batches[number])) for number in progress]
        mean = np.mean(losses[-len(batches) :])
        print(f"epoch {epoch + 1}: loss {mean:.3f}, accuracy on held-out {what} {accuracy(net, tests, labels):.3f}")
    if args.curve:
        draw(losses, args.curve)
    return losses


def draw(losses: list[float], path: Path) -> None:
    """A picture of the loss over steps."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss of an example")
    figure.savefig(path)
