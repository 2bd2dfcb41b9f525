"""Random training steps whose batch size is unknown, for each back end: TensorFlow, regions on a CPU, on a fake GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import BY_MODEL, optimized

FEATURES = 6
BATCHES = (3, 1, 7)


class Net:
    """A step that grows op by op. What it makes is of few shapes, so that tensors meet: `[batch]`, `[batch, features]`,
    `[features]`, `[batch, 2, features]`, `[]` and others that ops give; the batch's size is never known.

    Attributes:
        variables: that it trains.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        values = np.random.default_rng(seed)
        shapes = ((FEATURES, FEATURES), (FEATURES,), (FEATURES, 4))
        self.variables = [tf.Variable(0.5 * values.normal(size=shape).astype(np.float32)) for shape in shapes]

    def step(self) -> Callable[..., Any]:
        """A step over rows, labels and a weight for each row."""
        signature = [
            tf.TensorSpec([None, FEATURES], tf.float32),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None], tf.float32),
        ]
        return tf.function(self._run, input_signature=signature, autograph=False)

    def _run(self, rows: Any, labels: Any, weights: Any) -> Any:
        choose = random.Random(self._seed)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            made = [rows, weights, tf.cast(labels, tf.float32), *self.variables[:2]]
            for _ in range(choose.randint(3, 12)):
                ops = (*OPS, *OTHERS, *OTHERS) if self._seed >= MORE else OPS
                ops = (*ops, *SPARSE, *SPARSE, *SPARSE) if self._seed >= ROWS else ops
                made.append(tf.tanh(choose.choice(ops)(choose, made, self.variables, labels)))
            ends = [each for each in made[5:] if choose.random() < 0.4] + made[-1:]
            loss = tf.add_n([tf.reduce_mean(each) for each in ends])
        found = tape.gradient(loss, [rows, *self.variables])
        for variable, gradient in zip(self.variables, found[1:], strict=True):
            if isinstance(gradient, tf.IndexedSlices) and self._seed % 2:
                variable.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
            elif gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return [loss, *ends, *(each for each in found[:1] if each is not None)]


def pick(choose: random.Random, made: list[Any], rank: int | None = None) -> Any:
    return choose.choice([each for each in made if rank is None or each.shape.rank == rank])


def unary(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made)
    return choose.choice([tf.exp, tf.nn.relu, tf.square, tf.sigmoid, tf.negative, tf.nn.gelu, tf.abs])(x)


def binary(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made)
    alike = [each for each in made if each.shape.as_list() == x.shape.as_list()]
    return choose.choice([tf.add, tf.subtract, tf.multiply, tf.maximum, tf.math.divide_no_nan])(x, choose.choice(alike))


def weighted(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Each row by a different number."""
    x = pick(choose, made, 2)
    of_rows = choose.choice([made[1], made[2]])
    return x * of_rows[:, None] if x.shape[0] is None else x + tf.reduce_sum(of_rows)


def product(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    return tf.nn.bias_add(tf.matmul(x, variables[0]), variables[1])


def gram(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Columns with columns: the batch is summed over."""
    x = pick(choose, made, 2)
    return tf.matmul(x, x, transpose_a=True)


def reduction(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made)
    axes = sorted(choose.sample(range(x.shape.rank), choose.randint(0, x.shape.rank)))
    function = choose.choice([tf.reduce_sum, tf.reduce_max, tf.reduce_mean, tf.math.reduce_std])
    return function(x, axes, keepdims=choose.random() < 0.5)


def halves(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Each row of features in two, turned, and one row again."""
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    turned = tf.transpose(tf.reshape(x, [-1, 2, FEATURES // 2]), [0, 2, 1])
    return choose.choice([lambda: turned, lambda: tf.reshape(turned, [-1, FEATURES])])()


def flat(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    return tf.reshape(pick(choose, made), [-1])


def parts(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made, 2)
    if x.shape[1] is None or x.shape[1] < 2:
        return tf.concat([x, x], 0)
    one, other = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    both = [lambda: tf.concat([other, -one], 1), lambda: tf.concat([x, x * 2.0], 0), lambda: tf.roll(x, -3, 1)]
    return choose.choice([lambda: one, *both])()


def like(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Tensors that others give their sizes alone."""
    x = pick(choose, made)
    filled = [tf.ones_like, tf.zeros_like, lambda x: tf.fill(tf.shape(x), 0.5)]
    return choose.choice(filled)(x) + choose.choice([x, tf.reduce_mean(x)])


def cumulated(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Sums of all features up to each, in either direction."""
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    return tf.cumsum(x, 1, exclusive=choose.random() < 0.5, reverse=choose.random() < 0.5)


def summed(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Products by labels of their dimensions, in different orders."""
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    equation, other = choose.choice([("bi,ij->bj", variables[0]), ("bi,ji->jb", variables[0]), ("bi,bj->ij", x)])
    return tf.raw_ops.Einsum(inputs=[x, other], equation=equation)


def rowwise(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Rows with themselves, and numbers of each row that the row chooses."""
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    places = tf.cast(x[:, 1:4] > 0.1, tf.int32)
    return choose.choice(
        [
            lambda: tf.raw_ops.Einsum(inputs=[x, x], equation="bi,bi->b"),
            lambda: tf.reduce_sum(tf.raw_ops.Einsum(inputs=[x, x], equation="bi,bj->bji"), 2),
            lambda: tf.gather(x, places, axis=1, batch_dims=1),
        ]
    )()


def dropped(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """By a seed of the labels, as Keras has it of a state."""
    x = pick(choose, made, 2)
    state = tf.cast(tf.stack([tf.reduce_sum(labels), 7]), tf.int64) * (2**40 + 1)
    seed = tf.cast(tf.math.floormod(state, tf.constant(2**31 - 2, tf.int64)), tf.int32)
    return tf.nn.experimental.stateless_dropout(x, 0.4, seed=seed)


def of_the_batch(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made)
    return x / tf.cast(tf.shape(labels)[0], tf.float32)


def classes(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = choose.choice([each for each in made if each.shape.as_list() == [None, FEATURES]])
    logits = tf.matmul(x, variables[2])
    return choose.choice(
        [
            lambda: tf.nn.softmax(logits),
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits[: tf.shape(labels)[0]]),
            lambda: tf.one_hot(tf.argmax(logits, 1), FEATURES),
            lambda: tf.gather(logits, [3, 0, 0], axis=1),
        ]
    )()


def normalised(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made, 2)
    mean, variance = tf.nn.moments(x, [choose.randint(0, 1)], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def masked(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = pick(choose, made)
    return tf.where(x > 0.1, x, tf.zeros_like(x) if choose.random() < 0.5 else 0.5 * x)


def border(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """What no region holds, so that there are several."""
    x = pick(choose, made)
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x + 1.0)


def embedded(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """Rows of a variable, whose gradient is a sum for each row."""
    return tf.gather(choose.choice([variables[0], variables[2]]), labels) * choose.choice([1.0, 0.5])


def scattered(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    """A sum for each label, by either op."""
    x = choose.choice([each for each in made if each.shape.as_list() == [None, FEATURES]])
    return choose.choice(
        [
            lambda: tf.scatter_nd(labels[:, None], x, [5, FEATURES]),
            lambda: tf.math.unsorted_segment_sum(x, labels, 4),
        ]
    )()


def largest(choose: random.Random, made: list[Any], variables: list[Any], labels: Any) -> Any:
    x = choose.choice([each for each in made if each.shape.rank == 2 and each.shape[1] == FEATURES])
    values, places = tf.math.top_k(x, choose.randint(1, FEATURES))
    return choose.choice([lambda: values, lambda: tf.reduce_sum(tf.one_hot(places, FEATURES), 1) * x])()


OPS = (
    *(unary, binary, weighted, product, gram, reduction, halves, flat, parts, like, of_the_batch, classes),
    *(normalised, masked, border),
)
# These too from seed `MORE` on: smaller seeds give nets of the others alone.
MORE, OTHERS = 200, (cumulated, summed, dropped, rowwise)
# And these from `ROWS` on.
ROWS, SPARSE = 400, (embedded, scattered, largest)


def data(batch: int, seed: int) -> tuple[Any, Any, Any]:
    values = np.random.default_rng([batch, seed])
    rows = values.normal(size=(batch, FEATURES)).astype(np.float32)
    return (
        tf.constant(rows),
        tf.constant(values.integers(0, 4, batch), tf.int32),
        tf.constant(values.random(batch, np.float32)),
    )


def trained(seed: int, step_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> tuple[Any, list[Any]]:
    """Trains a net at each batch size: its step, as a back end makes it, and all results, with the variables last."""
    net = Net(seed)
    step = step_of(net.step())
    results = [tf.nest.map_structure(np.asarray, step(*data(batch, seed))) for batch in BATCHES]
    return step, [*results, [variable.numpy() for variable in net.variables]]


def compare(seed: int) -> tfmem.Report:
    """The report of a stitched step, which computes and learns what TensorFlow's does, where regions now run."""
    try:
        _, expected = trained(seed, lambda step: step)
    except tf.errors.InvalidArgumentError:
        pytest.skip("two unknown sizes of this net meet, and differ")
    step, found = trained(seed, lambda step: optimized(step, fusion=BY_MODEL))
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    return tfmem.report(step)
