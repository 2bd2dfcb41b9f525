"""A recommender with several interests of a user: MIND's routing beside ComiRec's self-attention, over one history.

After ComiRec's sources (its MIND: a shared bilinear map, random routing logits, hard readout and a last layer of
ReLU), with its defaults but for 200,000 items, gradient descent, and 10 negatives for each of the batch."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.layers import Dense
from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 128
HISTORY = 100
SIZE = 64
INTERESTS = 4
ITEMS = 200_000
NEGATIVES = 10 * BATCH
ROUTING = 3
KEPT = 0.7  # of a history; the rest is padding


def make() -> Workload:
    """A training step."""
    source = Source()
    items, item_biases = source.normal(ITEMS, SIZE, scale=SIZE**-0.5), source.zeros(ITEMS)  # these biases stay zero
    places = source.normal(1, HISTORY, SIZE, scale=SIZE**-0.5)
    bilinear, last = Dense.draw(source, SIZE, SIZE, bias=False), Dense.draw(source, SIZE, SIZE)
    hidden, heads = Dense.draw(source, SIZE, 4 * SIZE), Dense.draw(source, 4 * SIZE, INTERESTS)
    trained = [variable for variable in source.variables if variable is not item_biases]
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.001)

    @tf.function
    def step(history: tf.Tensor, mask: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            embedded = tf.nn.embedding_lookup(items, history) * mask[:, :, None]
            of_users = tf.concat(
                [routed(embedded, mask, bilinear, last), attended(embedded, mask, places, hidden, heads)], 1
            )
            user = chosen(of_users, tf.nn.embedding_lookup(items, targets[:, 0]))
            negatives = tf.random.log_uniform_candidate_sampler(targets, 1, NEGATIVES, True, ITEMS, seed=0)
            losses = tf.nn.sampled_softmax_loss(
                items, item_biases, targets, user, NEGATIVES, ITEMS, sampled_values=negatives
            )
            loss = tf.reduce_mean(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return loss

    history = source.integers(0, ITEMS, [BATCH, HISTORY])
    mask = tf.cast(source.uniform(BATCH, HISTORY) < KEPT, tf.float32)
    targets = tf.cast(source.integers(0, ITEMS, [BATCH, 1]), tf.int64)
    return Workload(step, (history, mask, targets), source.variables, optimizer.variables, draws=True)


def routed(embedded: tf.Tensor, mask: tf.Tensor, bilinear: Dense, last: Dense) -> tf.Tensor:
    """MIND's interests, `[batch, interests, size]`, by dynamic routing, whose gradient is that of its last round."""
    mapped = bilinear(tf.reshape(embedded, [BATCH * HISTORY, SIZE]))
    mapped = tf.tile(tf.reshape(mapped, [BATCH, HISTORY, SIZE]), [1, 1, INTERESTS])
    mapped = tf.transpose(tf.reshape(mapped, [BATCH, HISTORY, INTERESTS, SIZE]), [0, 2, 1, 3])
    constant = tf.stop_gradient(mapped)
    logits = tf.stop_gradient(tf.random.truncated_normal([BATCH, INTERESTS, HISTORY], seed=0))
    real = tf.tile(mask[:, None, :], [1, INTERESTS, 1])
    for turn in range(ROUTING):
        weights = tf.nn.softmax(logits, axis=1)
        weights = tf.where(tf.equal(real, 0), tf.zeros_like(real), weights)
        routed_from = constant if turn + 1 < ROUTING else mapped
        capsules = squashed(tf.matmul(weights[:, :, None, :], routed_from))
        if turn + 1 < ROUTING:
            agreement = tf.matmul(constant, tf.transpose(capsules, [0, 1, 3, 2]))
            logits += tf.reshape(agreement, [BATCH, INTERESTS, HISTORY])
    found = tf.nn.relu(last(tf.reshape(capsules, [BATCH * INTERESTS, SIZE])))
    return tf.reshape(found, [BATCH, INTERESTS, SIZE])


def squashed(capsules: tf.Tensor) -> tf.Tensor:
    """Vectors of the last axis, shorter than 1."""
    norm = tf.reduce_sum(tf.square(capsules), -1, keepdims=True)
    return norm / (1 + norm) / tf.sqrt(norm + 1e-9) * capsules


def attended(embedded: tf.Tensor, mask: tf.Tensor, places: tf.Variable, hidden: Dense, heads: Dense) -> tf.Tensor:
    """ComiRec-SA's interests, `[batch, interests, size]`."""
    placed = tf.reshape(embedded + places, [BATCH * HISTORY, SIZE])
    scores = tf.reshape(heads(tf.tanh(hidden(placed))), [BATCH, HISTORY, INTERESTS])
    scores = tf.transpose(scores, [0, 2, 1])
    real = tf.tile(mask[:, None, :], [1, INTERESTS, 1])
    scores = tf.where(tf.equal(real, 0), tf.ones_like(scores) * (-(2.0**32) + 1), scores)
    return tf.matmul(tf.nn.softmax(scores), embedded)


def chosen(interests: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """The interest that fits the target best, `[batch, size]`."""
    count = 2 * INTERESTS
    fits = tf.reshape(tf.matmul(interests, target[:, :, None]), [BATCH, count])
    best = tf.argmax(tf.nn.softmax(fits), axis=1, output_type=tf.int32) + tf.range(BATCH) * count
    return tf.gather(tf.reshape(interests, [BATCH * count, SIZE]), best)
