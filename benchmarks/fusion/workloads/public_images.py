"""Training steps of networks on images, in public Keras code; weights and data are made up, and images are small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
from keras import layers, ops

from benchmarks.fusion.workloads.models import training
from benchmarks.fusion.workloads.workload import Workload

BATCH = 4
Tensor = keras.KerasTensor
classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
squares = keras.losses.MeanSquaredError()


def images(size: int, channels: int = 3, batch: int = BATCH) -> np.ndarray:
    """Made up pixels."""
    return np.random.default_rng(0).random((batch, size, size, channels), np.float32)


def labels(end: int = 10) -> np.ndarray:
    """Made up classes."""
    return np.random.default_rng(0).integers(0, end, BATCH).astype(np.int32)


APPLICATIONS = {
    "xception": ("Xception", 71),
    "vgg16": ("VGG16", 32),
    "resnet50": ("ResNet50", 64),
    "resnet50_v2": ("ResNet50V2", 64),
    "inception_v3": ("InceptionV3", 75),
    "mobilenet": ("MobileNet", 64),
    "mobilenet_v2": ("MobileNetV2", 64),
    "mobilenet_v3": ("MobileNetV3Small", 64),
    "densenet121": ("DenseNet121", 64),
    "nasnet": ("NASNetMobile", 64),
    "efficientnet_v2": ("EfficientNetV2B0", 64),
    "convnext": ("ConvNeXtTiny", 64),
}


def _application(name: str, size: int) -> Workload:
    keras.utils.set_random_seed(0)
    made = getattr(keras.applications, name)
    model = made(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None)
    return training(model, keras.optimizers.SGD(0.01, momentum=0.9), (255 * images(size),), labels(), classes)


def mnist() -> Workload:
    """Keras's example 'Simple MNIST convnet'"""
    keras.utils.set_random_seed(0)
    given = keras.Input([28, 28, 1])
    x = given
    for filters in (32, 64):
        x = layers.MaxPooling2D(2)(layers.Conv2D(filters, 3, activation="relu")(x))
    model = keras.Model(given, layers.Dense(10)(layers.Dropout(0.5)(layers.Flatten()(x))))
    return training(model, keras.optimizers.Adam(1e-3), (images(28, 1),), labels(), classes)


def conv_mixer() -> Workload:
    """Keras's example 'Image classification with ConvMixer'"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    x = layers.BatchNormalization()(layers.Conv2D(32, 2, 2, activation="gelu")(given))
    for _ in range(2):
        x = x + layers.BatchNormalization()(layers.DepthwiseConv2D(5, padding="same", activation="gelu")(x))
        x = layers.BatchNormalization()(layers.Conv2D(32, 1, activation="gelu")(x))
    model = keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    return training(model, keras.optimizers.AdamW(1e-3), (images(32),), labels(), classes)


def compact_transformer() -> Workload:
    """Keras's example 'Compact Convolutional Transformers': stochastic depth, pooling by attention"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    x = layers.MaxPooling2D(3, 2, "same")(layers.Conv2D(64, 3, padding="same", activation="relu")(given))
    x = layers.Reshape([256, 64])(layers.Dense(64)(x))
    normal = layers.LayerNormalization()(x)
    x = x + layers.Dropout(0.1, noise_shape=[None, 1, 1])(layers.MultiHeadAttention(2, 32, dropout=0.1)(normal, normal))
    x = x + layers.Dropout(0.1)(layers.Dense(64)(layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))))
    x = layers.LayerNormalization()(x)
    pooled = ops.squeeze(ops.matmul(ops.transpose(ops.softmax(layers.Dense(1)(x), axis=1), [0, 2, 1]), x), 1)
    model = keras.Model(given, layers.Dense(10)(pooled))
    return training(model, keras.optimizers.AdamW(1e-3), (images(32),), labels(), classes)


def vision_transformer() -> Workload:
    """keras-hub's ViTBackbone: patches by a convolution, a class token"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    x = layers.Reshape([64, 64])(layers.Conv2D(64, 4, 4)(given))
    x = ops.concatenate([layers.Dense(64)(ops.mean(x, axis=1, keepdims=True)), x], axis=1)
    for _ in range(2):
        normal = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + layers.MultiHeadAttention(4, 16, dropout=0.1)(normal, normal)
        inner = layers.Dense(256, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = x + layers.Dropout(0.1)(layers.Dense(64)(inner))
    model = keras.Model(given, layers.Dense(10)(layers.LayerNormalization(epsilon=1e-6)(x)[:, 0]))
    return training(model, keras.optimizers.AdamW(1e-3), (images(32),), labels(), classes)


def _shifted(x: Tensor, by: int) -> Tensor:
    return ops.roll(x, (by, by), axis=(1, 2))


def swin() -> Workload:
    """Keras's example 'Image classification with Swin Transformers': shifted windows, merged patches"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    x = layers.Conv2D(32, 2, 2)(given)
    for by in (0, 2):
        y = _shifted(layers.LayerNormalization()(x), -by)
        y = ops.reshape(ops.transpose(ops.reshape(y, [-1, 4, 4, 4, 4, 32]), [0, 1, 3, 2, 4, 5]), [-1, 16, 32])
        y = layers.MultiHeadAttention(2, 16)(y, y)
        y = ops.transpose(ops.reshape(y, [-1, 4, 4, 4, 4, 32]), [0, 1, 3, 2, 4, 5])
        x = x + _shifted(ops.reshape(y, [-1, 16, 16, 32]), by)
        x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x)))
    merged = ops.concatenate([x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)], axis=-1)
    model = keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(layers.Dense(64)(merged))))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    targets = np.eye(10, dtype=np.float32)[labels()]
    return training(model, keras.optimizers.AdamW(1e-3), (images(32),), targets, loss)


def external_attention() -> Workload:
    """Keras's example 'Image classification with EANet'"""
    keras.utils.set_random_seed(0)
    x = given = keras.Input([64, 48])
    x = layers.Dense(64)(x)
    y = ops.softmax(layers.Dense(32)(layers.Dense(128)(layers.LayerNormalization()(x))), axis=1)
    y = y / (1e-9 + ops.sum(y, axis=-1, keepdims=True))
    x = x + layers.Dropout(0.2)(layers.Dense(64)(layers.Dense(128)(y)))
    model = keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    patches = np.random.default_rng(0).random((BATCH, 64, 48), np.float32)
    return training(model, keras.optimizers.AdamW(1e-3), (patches,), labels(), classes)


def _doubled(x: Tensor, filters: int, norm: Callable[[], layers.Layer] = layers.BatchNormalization) -> Tensor:
    for _ in range(2):
        x = layers.Activation("relu")(norm()(layers.Conv2D(filters, 3, padding="same")(x)))
    return x


def u_net() -> Workload:
    """Keras's example 'Image segmentation with a U-Net-like architecture'"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    first = _doubled(given, 16)
    second = _doubled(layers.MaxPooling2D(2)(first), 32)
    x = _doubled(layers.Concatenate()([layers.UpSampling2D(2)(second), first]), 16)
    model = keras.Model(given, layers.Conv2D(3, 1)(x))
    masks = np.random.default_rng(0).integers(0, 3, (BATCH, 32, 32)).astype(np.int32)
    return training(model, keras.optimizers.Adam(1e-3), (images(32),), masks, classes)


def deeplab() -> Workload:
    """Keras's example 'Multiclass semantic segmentation using DeepLabV3+': dilated convolutions, bilinear resizing"""
    keras.utils.set_random_seed(0)
    given = keras.Input([32, 32, 3])
    low = _doubled(given, 16)
    x = layers.MaxPooling2D(4)(low)
    parts = [layers.Conv2D(16, 3, padding="same", dilation_rate=rate, activation="relu")(x) for rate in (1, 2, 4)]
    x = layers.UpSampling2D(4, interpolation="bilinear")(layers.Concatenate()(parts))
    model = keras.Model(given, layers.Conv2D(5, 1)(layers.Concatenate()([x, low])))
    masks = np.random.default_rng(0).integers(0, 5, (BATCH, 32, 32)).astype(np.int32)
    return training(model, keras.optimizers.Adam(1e-3), (images(32),), masks, classes)


def diffusion() -> Workload:
    """Keras's example 'Denoising Diffusion Implicit Models': sines of the noise's variance, resizing by repetition"""
    keras.utils.set_random_seed(0)
    noisy, variance = keras.Input([32, 32, 3]), keras.Input([1, 1, 1])
    angles = variance * ops.convert_to_tensor((2.0 * np.pi * np.geomspace(1.0, 1000.0, 8)).astype(np.float32))
    x = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
    x = layers.Concatenate()([layers.UpSampling2D(32, interpolation="nearest")(x), layers.Conv2D(16, 1)(noisy)])
    norm = partial(layers.BatchNormalization, center=False, scale=False)
    first = _doubled(x, 16, norm)
    second = _doubled(layers.AveragePooling2D(2)(first), 32, norm)
    x = layers.Concatenate()([layers.UpSampling2D(2, interpolation="bilinear")(second), first])
    model = keras.Model([noisy, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(_doubled(x, 16, norm)))
    given = images(32), np.random.default_rng(0).random((BATCH, 1, 1, 1), np.float32)
    loss = keras.losses.MeanAbsoluteError()
    return training(model, keras.optimizers.AdamW(1e-3, use_ema=True), given, images(32), loss)


def stable_diffusion() -> Workload:
    """keras-hub's Stable Diffusion: residual blocks with GroupNorm and swish, attention to a text"""
    keras.utils.set_random_seed(0)
    given, text = keras.Input([16, 16, 4]), keras.Input([8, 32])
    x = layers.Conv2D(32, 3, padding="same")(given)
    y = layers.Activation("swish")(layers.GroupNormalization(8)(x))
    x = x + layers.Conv2D(32, 3, padding="same")(y)
    rows = layers.Reshape([256, 32])(layers.GroupNormalization(8)(x))
    rows = rows + layers.MultiHeadAttention(2, 16)(layers.LayerNormalization()(rows), text)
    gate, value = ops.split(layers.Dense(128)(layers.LayerNormalization()(rows)), 2, axis=-1)
    rows = rows + layers.Dense(32)(value * ops.gelu(gate))
    model = keras.Model([given, text], layers.Conv2D(4, 3, padding="same")(x + layers.Reshape([16, 16, 32])(rows)))
    inputs = images(16, 4), np.random.default_rng(0).random((BATCH, 8, 32), np.float32)
    return training(model, keras.optimizers.AdamW(1e-4), inputs, images(16, 4), squares)


def super_resolution() -> Workload:
    """Keras's example 'Image Super-Resolution using an Efficient Sub-Pixel CNN': depth to space"""
    keras.utils.set_random_seed(0)
    given = keras.Input([16, 16, 1])
    x = layers.Conv2D(32, 5, padding="same", activation="relu")(given)
    x = layers.Conv2D(9, 3, padding="same", activation="relu")(x)
    x = ops.transpose(ops.reshape(x, [-1, 16, 16, 3, 3, 1]), [0, 1, 3, 2, 4, 5])
    model = keras.Model(given, ops.reshape(x, [-1, 48, 48, 1]))
    return training(model, keras.optimizers.Adam(1e-3), (images(16, 1),), images(48, 1), squares)


def conv_autoencoder() -> Workload:
    """Keras's example 'Convolutional autoencoder for image denoising'"""
    keras.utils.set_random_seed(0)
    x = given = keras.Input([28, 28, 1])
    for _ in range(2):
        x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(16, 3, padding="same", activation="relu")(x))
    for _ in range(2):
        x = layers.Conv2DTranspose(16, 3, 2, padding="same", activation="relu")(x)
    model = keras.Model(given, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    loss = keras.losses.BinaryCrossentropy()
    return training(model, keras.optimizers.Adam(1e-3), (images(28, 1),), images(28, 1), loss)


_MADE = (mnist, conv_mixer, compact_transformer, vision_transformer, swin, external_attention, u_net, deeplab)
_GENERATIVE = (diffusion, stable_diffusion, super_resolution, conv_autoencoder)
WORKLOADS: dict[str, Callable[[], Workload]] = {
    **{name: partial(_application, *which) for name, which in APPLICATIONS.items()},
    **{make.__name__: make for make in (*_MADE, *_GENERATIVE)},
}
