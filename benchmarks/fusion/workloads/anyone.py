"""Training steps of networks that anyone might write, in public Keras code; weights and data are made up here.

Each is written after a published network or one of Keras's examples (`benchmarks.fusion.anyone.NETS`)."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.fusion.workloads.models import Loss, training
from benchmarks.fusion.workloads.workload import Workload


def _training(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss_of: Loss,
    labels: np.ndarray,
    *inputs: np.ndarray,
) -> Workload:
    """A step on one batch; its result is the loss."""
    return training(model, optimizer, inputs, labels, loss_of)


def _inference(model: keras.Model, inputs: np.ndarray) -> Workload:
    """The model's outputs for one batch; the first result is a number of them, whose way to the host ends a step."""

    @tf.function
    def step(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = model(inputs, training=False)
        return tf.reshape(outputs, [-1])[0], outputs

    return Workload(step, (tf.constant(inputs),), [variable.value for variable in model.variables])


_classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_binary = keras.losses.BinaryCrossentropy(from_logits=True)
_squares = keras.losses.MeanSquaredError()


def _integers(least: int, end: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(least, end, shape).astype(np.int32)


def _uniform(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).random(shape, np.float32)


def _attention(x: keras.KerasTensor, heads: int, size: int, causal: bool = False) -> keras.KerasTensor:
    normal = layers.LayerNormalization(epsilon=1e-6)(x)
    attended = layers.MultiHeadAttention(heads, size // heads, dropout=0.1)(normal, normal, use_causal_mask=causal)
    return x + attended


def _inner(x: keras.KerasTensor, size: int, hidden: int, dropped: float = 0.1) -> keras.KerasTensor:
    inner = layers.Dense(hidden, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
    return x + layers.Dropout(dropped)(layers.Dense(size)(inner))


def _gpt(length: int, vocabulary: int) -> keras.Model:
    """Six blocks with causal attention."""
    keras.utils.set_random_seed(0)
    size = 384
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(vocabulary, size)(tokens) + layers.Embedding(length, size)(ops.arange(length)[None, :])
    for _ in range(6):
        x = _inner(_attention(x, 6, size, causal=True), size, 4 * size)
    return keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization(epsilon=1e-6)(x)))


def gpt() -> Workload:
    """Six blocks with causal attention; the loss is over each next token."""
    text = _integers(0, 8000, 8, 129)
    return _training(_gpt(128, 8000), keras.optimizers.AdamW(3e-4), _classes, text[:, 1:], text[:, :-1])


def gpt_inference() -> Workload:
    """The logits of `gpt`."""
    return _inference(_gpt(128, 8000), _integers(0, 8000, 8, 128))


def mixer() -> Workload:
    """Six MLP-Mixer blocks over patches of 8 x 8 pixels."""
    keras.utils.set_random_seed(0)
    batch, patches, size = 64, 64, 256
    x = images = keras.Input([patches, 8 * 8 * 3])
    x = layers.Dense(size)(x)
    for _ in range(6):
        y = layers.Permute([2, 1])(layers.LayerNormalization(epsilon=1e-6)(x))
        y = layers.Dropout(0.2)(layers.Dense(patches)(layers.Dense(patches, activation="gelu")(y)))
        x = x + layers.Permute([2, 1])(y)
        x = _inner(x, size, size, 0.2)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(images, layers.Dense(100)(x))
    return _training(
        model, keras.optimizers.Adam(1e-3), _classes, _integers(0, 100, batch), _uniform(batch, patches, 8 * 8 * 3)
    )


def wide_deep() -> Workload:
    """Twenty-six embeddings, dense features, batch normalization and dropout, with Adagrad."""
    keras.utils.set_random_seed(0)
    batch, count, rows = 1024, 26, 1000
    dense, sparse = keras.Input([13]), keras.Input([count], dtype="int32")
    embedded = [layers.Embedding(rows, 16)(sparse[:, column]) for column in range(count)]
    deep = layers.Concatenate()([dense, *embedded])
    for size in (256, 128, 64):
        deep = layers.BatchNormalization()(layers.Dense(size, activation="relu")(deep))
        deep = layers.Dropout(0.2)(deep)
    made = layers.Dense(1)(deep) + layers.Dense(1)(dense)
    model = keras.Model([dense, sparse], made)
    labels = _integers(0, 2, batch, 1).astype(np.float32)
    ids = _integers(0, rows, batch, count)
    return _training(model, keras.optimizers.Adagrad(0.01), _binary, labels, _uniform(batch, 13), ids)


def tabular() -> Workload:
    """Six gated residual blocks with batch normalization, with Nadam."""
    keras.utils.set_random_seed(0)
    batch, size = 512, 64
    x = features = keras.Input([40])
    x = layers.Dense(size)(x)
    for _ in range(6):
        hidden = layers.BatchNormalization()(layers.Dense(size, activation="elu")(x))
        hidden = layers.Dropout(0.1)(layers.Dense(size)(hidden))
        gated = hidden * layers.Dense(size, activation="sigmoid")(x)
        x = layers.LayerNormalization()(x + gated * layers.Softmax()(layers.Dense(size)(x)))
    model = keras.Model(features, layers.Dense(5)(x))
    return _training(model, keras.optimizers.Nadam(1e-3), _classes, _integers(0, 5, batch), _uniform(batch, 40))


def _vit(patches: int) -> keras.Model:
    """Eight blocks over patches of images."""
    keras.utils.set_random_seed(0)
    size = 192
    images = keras.Input([patches, 8 * 8 * 3])
    x = layers.Dense(size)(images) + layers.Embedding(patches, size)(ops.arange(patches)[None, :])
    for _ in range(8):
        x = _inner(_attention(x, 3, size), size, 4 * size)
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    return keras.Model(images, layers.Dense(100)(x))


def vit() -> Workload:
    """Eight blocks over 64 patches of images."""
    images, classes = _uniform(64, 64, 8 * 8 * 3), _integers(0, 100, 64)
    return _training(_vit(64), keras.optimizers.AdamW(1e-3), _classes, classes, images)


def vit_inference() -> Workload:
    """The logits of `vit`."""
    return _inference(_vit(64), _uniform(64, 64, 8 * 8 * 3))


def efficientnet() -> Workload:
    """EfficientNetB0 on images of 128 x 128, with RMSprop."""
    keras.utils.set_random_seed(0)
    batch = 64
    model = keras.applications.EfficientNetB0(
        weights=None, input_shape=(128, 128, 3), classes=100, classifier_activation=None
    )
    labels = _integers(0, 100, batch)
    return _training(model, keras.optimizers.RMSprop(1e-3), _classes, labels, 255 * _uniform(batch, 128, 128, 3))


def lstm() -> Workload:
    """A language model of two LSTM layers, with gradients clipped by norm."""
    keras.utils.set_random_seed(0)
    batch, length, size, vocabulary = 24, 64, 384, 5000
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(vocabulary, size)(tokens)
    for _ in range(2):
        x = layers.Dropout(0.2)(layers.LSTM(size, return_sequences=True)(x))
    model = keras.Model(tokens, layers.Dense(vocabulary)(x))
    text = _integers(0, vocabulary, batch, length + 1)
    return _training(model, keras.optimizers.Adam(1e-3, clipnorm=1.0), _classes, text[:, 1:], text[:, :-1])


def tab_transformer() -> Workload:
    """Categories as tokens of three transformer blocks, beside numbers."""
    keras.utils.set_random_seed(0)
    batch, count, size = 256, 12, 32
    numbers, categories = keras.Input([6]), keras.Input([count], dtype="int32")
    x = ops.stack([layers.Embedding(50, size)(categories[:, column]) for column in range(count)], axis=1)
    for _ in range(3):
        x = _inner(_attention(x, 4, size), size, 2 * size)
    x = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization()(numbers)])
    for units in (128, 64):
        x = layers.Dropout(0.2)(layers.Dense(units, activation="selu")(layers.BatchNormalization()(x)))
    model = keras.Model([numbers, categories], layers.Dense(1)(x))
    labels = _integers(0, 2, batch, 1).astype(np.float32)
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    return _training(model, optimizer, _binary, labels, _uniform(batch, 6), _integers(0, 50, batch, count))


def dlrm() -> Workload:
    """Embeddings and a bottom MLP, whose pairwise products a top MLP reads; with plain gradient descent."""
    keras.utils.set_random_seed(0)
    batch, count, rows, size = 1024, 8, 5000, 32
    dense, sparse = keras.Input([13]), keras.Input([count], dtype="int32")
    bottom = layers.Dense(size, activation="relu")(layers.Dense(128, activation="relu")(dense))
    vectors = [bottom, *(layers.Embedding(rows, size)(sparse[:, column]) for column in range(count))]
    stacked = ops.stack(vectors, axis=1)
    crossed = ops.matmul(stacked, ops.transpose(stacked, [0, 2, 1]))
    x = layers.Concatenate()([bottom, layers.Flatten()(crossed)])
    for units in (256, 128):
        x = layers.Dense(units, activation="relu")(x)
    model = keras.Model([dense, sparse], layers.Dense(1)(x))
    labels = _integers(0, 2, batch, 1).astype(np.float32)
    ids = _integers(0, rows, batch, count)
    return _training(model, keras.optimizers.SGD(0.1), _binary, labels, _uniform(batch, 13), ids)


def two_tower() -> Workload:
    """Users and items whose scores within the batch are logits, with Adagrad."""
    keras.utils.set_random_seed(0)
    batch, rows, size = 512, 10000, 64
    user, item = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
    towers = [
        layers.Dense(size)(layers.Dense(128, activation="relu")(layers.Embedding(rows, size)(ids)))
        for ids in (user, item)
    ]
    towers = [layers.UnitNormalization()(tower) for tower in towers]
    model = keras.Model([user, item], 20 * ops.matmul(towers[0], ops.transpose(towers[1])))
    users, items = _integers(0, rows, 2, batch)
    return _training(model, keras.optimizers.Adagrad(0.05), _classes, np.arange(batch, dtype=np.int32), users, items)


def nerf() -> Workload:
    """Points and their directions, encoded by sines, to colours and densities that are summed along rays."""
    keras.utils.set_random_seed(0)
    rays, samples = 512, 32
    points = keras.Input([samples, 3])
    scaled = [ops.reshape(points * 2.0**power, [-1, samples, 3]) for power in range(8)]
    encoded = layers.Concatenate()([points, *map(ops.sin, scaled), *map(ops.cos, scaled)])
    x = encoded
    for number in range(6):
        x = layers.Dense(64, activation="relu")(x)
        x = layers.Concatenate()([x, encoded]) if number == 3 else x
    made = layers.Dense(4)(x)
    colour, density = ops.sigmoid(made[..., :3]), ops.relu(made[..., 3])
    alpha = 1.0 - ops.exp(-density * 0.1)
    through = ops.exp(ops.cumsum(ops.log(1.0 - alpha + 1e-10), axis=-1))
    model = keras.Model(points, ops.sum(colour * (alpha * through)[..., None], axis=1))
    return _training(model, keras.optimizers.Adam(1e-3), _squares, _uniform(rays, 3), _uniform(rays, samples, 3))


class Sampling(layers.Layer):
    """A draw from N(mean, e^(log variance)), and the divergence from N(0, 1) as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self._seed = keras.random.SeedGenerator(0)

    def call(self, mean: tf.Tensor, log_variance: tf.Tensor) -> tf.Tensor:
        """The draw."""
        drawn = keras.random.normal(ops.shape(mean), seed=self._seed)
        self.add_loss(-0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * drawn


def autoencoder() -> Workload:
    """A variational one of Dense layers."""
    keras.utils.set_random_seed(0)
    batch, pixels = 128, 784
    images = keras.Input([pixels])
    x = layers.Dense(256, activation="relu")(layers.Dense(512, activation="relu")(images))
    x = Sampling()(layers.Dense(16)(x), layers.Dense(16)(x))
    x = layers.Dense(512, activation="relu")(layers.Dense(256, activation="relu")(x))
    model = keras.Model(images, layers.Dense(pixels)(x))
    given = _uniform(batch, pixels)
    return _training(model, keras.optimizers.Adam(1e-3), _binary, given, given)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "mixer": mixer,
    "wide_deep": wide_deep,
    "tabular": tabular,
    "vit": vit,
    "efficientnet": efficientnet,
    "lstm": lstm,
    "tab_transformer": tab_transformer,
    "dlrm": dlrm,
    "two_tower": two_tower,
    "nerf": nerf,
    "autoencoder": autoencoder,
    "gpt_inference": gpt_inference,
    "vit_inference": vit_inference,
}
