"""Training steps of networks as Keras has them, in which products, not memory-intensive ops, take most of the time."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.fusion.workloads.workload import Workload

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

CLASSES = 1000
BLOCKS = 12
SIZE = 768
HEADS = 12
INNER = 3072
VOCABULARY = 30522
DROPPED = 0.1
HIDDEN_WORDS = 0.15  # of a text, to be guessed


def on_a_gpu() -> bool:
    """Whether sizes are those of a GPU; a CPU has smaller batches."""
    return bool(tf.config.list_physical_devices("GPU"))


def training(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    inputs: tuple[np.ndarray, ...],
    labels: np.ndarray,
    loss_of: Loss = tf.nn.sparse_softmax_cross_entropy_with_logits,
) -> Workload:
    """A step on one batch; the loss is the mean of what `loss_of` gives of labels and the model's outputs."""
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(labels: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = model(list(inputs) if len(inputs) > 1 else inputs[0], training=True)
            loss = tf.reduce_mean(loss_of(labels, outputs))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    state = [variable.value for variable in (*model.variables, *optimizer.variables)]
    return Workload(step, tuple(map(tf.constant, (labels, *inputs))), state, slots=list)


def resnet50() -> Workload:
    """Images of 224 x 224, gradient descent with momentum."""
    keras.utils.set_random_seed(0)
    batch = 64 if on_a_gpu() else 4
    model = keras.applications.ResNet50(weights=None, classes=CLASSES, classifier_activation=None)
    random = np.random.default_rng(0)
    images = random.random((batch, 224, 224, 3), np.float32)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return training(model, optimizer, (images,), random.integers(0, CLASSES, batch).astype(np.int32))


def bert_base() -> Workload:
    """Guessing the words that are hidden in texts, with Adam: 12 blocks, dropout 0.1, GELU by the error function."""
    keras.utils.set_random_seed(0)
    batch, length = (32, 128) if on_a_gpu() else (2, 64)
    hidden = round(HIDDEN_WORDS * length)
    random = np.random.default_rng(0)
    words = random.integers(0, VOCABULARY, (batch, length)).astype(np.int32)
    places = np.sort([random.permutation(length)[:hidden] for _ in range(batch)]).astype(np.int32)
    labels = np.take_along_axis(words, places, 1)
    return training(bert(length, hidden), keras.optimizers.Adam(1e-4), (words, places), labels)


def bert(length: int, hidden: int) -> keras.Model:
    """BERT: words `[batch, length]` and places of hidden words `[batch, hidden]` to logits of the hidden words."""
    words, places = keras.Input([length], dtype="int32"), keras.Input([hidden], dtype="int32")
    where = keras.ops.arange(length)[None, :]
    x = layers.Embedding(VOCABULARY, SIZE)(words) + layers.Embedding(length, SIZE)(where)
    x = layers.Dropout(DROPPED)(layers.LayerNormalization(epsilon=1e-12)(x))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, SIZE // HEADS, dropout=DROPPED)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(DROPPED)(attended))
        inner = layers.Dense(SIZE)(layers.Dense(INNER, activation=gelu)(x))
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(DROPPED)(inner))
    x = keras.ops.take_along_axis(x, places[:, :, None], axis=1)
    x = layers.LayerNormalization(epsilon=1e-12)(layers.Dense(SIZE, activation=gelu)(x))
    return keras.Model([words, places], layers.Dense(VOCABULARY)(x))


def gelu(x: tf.Tensor) -> tf.Tensor:
    """The exact one, as BERT has it."""
    return keras.ops.gelu(x, approximate=False)


WORKLOADS: dict[str, Callable[[], Workload]] = {"resnet50": resnet50, "bert_base": bert_base}
