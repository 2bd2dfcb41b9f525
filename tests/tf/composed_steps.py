"""Nets that are trained under a memory budget with and without regions, in processes that hold nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfmem
from graph_passes.decision import Fusion
from tfmem.timing import ab_timing

MOST = 90  # calls until a step has settled


class Run(NamedTuple):
    """What training did.

    Attributes:
        losses: of the steps, in order.
        weights: in the end.
        report: of the step; None where it was not optimised.
        settled: whether the step had settled.
    """

    losses: list[float]
    weights: list[np.ndarray]
    report: tfmem.Report | None
    settled: bool


def mlp() -> tuple[Any, Any]:
    """Six layers of gelu."""
    layers = [keras.layers.Dense(256, activation="gelu") for _ in range(6)]
    return keras.Sequential([keras.layers.Input((256,)), *layers, keras.layers.Dense(10)]), (1024, 256)


def residual() -> tuple[Any, Any]:
    """Four residual blocks of convolutions with batch normalization."""
    given = x = keras.layers.Input((16, 16, 16))
    for _ in range(4):
        y = x
        for last in (False, True):
            y = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(y)
            y = keras.layers.BatchNormalization()(y)
            y = keras.layers.Activation("relu")(x + y if last else y)
        x = y
    pooled = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(given, keras.layers.Dense(10)(pooled)), (64, 16, 16, 16)


def transformer() -> tuple[Any, Any]:
    """One block of attention with dropout."""
    given = x = keras.layers.Input((32, 64))
    attended = keras.layers.MultiHeadAttention(2, 32, dropout=0.1)(x, x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
    y = keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(x))
    x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(y))
    return keras.Model(given, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))), (128, 32, 64)


def drawing() -> tuple[Any, Any]:
    """Layers whose dropout draws from a stream that a kernel keeps."""
    given = x = keras.layers.Input((256,))
    for place in range(6):
        x = keras.layers.Dense(256, activation="tanh")(x)
        x = keras.layers.Lambda(lambda x, seed=place: tf.nn.dropout(tf.nn.gelu(x), 0.2, seed=seed))(x)
    return keras.Model(given, keras.layers.Dense(10)(x)), (1024, 256)


def pooled() -> tuple[Any, Any]:
    """Convolutions with gelu on large images, whose early activations alone exceed a small budget."""
    given = x = keras.layers.Input((32, 32, 4))
    for _ in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", activation="gelu")(x)
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D(8)(x))
    return keras.Model(given, keras.layers.Dense(10)(x)), (64, 32, 32, 4)


def trained(make: Callable[[], tuple[Any, Any]], steps: int, regions_win: bool = True, **options: Any) -> Run:
    """Train a net, until its step has settled and at least `steps` times.

    Args:
        make: makes the net, and says the shape of its input.
        steps: at least so many.
        regions_win: whether the step with regions counts as the faster one, whatever was measured.
        options: of `tfmem.optimize`; none: the net is not optimised.
    """
    keras.utils.set_random_seed(7)
    model, shape = make()
    x = tf.random.stateless_normal(shape, (1, 2))
    y = tf.random.stateless_uniform(shape[:1], (3, 4), maxval=10, dtype=tf.int32)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    tf.random.set_seed(7)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    function = tfmem.optimize(step, progress=False, cache_directory="", **options) if options else step
    losses: list[float] = []
    with (
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: regions_win)),
    ):
        while len(losses) < steps or (options and not _settled(function) and len(losses) < MOST):
            losses.append(float(function(x, y)))
            if options:
                _wait(function)
    report = tfmem.report(function) if options else None
    weights = [np.asarray(each) for each in model.weights]
    return Run(losses, weights, report, not options or _settled(function))


def _settled(function: Any) -> bool:
    return all(step.settled for step in _steps(function))


def _wait(function: Any) -> None:
    """For a thread that plans, so that the number of calls until a step settles is the same at any load."""
    for step in _steps(function):
        step.wait()


def _steps(function: Any) -> list[Any]:
    return [step for found in function._steps.values() for step in found.values()]


class UntilDecided(keras.callbacks.Callback):
    """Ends an epoch when tfmem's threads have, for which few steps do not wait; and `fit` when regions were timed."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("tfmem "):
                thread.join(timeout=60)
        self.model.stop_training = tfmem.report(self.model).fusion_state in (Fusion.STITCHED, Fusion.LEFT)


def fitted(
    budget: int, passes: tuple[str, ...] | None, epochs: int = 24
) -> tuple[dict[str, list[float]], tfmem.Report | None]:
    """What `fit` says of the net of convolutions until it is decided whether regions run, or of so many epochs.

    Args:
        budget: bytes.
        passes: of tfmem; None: the model is not optimised.
        epochs: at most.
    """
    keras.utils.set_random_seed(7)
    model, shape = residual()
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(4 * shape[0], *shape[1:])).astype("float32"), rng.integers(0, 10, 4 * shape[0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    if passes is not None:
        model = tfmem.optimize(
            model,
            passes=passes,
            memory_budget=budget,
            progress=False,
            cache_directory="",
            fusion=tfmem.FusionOptions(tune="full"),
        )
    with (
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: True)),
    ):
        until = [UntilDecided()] if passes is not None and "fusion" in passes else []
        settings = {"batch_size": shape[0], "epochs": epochs, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, callbacks=until, **settings).history
    return history, None if passes is None else tfmem.report(model)
