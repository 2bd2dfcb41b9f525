"""VGG-19, ResNet-152 and AlexNet, and three ways to write one training step of them.

Layer shapes are the papers' (Simonyan & Zisserman 2015, table 1, column E; He et al. 2016,
table 1, 152 layers; Krizhevsky et al. 2012, one tower, without its local response normalisation).
There is no dropout, so that two runs can be compared bit by bit. Every weight is drawn from a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

LEARNING_RATE = 1e-4  # AutoVM thesis, section 6.2.2.1

VGG19_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions
RESNET152_STAGES = ((64, 3), (128, 8), (256, 36), (512, 3))  # inner channels, bottleneck blocks


def build(name: str, image_size: int = 224, classes: int = 1000, width: float = 1.0, seed: int = 0) -> keras.Model:
    """An uncompiled network, images [batch, image_size, image_size, 3] to logits [batch, classes].

    Args:
        name: `vgg19`, `resnet152` or `alexnet`.
        image_size: height and width of the images, in pixels.
        classes: number of logits.
        width: factor on every layer's channels, below 1 for small machines; the depth stays.
        seed: where the weights come from.

    Raises:
        ValueError: the name is unknown, or the images are too small for the pooling layers.
    """
    builders = {
        "vgg19": (_vgg19, 32),
        "resnet152": (_resnet152, 32),
        "alexnet": (_alexnet, 63),
    }
    if name not in builders:
        raise ValueError(f"unknown model '{name}'; expected one of {', '.join(sorted(builders))}")
    builder, smallest = builders[name]
    if image_size < smallest:
        raise ValueError(f"{name} needs images of at least {smallest} pixels, not {image_size}")
    make = _Layers(width, seed)
    images = keras.Input((image_size, image_size, 3), name="images")
    features = builder(make, images)
    logits = keras.layers.Dense(classes, kernel_initializer=make.initializer(), name="logits")
    return keras.Model(images, logits(features), name=name)


def compile_model(model: keras.Model) -> keras.Model:
    """Adam and softmax cross entropy, as in the thesis; XLA off, so that both runs are alike."""
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def make_step(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """One training step as a tf.function of (images, labels) that returns the scalar loss."""
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=False)
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


class SessionStep(NamedTuple):
    """A training step in a `tf.Graph`: run `initialize` once, then `(train, loss)` each step.

    `images` and `labels` are placeholders, or variables that `initialize` fills.
    """

    graph: tf.Graph
    images: tf.Tensor | tf.Variable
    labels: tf.Tensor | tf.Variable
    loss: tf.Tensor
    train: tf.Operation
    initialize: tf.Operation


def build_vgg19_graph(
    image_size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    batch: int | None = None,
    seed: int = 0,
    random_batch: bool = False,
    gradients: Callable[[tf.Tensor, list[tf.Variable]], list[tf.Tensor]] | None = None,
) -> SessionStep:
    """VGG-19 as the thesis writes it (Listing 6.1): a `tf.Graph`, `tf.gradients`, AdamOptimizer.

    Args:
        image_size: height and width of the images, in pixels.
        classes: number of logits.
        width: factor on every layer's channels.
        batch: static batch size of the placeholders; None leaves it open.
        seed: where the weights come from.
        random_batch: train on one random batch that stays on the device, so that nothing is fed;
            for timing. Needs `batch`.
        gradients: what stands in line 15 of the listing: `tf.gradients`, or `tfmem.avm_gradients`.
    """
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        shape = (batch, image_size, image_size, 3)
        if random_batch:
            noise = v1.random_normal(shape, seed=seed)
            classes_drawn = v1.random_uniform(shape[:1], 0, classes, tf.int64, seed)
            fixed = {"trainable": False, "use_resource": True}
            images = v1.get_variable("images", initializer=noise, **fixed)
            labels = v1.get_variable("labels", initializer=classes_drawn, **fixed)
        else:
            images = v1.placeholder(tf.float32, shape, name="images")
            labels = v1.placeholder(tf.int64, shape[:1], name="labels")
        seeds = itertools.count(seed)

        def weights(name: str, shape: tuple[int, ...]) -> tf.Variable:
            initializer = v1.initializers.he_normal(seed=next(seeds))
            return v1.get_variable(name, shape, initializer=initializer, use_resource=True)

        def biases(name: str, count: int) -> tf.Variable:
            zeros = v1.zeros_initializer()
            return v1.get_variable(name, (count,), initializer=zeros, use_resource=True)

        x = tf.convert_to_tensor(images)
        for block, (channels, convolutions) in enumerate(VGG19_BLOCKS, start=1):
            filters = scaled(channels, width)
            for index in range(1, convolutions + 1):
                with v1.variable_scope(f"conv{block}_{index}"):
                    kernel = weights("kernel", (3, 3, x.shape[-1], filters))
                    x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
                    x = tf.nn.relu(tf.nn.bias_add(x, biases("bias", filters)))
            x = tf.nn.max_pool2d(x, 2, 2, "VALID", name=f"pool{block}")
        x = tf.reshape(x, (-1, x.shape[1] * x.shape[2] * x.shape[3]))
        hidden = scaled(4096, width)
        for name, count in (("fc6", hidden), ("fc7", hidden), ("logits", classes)):
            with v1.variable_scope(name):
                x = tf.matmul(x, weights("kernel", (x.shape[-1], count))) + biases("bias", count)
                x = x if name == "logits" else tf.nn.relu(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
        loss = tf.reduce_mean(losses, name="loss")

        variables = v1.trainable_variables()
        grads = (gradients or tf.gradients)(loss, variables)
        optimizer = v1.train.AdamOptimizer(LEARNING_RATE)
        train = optimizer.apply_gradients(zip(grads, variables, strict=True), name="train")
        initialize = v1.global_variables_initializer()
    return SessionStep(graph, images, labels, loss, train, initialize)


def scaled(channels: int, width: float) -> int:
    """`channels * width`, in steps of 4 and never below 4."""
    return max(4, 4 * round(channels * width / 4))


class _Layers:
    """Makes layers at one width, with a new seed for each."""

    def __init__(self, width: float, seed: int) -> None:
        self.width = width
        self._seeds: Iterator[int] = itertools.count(1000 * seed)

    def initializer(self) -> keras.Initializer:
        return keras.initializers.HeNormal(seed=next(self._seeds))

    def convolution(self, x, name, channels, kernel, strides=1, padding="same", activation="relu"):
        """Convolution with bias, then `activation`."""
        return keras.layers.Conv2D(
            scaled(channels, self.width),
            kernel,
            strides,
            padding,
            activation=activation,
            kernel_initializer=self.initializer(),
            name=name,
        )(x)

    def normalised(self, x, name, channels, kernel, strides=1):
        """Convolution without bias, then batch normalisation; no activation."""
        x = keras.layers.Conv2D(
            scaled(channels, self.width),
            kernel,
            strides,
            "same",
            use_bias=False,
            kernel_initializer=self.initializer(),
            name=name,
        )(x)
        return keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=f"{name}_bn")(x)

    def dense(self, x, name, units):
        return keras.layers.Dense(
            scaled(units, self.width),
            activation="relu",
            kernel_initializer=self.initializer(),
            name=name,
        )(x)


def _vgg19(make: _Layers, x):
    for block, (channels, convolutions) in enumerate(VGG19_BLOCKS, start=1):
        for index in range(1, convolutions + 1):
            x = make.convolution(x, f"conv{block}_{index}", channels, 3)
        x = keras.layers.MaxPooling2D(2, name=f"pool{block}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    return make.dense(make.dense(x, "fc6", 4096), "fc7", 4096)


def _alexnet(make: _Layers, x):
    x = keras.layers.ZeroPadding2D(2, name="pad")(x)  # 224 -> 55 in conv1, as in the paper
    x = make.convolution(x, "conv1", 96, 11, strides=4, padding="valid")
    x = keras.layers.MaxPooling2D(3, 2, name="pool1")(x)
    x = make.convolution(x, "conv2", 256, 5)
    x = keras.layers.MaxPooling2D(3, 2, name="pool2")(x)
    x = make.convolution(x, "conv3", 384, 3)
    x = make.convolution(x, "conv4", 384, 3)
    x = make.convolution(x, "conv5", 256, 3)
    x = keras.layers.MaxPooling2D(3, 2, name="pool5")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    return make.dense(make.dense(x, "fc6", 4096), "fc7", 4096)


def _resnet152(make: _Layers, x):
    relu = keras.layers.ReLU
    x = relu(name="conv1_relu")(make.normalised(x, "conv1", 64, 7, strides=2))
    x = keras.layers.MaxPooling2D(3, 2, "same", name="pool1")(x)
    for stage, (channels, blocks) in enumerate(RESNET152_STAGES, start=2):
        for block in range(1, blocks + 1):
            name, strides = f"conv{stage}_{block}", 2 if block == 1 and stage > 2 else 1
            shortcut = x
            if block == 1:
                shortcut = make.normalised(x, f"{name}_0", 4 * channels, 1, strides)
            x = relu(name=f"{name}_1_relu")(make.normalised(x, f"{name}_1", channels, 1, strides))
            x = relu(name=f"{name}_2_relu")(make.normalised(x, f"{name}_2", channels, 3))
            x = make.normalised(x, f"{name}_3", 4 * channels, 1)
            x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
            x = relu(name=f"{name}_relu")(x)
    return keras.layers.GlobalAveragePooling2D(name="average")(x)
