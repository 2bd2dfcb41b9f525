"""Training steps of networks on tables, graphs, series and games, and of adversarial ones, in public Keras code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from keras import layers, ops

from benchmarks.fusion.workloads.models import training
from benchmarks.fusion.workloads.workload import Workload

BATCH, SIZE = 64, 16
Tensor = keras.KerasTensor
binary = keras.losses.BinaryCrossentropy(from_logits=True)
classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
squares = keras.losses.MeanSquaredError()


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _ids(end: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, end, shape).astype(np.int32)


def _clicks() -> np.ndarray:
    return _ids(2, BATCH, 1).astype(np.float32)


def _dense(x: Tensor, sizes: Sequence[int], activation: str = "relu") -> Tensor:
    for size in sizes:
        x = layers.Dense(size, activation=activation)(x)
    return x


def ft_transformer() -> Workload:
    """Gorishniy et al., 'Revisiting Deep Learning Models for Tabular Data': a token for each feature, ReGLU"""
    keras.utils.set_random_seed(0)
    numbers = keras.Input([10])
    x = layers.EinsumDense("bf,fe->bfe", (10, SIZE), bias_axes="fe")(numbers)
    normal = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(SIZE)(layers.Dense(32, activation="relu")(y) * layers.Dense(32)(y))
    model = keras.Model(numbers, layers.Dense(1)(ops.relu(x[:, 0])))
    return training(model, keras.optimizers.AdamW(1e-3), (_numbers(BATCH, 10),), _clicks(), binary)


def deep_cross() -> Workload:
    """Keras Recommenders' 'Deep & Cross Network', version 2"""
    keras.utils.set_random_seed(0)
    ids = keras.Input([5], dtype="int32")
    first = x = layers.Flatten()(layers.Embedding(100, SIZE)(ids))
    for _ in range(2):
        x = first * layers.Dense(5 * SIZE)(x) + x
    model = keras.Model(ids, layers.Dense(1)(_dense(x, (64, 32))))
    return training(model, keras.optimizers.Adagrad(0.01), (_ids(100, BATCH, 5),), _clicks(), binary)


def deep_fm() -> Workload:
    """Guo et al., 'DeepFM': squares of sums less sums of squares"""
    keras.utils.set_random_seed(0)
    ids = keras.Input([8], dtype="int32")
    x = layers.Embedding(500, SIZE)(ids)
    pairs = 0.5 * ops.sum(ops.square(ops.sum(x, axis=1)) - ops.sum(ops.square(x), axis=1), axis=1, keepdims=True)
    linear = ops.sum(layers.Embedding(500, 1)(ids), axis=1)
    model = keras.Model(ids, linear + pairs + layers.Dense(1)(_dense(layers.Flatten()(x), (64, 64))))
    return training(model, keras.optimizers.Ftrl(0.01), (_ids(500, BATCH, 8),), _clicks(), binary)


def behaviour_sequence() -> Workload:
    """Keras's example 'A Transformer-based recommendation system'"""
    keras.utils.set_random_seed(0)
    seen, user = keras.Input([8], dtype="int32"), keras.Input([], dtype="int32")
    x = layers.Embedding(300, 32)(seen) + layers.Embedding(8, 32)(ops.arange(8)[None, :])
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x)))
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(32)(layers.LeakyReLU()(x))))
    x = layers.Concatenate()([layers.Flatten()(x), layers.Embedding(50, 8)(user)])
    for size in (64, 32):
        x = layers.Dropout(0.1)(layers.LeakyReLU()(layers.BatchNormalization()(layers.Dense(size)(x))))
    model = keras.Model([seen, user], layers.Dense(1)(x))
    return training(model, keras.optimizers.Adagrad(0.01), (_ids(300, BATCH, 8), _ids(50, BATCH)), _clicks(), squares)


def collaborative_filtering() -> Workload:
    """Keras's example 'Collaborative filtering for movie recommendations'"""
    keras.utils.set_random_seed(0)
    user, film = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
    made = [layers.Embedding(200, SIZE, embeddings_regularizer="l2")(each) for each in (user, film)]
    bias = [layers.Embedding(200, 1)(each) for each in (user, film)]
    score = ops.sum(made[0] * made[1], axis=-1, keepdims=True) + bias[0] + bias[1]
    model = keras.Model([user, film], score)
    return training(model, keras.optimizers.Adam(1e-3), (_ids(200, BATCH), _ids(200, BATCH)), _clicks(), binary)


def wide_deep_cross() -> Workload:
    """Keras's example 'Structured data learning with Wide, Deep, and Cross networks', in tf_keras, with its Adagrad"""
    tf_keras.utils.set_random_seed(0)
    ids = tf_keras.Input([8], dtype="int32")
    rows = [tf_keras.layers.Embedding(200, SIZE)(ids[:, place]) for place in range(8)]
    first = cross = deep = tf_keras.layers.Concatenate()(rows)
    for _ in range(2):
        cross = first * tf_keras.layers.Dense(8 * SIZE)(cross) + cross
        deep = tf_keras.layers.Dense(64, activation="relu")(deep)
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1)(tf_keras.layers.Concatenate()([cross, deep])))
    variables, optimizer = model.trainable_variables, tf_keras.optimizers.Adagrad(0.01)
    optimizer.build(variables)

    @tf.function
    def step(clicks: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scores = model(ids, training=True)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, scores))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    state = [*model.variables, *optimizer.variables]
    return Workload(step, (tf.constant(_clicks()), tf.constant(_ids(200, BATCH, 8))), state, slots=list)


def sas_rec() -> Workload:
    """Keras Recommenders' 'Sequential retrieval using SASRec': positive and negative items"""
    keras.utils.set_random_seed(0)
    seen, good, bad = (keras.Input([12], dtype="int32") for _ in range(3))
    embedding = layers.Embedding(300, 32)
    x = layers.Dropout(0.2)(embedding(seen) * 32**0.5 + layers.Embedding(12, 32)(ops.arange(12)[None, :]))
    normal = layers.LayerNormalization()(x)
    x = normal + layers.MultiHeadAttention(1, 32, dropout=0.2)(normal, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(32, activation="relu")(x)))
    scores = ops.stack([ops.sum(x * embedding(each), axis=-1) for each in (good, bad)], axis=-1)
    model = keras.Model([seen, good, bad], scores)
    rows = tuple(_ids(300, BATCH, 12) for _ in range(3))
    return training(model, keras.optimizers.Adam(1e-3), rows, np.zeros([BATCH, 12], np.int32), classes)


def graph_convolution() -> Workload:
    """Keras's example 'Node Classification with Graph Neural Networks': sums over edges by segments"""
    keras.utils.set_random_seed(0)
    nodes, edges = keras.Input([40, SIZE], batch_size=1), keras.Input([2, 120], dtype="int32", batch_size=1)
    x = nodes[0]
    for _ in range(2):
        messages = ops.take(layers.Dense(32, activation="gelu")(x), edges[0, 0], axis=0)
        summed = ops.segment_sum(messages, edges[0, 1], num_segments=40)
        x = layers.Dense(SIZE, activation="gelu")(ops.concatenate([x, summed], axis=-1))
    model = keras.Model([nodes, edges], layers.Dense(7)(x))
    return training(
        model, keras.optimizers.Adam(1e-2), (_numbers(1, 40, SIZE), _ids(40, 1, 2, 120)), _ids(7, 40), classes
    )


def graph_attention() -> Workload:
    """Keras's example 'Graph attention network (GAT) for node classification'"""
    keras.utils.set_random_seed(0)
    nodes, edges = keras.Input([40, SIZE], batch_size=1), keras.Input([2, 120], dtype="int32", batch_size=1)
    x = layers.Dense(32)(nodes[0])
    source, target = ops.take(x, edges[0, 0], axis=0), ops.take(x, edges[0, 1], axis=0)
    scores = ops.exp(ops.clip(ops.leaky_relu(layers.Dense(1)(ops.concatenate([source, target], -1))), -2.0, 2.0))
    total = ops.take(ops.segment_sum(scores, edges[0, 1], num_segments=40), edges[0, 1], axis=0)
    x = ops.relu(ops.segment_sum(source * scores / total, edges[0, 1], num_segments=40) + x)
    model = keras.Model([nodes, edges], layers.Dense(7)(x))
    given = _numbers(1, 40, SIZE), _ids(40, 1, 2, 120)
    return training(model, keras.optimizers.SGD(0.1, momentum=0.9), given, _ids(7, 40), classes)


def proximal_policy() -> Workload:
    """Keras's example 'Proximal Policy Optimization': clipped ratios of log-probabilities"""
    keras.utils.set_random_seed(0)
    seen, action, old, gain = keras.Input([4]), keras.Input([], dtype="int32"), keras.Input([]), keras.Input([])
    logits = layers.Dense(2)(_dense(seen, (64, 64), "tanh"))
    chosen = ops.sum(ops.one_hot(action, 2) * ops.log_softmax(logits), axis=1)
    ratio = ops.exp(chosen - old)
    surrogate = ops.minimum(ratio * gain, ops.where(gain > 0, 1.2 * gain, 0.8 * gain))
    value = layers.Dense(1)(_dense(seen, (64, 64), "tanh"))
    model = keras.Model([seen, action, old, gain], ops.concatenate([surrogate[:, None], value], axis=1))
    given = _numbers(BATCH, 4), _ids(2, BATCH), _numbers(BATCH), _numbers(BATCH)
    optimizer = keras.optimizers.Adam(3e-4, clipnorm=0.5)
    returns = _numbers(BATCH)
    return training(model, optimizer, given, returns, lambda y, made: ops.square(y - made[:, 1]) - made[:, 0])


def deep_q() -> Workload:
    """Keras's example 'Deep Q-Learning for Atari Breakout', its dense form: Huber loss of the chosen action"""
    keras.utils.set_random_seed(0)
    seen, action, later = keras.Input([8]), keras.Input([], dtype="int32"), keras.Input([8])
    network = keras.Sequential([layers.Dense(64, activation="relu"), layers.Dense(4)])
    chosen = ops.sum(network(seen) * ops.one_hot(action, 4), axis=1)
    expected = ops.stop_gradient(0.99 * ops.max(network(later), axis=1))
    model = keras.Model([seen, action, later], chosen - expected)
    given = _numbers(BATCH, 8), _ids(4, BATCH), _numbers(BATCH, 8)
    return training(model, keras.optimizers.Adam(1e-3, clipnorm=1.0), given, _numbers(BATCH), keras.losses.Huber())


def wgan_gp() -> Workload:
    """Keras's example 'WGAN-GP': the discriminator's step, with a gradient of a gradient; in Dense layers"""
    keras.utils.set_random_seed(0)
    critic = keras.Sequential([keras.Input([64]), layers.Dense(128), layers.LeakyReLU(0.2), layers.Dense(1)])
    maker = keras.Sequential([keras.Input([16]), layers.Dense(128), layers.BatchNormalization(), layers.Dense(64)])
    variables, optimizer = critic.trainable_variables, keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9)
    optimizer.build(variables)

    @tf.function
    def step(real: tf.Tensor, noise: tf.Tensor, mix: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            fake = maker(noise, training=True)
            between = real + mix * (fake - real)
            with tf.GradientTape() as inner:
                inner.watch(between)
                scores = critic(between, training=True)
            norm = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(scores, between)), axis=1))
            loss = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real))
            loss += 10.0 * tf.reduce_mean(tf.square(norm - 1.0))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    state = [variable.value for variable in (*critic.variables, *maker.variables, *optimizer.variables)]
    given = _numbers(BATCH, 64), _numbers(BATCH, 16), _numbers(BATCH, 1)
    return Workload(step, tuple(map(tf.constant, given)), state, slots=list)


def contrastive() -> Workload:
    """Keras's example 'Semi-supervised image classification using contrastive pretraining with SimCLR', its head"""
    keras.utils.set_random_seed(0)
    first, second = keras.Input([64]), keras.Input([64])
    head = keras.Sequential([layers.Dense(64, activation="relu"), layers.Dense(32), layers.UnitNormalization()])
    one, other = head(first), head(second)
    both = ops.concatenate([ops.matmul(one, ops.transpose(other)), ops.matmul(other, ops.transpose(one))], axis=0)
    model = keras.Model([first, second], both / 0.1)
    targets = np.tile(np.arange(BATCH), 2).astype(np.int32)
    given = _numbers(BATCH, 64), _numbers(BATCH, 64)
    return training(model, keras.optimizers.Adam(1e-3), given, targets, classes)


def time_series() -> Workload:
    """Keras's example 'Timeseries classification with a Transformer model'"""
    keras.utils.set_random_seed(0)
    x = given = keras.Input([50, 1])
    for _ in range(2):
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(4, 16, dropout=0.25)(x, x))
        inner = layers.Dropout(0.25)(layers.Conv1D(4, 1, activation="relu")(x))
        x = x + layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(1, 1)(inner))
    x = layers.Dropout(0.4)(layers.Dense(128, activation="relu")(layers.GlobalAveragePooling1D()(x)))
    model = keras.Model(given, layers.Dense(2)(x))
    return training(model, keras.optimizers.Adam(1e-4), (_numbers(BATCH, 50, 1),), _ids(2, BATCH), classes)


_TABLES = (ft_transformer, deep_cross, deep_fm, wide_deep_cross, behaviour_sequence, collaborative_filtering, sas_rec)
_OTHERS = (graph_convolution, graph_attention, proximal_policy, deep_q, wgan_gp, contrastive, time_series)
WORKLOADS: dict[str, Callable[[], Workload]] = {make.__name__: make for make in (*_TABLES, *_OTHERS)}
