"""Whole programs as people write them, stitched: the same values, random numbers and variables, and no error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem

Made = tuple[Callable[..., Any], Callable[[], Sequence[Any]]]  # a tf.function, and what gives its variables
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape).astype(np.float32)


def gan() -> Made:
    """Two optimizers take turns in one step."""
    layers = keras.layers
    maker = keras.Sequential([keras.Input((8,)), layers.Dense(32, activation="leaky_relu"), layers.Dense(16)])
    judge = keras.Sequential([keras.Input((16,)), layers.Dense(32), layers.Dropout(0.3, seed=3), layers.Dense(1)])
    of_maker, of_judge = keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.RMSprop(1e-3)
    of_maker.build(maker.trainable_variables)
    of_judge.build(judge.trainable_variables)

    def loss(logits: Any, label: float) -> Any:
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(logits) * label, logits))

    @tf.function
    def step(real: Any) -> Any:
        noise = tf.random.normal([tf.shape(real)[0], 8])
        with tf.GradientTape(persistent=True) as tape:
            made = maker(noise, training=True)
            of_real, of_made = judge(real, training=True), judge(made, training=True)
            judged, fooled = loss(of_real, 1.0) + loss(of_made, 0.0), loss(of_made, 1.0)
        for optimizer, model, value in ((of_maker, maker, fooled), (of_judge, judge, judged)):
            optimizer.apply_gradients(
                zip(tape.gradient(value, model.trainable_variables), model.trainable_variables, strict=True)
            )
        return judged, fooled

    return step, lambda: [*maker.variables, *judge.variables]


def metrics() -> Made:
    """A loop of one's own, with metrics, clipped gradients and averaged weights."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((20,)), layers.Dense(50, activation="gelu"), layers.LayerNormalization(), layers.Dense(5)]
    )
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.01, clipnorm=1.0, use_ema=True)
    optimizer.build(model.trainable_variables)
    kept = [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseTopKCategoricalAccuracy(2)]
    area = keras.metrics.AUC(from_logits=True)

    @tf.function
    def step(x: Any) -> Any:
        labels = tf.argmax(x[:, :5], 1)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for metric in kept:
            metric.update_state(labels, logits)
        area.update_state(tf.one_hot(labels, 5), logits)
        return loss, [metric.result() for metric in kept], area.result(), tf.linalg.global_norm(gradients)

    return step, lambda: [*model.variables, *optimizer.variables]


def accumulation() -> Made:
    """Gradients of three batches are one update, in an `If`."""
    w, total, count = tf.Variable(tf.random.normal([10, 4])), tf.Variable(tf.zeros([10, 4])), tf.Variable(0)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w - 1.0))
        total.assign_add(tape.gradient(loss, w))
        count.assign_add(1)
        if count % 3 == 0:
            w.assign_sub(0.1 * total / 3.0)
            total.assign(tf.zeros_like(total))
        return loss

    return step, lambda: [w, total, count]


def ragged() -> Made:
    """Words looked up and averaged by sentence."""
    keys, numbers = tf.constant(["a", "b", "c"]), tf.constant([1, 2, 3], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, numbers), 0)
    vectors = tf.Variable(tf.random.normal([4, 6]))

    @tf.function
    def step(text: Any) -> Any:
        words = tf.strings.split(text)
        ids = table.lookup(words.values)
        sentences = tf.RaggedTensor.from_row_splits(tf.gather(vectors, ids), words.row_splits)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.softmax(tf.gather(vectors, ids)) ** 2)
        vectors.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, vectors)))
        return loss, tf.reduce_mean(sentences, 1), tf.strings.upper(text), words.row_lengths()

    return step, lambda: [vectors]


def loops() -> Made:
    """`map_fn`, `scan`, `foldl`, and a loop that ends by what it computes, with its gradient."""
    w = tf.Variable(tf.random.normal([6, 6]) * 0.3)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            mapped = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)) * 2.0 - tf.reduce_mean(row), x)
            turns, state = tf.while_loop(
                lambda turn, state: tf.logical_and(turn < 7, tf.reduce_sum(state**2) < 1e6),
                lambda turn, state: (turn + 1, tf.nn.relu(state @ w) + tf.sigmoid(state)),
                (0, mapped),
            )
            loss = tf.reduce_mean(state**2)
        w.assign_sub(0.01 * tape.gradient(loss, w))
        return loss, turns, tf.scan(lambda a, b: a * 0.5 + b, x), tf.foldl(lambda a, b: a + b, x)

    return step, lambda: [w]


def streams() -> Made:
    """Random ops with state, of a generator, without state, and shuffles."""
    generator, w = tf.random.Generator.from_seed(3), tf.Variable(tf.ones([8]))

    @tf.function
    def step(x: Any) -> Any:
        drawn = tf.random.uniform([4, 8]), tf.random.normal([4, 8], seed=5), generator.normal([4, 8])
        fixed, dropped = tf.random.stateless_uniform([4, 8], [1, 2]), tf.nn.dropout(x, 0.4)
        w.assign_add(tf.reduce_mean(drawn[0] * drawn[1] + drawn[2] * fixed + dropped, 0))
        return drawn, fixed, dropped, tf.random.shuffle(tf.range(6)), tf.random.categorical([[0.2, 0.8]], 5), w * 1.0

    return step, lambda: [w, generator.state]


def unknown() -> Made:
    """Two dimensions of any size."""
    w = tf.Variable(tf.random.normal([7, 3]))

    @tf.function(input_signature=[tf.TensorSpec([None, None, 7], tf.float32)])
    def step(x: Any) -> Any:
        mask = x[..., 0] > -1.0
        with tf.GradientTape() as tape:
            scores = tf.nn.softmax(tf.where(mask[..., None], x @ w, -1e9), 1)
            taken = tf.boolean_mask(scores, mask)
            loss = tf.reduce_sum(taken**2) / tf.cast(tf.size(taken), tf.float32)
        w.assign_sub(tape.gradient(loss, w))
        return (
            *(loss, scores, tf.reverse(x, [1]), tf.tile(x, [1, 2, 1]), tf.pad(x, [[0, 0], [1, 1], [0, 0]])),
            *(tf.concat([x, x * 2.0], -1), tf.transpose(x, [1, 0, 2]), x[:, :-1] + 1.0, x[1:] * 2.0),
        )

    return step, lambda: [w]


def mathematics() -> Made:
    """Complex numbers, decompositions, sorting, and results whose size depends on numbers."""
    w = tf.Variable(tf.random.normal([8, 8]))

    @tf.function
    def step(x: Any) -> Any:
        power = tf.abs(tf.signal.rfft(x)) ** 2
        lower = tf.linalg.cholesky(w @ tf.transpose(w) + 8.0 * tf.eye(8))
        unique, places = tf.unique(tf.cast(x[0] * 2.0, tf.int32))
        w.assign_sub(0.01 * tf.linalg.triangular_solve(lower, x))
        return (
            *(power, unique, places, tf.einsum("ij,kj->ik", x, w), tf.sort(x), tf.math.cumsum(x, 1)),
            *(tf.math.top_k(x, 3), tf.where(x > 0.0), tf.boolean_mask(x, x > 0.0) * 2.0),
        )

    return step, lambda: [w]


TEXTS = [(tf.constant(["a b", "c", "a c b b"]),), (tf.constant(["b", "c a"]),)] * 2
PROGRAMS: dict[Callable[[], Made], list[tuple[Any, ...]]] = {
    gan: [(normal(40, 16),)] * 4 + [(normal(13, 16),)] * 2,
    metrics: [(normal(32, 20),)] * 5,
    accumulation: [(normal(16, 10),)] * 7,
    ragged: TEXTS,
    loops: [(normal(5, 6),), (normal(2, 6),)] * 2,
    streams: [(normal(4, 8),)] * 5,
    unknown: [(normal(a, b, 7),) for a, b in ((3, 4), (1, 9), (5, 2), (2, 1))],
    mathematics: [(normal(8, 8),)] * 3,
}


def ran(make: Callable[[], Made], calls: Sequence[tuple[Any, ...]], stitched: bool) -> list[Any]:
    """All results of some calls, and the variables after them."""
    keras.utils.set_random_seed(7)
    step, variables = make()
    call: Any = step
    if stitched:
        how = tfmem.FusionOptions(tune="off")
        call = tfmem.optimize(step, passes=("recurrent", "fusion"), fusion=how, cache_directory="")
    results = [np.asarray(each) for given in calls for each in tf.nest.flatten(call(*given), expand_composites=True)]
    if stitched:
        assert tfmem.report(call).regions
    return results + [np.asarray(variable) for variable in variables()]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("error:.*please report it.*")
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_program_computes_what_it_did(make: Callable[[], Made]) -> None:
    calls = PROGRAMS[make]
    for found, expected in zip(ran(make, calls, True), ran(make, calls, False), strict=True):
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(found, expected)
