"""Trains a GAN and a VAE of Keras whose steps draw, without a budget and with one, and compares; run as a program.

Equal to the bit asks for oneDNN off, and then for the allocator that counts, which are settings of a process.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmem

ROWS, BATCH, EPOCHS = 100, 48, 4  # the last batch is smaller


class Vae(keras.Model):
    """Draws the sampling of its latent vector."""

    def __init__(self) -> None:
        super().__init__()
        conv = keras.layers.Conv2D
        self.encoder = keras.Sequential(
            [conv(8, 3, 2, "same", activation="relu"), keras.layers.Flatten(), keras.layers.Dense(8)]
        )
        up = keras.layers.Conv2DTranspose
        self.decoder = keras.Sequential(
            [
                keras.layers.Dense(16 * 16 * 4, activation="relu"),
                keras.layers.Reshape((16, 16, 4)),
                up(16, 3, 2, "same", activation="relu"),
                conv(16, 3, 1, "same", activation="relu"),
                conv(1, 3, 1, "same"),
            ]
        )

    def train_step(self, data: Any) -> Any:
        images = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(images), 2, 1)
            latent = mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))
            error = tf.reduce_mean(tf.square(self.decoder(latent) - images))
            divergence = tf.reduce_mean(tf.exp(log_variance) + mean**2 - 1 - log_variance)
            loss = error + 0.01 * divergence
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "error": error}


class Gan(keras.Model):
    """Draws latent vectors, noise on labels, and dropout of TensorFlow's own."""

    def __init__(self) -> None:
        super().__init__()
        conv, up = keras.layers.Conv2D, keras.layers.Conv2DTranspose
        self.generator = keras.Sequential(
            [
                keras.layers.Dense(16 * 16 * 4, activation="relu"),
                keras.layers.Reshape((16, 16, 4)),
                up(16, 4, 2, "same", activation="relu"),
                conv(1, 3, 1, "same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                conv(16, 3, 1, "same", activation="relu"),
                conv(8, 3, 2, "same", activation="relu"),
                keras.layers.Flatten(),
            ]
        )
        self.head = keras.layers.Dense(1)
        self.other_optimizer = keras.optimizers.SGD(0.01)

    def judge(self, images: Any) -> Any:
        return self.head(tf.nn.dropout(self.discriminator(images), 0.3))

    def train_step(self, data: Any) -> Any:
        images = data[0] if isinstance(data, tuple) else data
        count = tf.shape(images)[0]
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
        made = self.generator(tf.random.normal([count, 8]))
        labels = tf.concat([tf.ones([count, 1]), tf.zeros([count, 1])], 0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            judged = self.judge(tf.concat([images, made], 0))
            judging = tf.reduce_mean(cross_entropy(labels, judged))
        weights = self.discriminator.trainable_variables + self.head.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(judging, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            judged = self.judge(self.generator(tf.random.normal([count, 8])))
            making = tf.reduce_mean(cross_entropy(tf.ones([count, 1]), judged))
        weights = self.generator.trainable_variables
        self.other_optimizer.apply_gradients(zip(tape.gradient(making, weights), weights, strict=True))
        return {"judging": judging, "making": making}


def train(kind: type[keras.Model], budget: int | None) -> tuple[Any, Any]:
    """The history and the weights after training, and the report."""
    gc.collect()  # what an earlier model holds counts as in use
    keras.utils.set_random_seed(7)
    model = kind()
    model.compile(optimizer=keras.optimizers.SGD(0.01), jit_compile=False)
    if budget is not None:
        model = tfmem.optimize(model, memory_budget=budget)
    images = np.random.default_rng(0).normal(size=(ROWS, 32, 32, 1)).astype("float32")
    history = model.fit(images, batch_size=BATCH, epochs=EPOCHS, verbose=0).history
    weights = [np.asarray(weight).tobytes() for weight in model.weights]
    return (history, weights), tfmem.report(model) if budget is not None else None


def main() -> None:
    kind = {"vae": Vae, "gan": Gan}[sys.argv[1]]
    expected, _ = train(kind, None)
    again, _ = train(kind, None)
    assert again == expected, "TensorFlow does not repeat itself"
    try:
        train(kind, 1000)
    except tfmem.InfeasibleBudgetError as error:
        least = error.smallest_budget
    found, report = train(kind, least + (1 << 20))
    assert report.decision == "moved", report
    assert found[0] == expected[0], (found[0], expected[0])
    assert found[1] == expected[1], "weights differ"
    print("equal")


if __name__ == "__main__":
    main()
