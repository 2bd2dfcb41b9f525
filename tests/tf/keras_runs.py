"""Ways to train, evaluate and predict with a small Keras model; each gives numbers, to be compared with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

ROWS = 100
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 12, 12, 2)).astype("float32")
LABELS = RANDOM.integers(0, 3, ROWS)
FAR = (100 * RANDOM.normal(size=(ROWS, 1)) ** 3).astype("float32")  # so that a mean that is weighted otherwise shows
WEIGHTS = RANDOM.uniform(0, 5, ROWS).astype("float32")
FIT = {"batch_size": 48, "epochs": 2, "shuffle": False, "verbose": 0}

Numbers = Any
Optimize = Callable[[Any], Any]  # takes a compiled model, and gives it back


def body(library: Any, inputs: Any) -> Any:
    hidden = inputs
    for _ in range(2):
        hidden = library.layers.Conv2D(8, 3, padding="same", activation="relu")(hidden)
    return library.layers.GlobalAveragePooling2D()(library.layers.BatchNormalization()(hidden))


def classifier(library: Any, optimize: Optimize, **how: Any) -> Any:
    inputs = library.Input((12, 12, 2), name="image")
    model = library.Model(inputs, library.layers.Dense(3, name="label")(body(library, inputs)))
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy, weighted = "sparse_categorical_accuracy", "sparse_categorical_crossentropy"
    options = {"metrics": [accuracy], "weighted_metrics": [weighted], "jit_compile": False} | how
    model.compile(library.optimizers.Adam(0.01), loss, **options)
    return optimize(model)


def several_outputs(library: Any, optimize: Optimize) -> Any:
    inputs = library.Input((12, 12, 2), name="image")
    hidden = body(library, inputs)
    outputs = {"a": library.layers.Dense(1, name="a")(hidden), "b": library.layers.Dense(1, name="b")(hidden)}
    model = library.Model(inputs, outputs)
    model.compile(
        library.optimizers.SGD(1e-4),
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 0.5, "b": 2.0},
        metrics={"a": ["mae"]},
        weighted_metrics={"b": ["mse"]},
        jit_compile=False,
    )
    return optimize(model)


def two_outputs(library: Any, optimize: Optimize) -> Numbers:
    targets = {"a": FAR, "b": FAR[::-1] / 50}
    return several_outputs(library, optimize).fit(X, targets, **FIT).history


def two_outputs_weighted(library: Any, optimize: Optimize) -> Numbers:
    model, weights = several_outputs(library, optimize), {"a": WEIGHTS, "b": WEIGHTS[::-1].copy()}
    return model.fit(X, {"a": FAR, "b": FAR / 50}, sample_weight=weights, validation_split=0.3, **FIT).history


def sample_weights(library: Any, optimize: Optimize) -> Numbers:
    return classifier(library, optimize).fit(X, LABELS, sample_weight=WEIGHTS, **FIT).history


def class_weights(library: Any, optimize: Optimize) -> Numbers:
    return classifier(library, optimize).fit(X, LABELS, class_weight={0: 1.0, 1: 7.0, 2: 0.3}, **FIT).history


def several_steps_per_execution(library: Any, optimize: Optimize) -> Numbers:
    seen: list[int] = []
    callback = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = classifier(library, optimize, steps_per_execution=4)
    history = model.fit(
        X, LABELS, validation_data=(X[:30], LABELS[:30]), callbacks=[callback], **FIT | {"batch_size": 15}
    )
    return history.history, seen, model.predict(X, batch_size=15, verbose=0)


def validation(library: Any, optimize: Optimize) -> Numbers:
    model = classifier(library, optimize)
    held_out = X[:30], LABELS[:30], WEIGHTS[:30]
    history = model.fit(X, LABELS, validation_data=held_out, validation_batch_size=20, **FIT).history
    return history, model.evaluate(X, LABELS, batch_size=48, verbose=0), model.predict(X, batch_size=48, verbose=0)


def data_set(library: Any, optimize: Optimize) -> Numbers:
    """Partial batches, then full ones alone; shapes are static in the second."""
    model = classifier(library, optimize)
    batched = tf.data.Dataset.from_tensor_slices((X, LABELS))
    first = model.fit(batched.batch(48), epochs=1, verbose=0).history
    return first, model.fit(batched.batch(40, drop_remainder=True), epochs=2, verbose=0).history


def generator(library: Any, optimize: Optimize) -> Numbers:
    def make() -> Iterator[Any]:
        for start in (0, 40, 80) * 2:
            yield X[start : start + 40], LABELS[start : start + 40]

    return classifier(library, optimize).fit(make(), steps_per_epoch=3, epochs=2, verbose=0).history


def single_batches(library: Any, optimize: Optimize) -> Numbers:
    model = classifier(library, optimize)
    numbers = [model.train_on_batch(X[:size], LABELS[:size], sample_weight=WEIGHTS[:size]) for size in (16, 16, 9, 12)]
    return numbers, model.test_on_batch(X[:9], LABELS[:9]), model.predict_on_batch(X[:5])


def dict_inputs(library: Any, optimize: Optimize) -> Numbers:
    return classifier(library, optimize).fit({"image": X}, LABELS, **FIT).history


def no_targets(library: Any, optimize: Optimize) -> Numbers:
    """An autoencoder that adds its own loss."""

    class Penalty(library.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(tf.reduce_mean(tf.abs(inputs)))
            return inputs

    inputs = library.Input((12, 12, 2))
    outputs = Penalty()(library.layers.Conv2D(2, 3, padding="same")(body_of_images(library, inputs)))
    model = library.Model(inputs, outputs)
    model.compile(library.optimizers.SGD(0.1), jit_compile=False)
    return optimize(model).fit(X, **FIT).history


def body_of_images(library: Any, inputs: Any) -> Any:
    hidden = library.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    return library.layers.BatchNormalization()(hidden)


def custom_step(library: Any, optimize: Optimize) -> Numbers:
    """Reads the static batch size in Python, counts what it sees, and keeps another metric."""

    class Custom(library.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = library.layers.Conv2D(8, 3, padding="same", activation="relu")
            self.last = library.layers.Dense(3)
            self.seen = library.metrics.Mean(name="seen")

        @property
        def metrics(self) -> Any:
            return [self.seen]

        def call(self, inputs: Any) -> Any:
            return self.last(tf.reduce_mean(self.layer(inputs), [1, 2]))

        def train_step(self, data: Any) -> Any:
            images, labels = data
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self(images))
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.seen.update_state(loss, sample_weight=images.shape[0])
            return {"seen": self.seen.result(), "known": tf.constant(float(images.shape[0] or 0))}

    model = Custom()
    model.compile(library.optimizers.SGD(0.1), jit_compile=False)
    return optimize(model).fit(X, LABELS, **FIT).history


def dropout(library: Any, optimize: Optimize) -> Numbers:
    """Its draws depend on how often tf_keras traces a step."""
    inputs = library.Input((12, 12, 2))
    hidden = library.layers.Dropout(0.5)(body(library, library.layers.Dropout(0.3)(inputs)))
    model = library.Model(inputs, library.layers.Dense(3)(hidden))
    model.compile("sgd", library.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return optimize(model).fit(X, LABELS, **FIT).history


RUNS = {
    run.__name__: run
    for run in (
        *(two_outputs, two_outputs_weighted, sample_weights, class_weights, several_steps_per_execution, validation),
        *(data_set, generator, single_batches, dict_inputs, no_targets, custom_step, dropout),
    )
}
