"""Networks that users train: of `examples.models`, of Keras, a U-Net and a BERT; each with the batch that it takes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from examples import models

CLASSES = 1000
VOCABULARY = 30_522


def model(name: str, side: int, width: float = 1.0) -> keras.Model:
    """An uncompiled network whose outputs are logits.

    Args:
        name: a key of `NETWORKS` in `benchmarks.offload.cases`.
        side: pixels of an image's side, or words of a text.
        width: factor on channels; Keras's ResNet-50 has none.
    """
    keras.utils.set_random_seed(0)
    if name == "unet":
        return _unet(side, width)
    if name == "bert":
        return bert(side, width)
    if name == "resnet50":
        return keras.applications.ResNet50(weights=None, input_shape=(side, side, 3), classifier_activation=None)
    return models.build(name, side, CLASSES, width)


def specs(name: str, batch: int, side: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """What a training step of the network takes: inputs and labels."""
    if name == "bert":
        return tf.TensorSpec((batch, side), tf.int32), tf.TensorSpec((batch, masked(side)), tf.int64)
    labels = (batch, side, side) if name == "unet" else (batch,)
    return tf.TensorSpec((batch, side, side, 3)), tf.TensorSpec(labels, tf.int64)


def noise(name: str, batch: int, side: int) -> tuple[tf.Tensor, tf.Tensor]:
    """A batch of noise, which stays on the device: of what `specs` tells."""
    inputs, labels = specs(name, batch, side)
    classes = {"unet": 2, "bert": VOCABULARY}.get(name, CLASSES)
    if inputs.dtype.is_floating:
        drawn = tf.random.stateless_normal(inputs.shape, (0, 1))
    else:
        drawn = tf.random.stateless_uniform(inputs.shape, (0, 1), 0, VOCABULARY, inputs.dtype)
    return drawn, tf.random.stateless_uniform(labels.shape, (0, 2), 0, classes, labels.dtype)


def masked(length: int) -> int:
    """Words of a text that are to be found: some 15%, the first."""
    return max(1, length // 6)


def bert(length: int, width: float = 1.0) -> keras.Model:
    """BERT-base (Devlin et al. 2019): 12 post-norm blocks, 768 wide, dropout 0.1; logits of the masked words."""
    layers, units = keras.layers, int(width * 768)
    words = keras.Input((length,), dtype="int32")
    positions = layers.Embedding(length, units)(tf.range(length)[None])
    x = layers.Embedding(VOCABULARY, units)(words) + positions
    x = layers.Dropout(0.1)(layers.LayerNormalization(epsilon=1e-12)(x))
    for _ in range(12):
        attended = layers.MultiHeadAttention(12, units // 12, dropout=0.1)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(0.1)(attended))
        inner = layers.Dense(units)(layers.Dense(4 * units, "gelu")(x))
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(0.1)(inner))
    return keras.Model(words, layers.Dense(VOCABULARY)(x[:, : masked(length)]))


def _unet(side: int, width: float) -> keras.Model:
    """Four levels, 64 to 1,024 wide (Ronneberger et al. 2015), with batch normalisation."""
    layers = keras.layers

    def twice(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    x = images = keras.Input((side, side, 3))
    kept, widths = [], [int(width * channels) for channels in (64, 128, 256, 512)]
    for channels in widths:
        kept.append(twice(x, channels))
        x = layers.MaxPooling2D()(kept[-1])
    x = twice(x, 2 * widths[-1])
    for channels, before in zip(reversed(widths), reversed(kept), strict=True):
        x = layers.Conv2DTranspose(channels, 2, strides=2)(x)
        x = twice(layers.Concatenate()([before, x]), channels)
    return keras.Model(images, layers.Conv2D(2, 1)(x))
