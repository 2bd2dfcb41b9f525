"""Uses of strategies on two devices of the CPU, against plain TensorFlow to the bit.

Called with the cases; says "equal" when all was well.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.in_replicas import (
    AMPLE,
    BATCH,
    ROWS,
    SCARCE,
    WIDTH,
    AllReduced,
    Deep,
    Training,
    mirrored,
    optimized,
    require_moves,
    run_cases,
)

CLASSES, SIZE = 7, 2000
ROWS_OF_FIT = 2 * SIZE + 250  # the last batch is partial
X = np.random.default_rng(1).normal(size=(ROWS_OF_FIT, WIDTH)).astype(np.float32)
LABELS = np.arange(ROWS_OF_FIT) % CLASSES

Fitted = tuple[Any, Any]  # a model, and all that `fit`, `evaluate` and `predict` gave


def dense(library: Any) -> Any:
    parts = [library.Input((WIDTH,))]
    for _ in range(5):
        parts += [library.layers.Dense(256), library.layers.Activation("gelu")]
    return library.Sequential([*parts, library.layers.Dense(CLASSES, dtype="float32")])


def normalized(library: Any) -> Any:
    """Each second layer's means and variances are of the whole batch, the others' of a replica."""
    parts = [library.Input((WIDTH,))]
    for number in range(5):
        parts += [
            library.layers.Dense(256),
            library.layers.BatchNormalization(synchronized=bool(number % 2)),
            library.layers.Activation("gelu"),
        ]
    return library.Sequential([*parts, library.layers.Dense(CLASSES)])


def embedded(library: Any) -> Any:
    """An embedding's gradient has slices, which replicas gather within a condition."""
    layers = library.layers
    return library.Sequential(
        [library.Input((WIDTH,)), layers.Discretization([-1.0, 0.0, 1.0]), layers.Embedding(4, 8), layers.Flatten()]
        + [layers.Dense(256, "gelu") for _ in range(5)]
        + [layers.Dense(CLASSES)]
    )


def recurrent(library: Any) -> Any:
    layers = library.layers
    return library.Sequential(
        [library.Input((WIDTH,)), layers.Reshape((8, 16)), layers.LSTM(64), layers.Dense(256, "gelu")]
        + [layers.Dense(256, "gelu") for _ in range(4)]
        + [layers.Dense(CLASSES)]
    )


def fitted(
    library: Any,
    build: Callable[[Any], Any],
    budget: int | None,
    *,
    optimizer: Callable[[], Any] | None = None,
    callbacks: Callable[[], Sequence[Any]] = tuple,
    strategy: Callable[[], Any] = mirrored,
    metrics: Callable[[], Sequence[Any]] = lambda: ["accuracy"],
    epochs: int = 2,
    **compiled: Any,
) -> Fitted:
    library.utils.set_random_seed(1)
    with strategy().scope():
        model = build(library)
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        rule = optimizer() if optimizer else library.optimizers.SGD(0.1)
        model.compile(rule, loss, metrics=metrics(), jit_compile=False, **compiled)
    if budget is not None:
        tfmem.optimize(model, memory_budget=budget, cache_directory="")
    settings = {"batch_size": SIZE, "epochs": epochs, "shuffle": False, "verbose": 0}
    validation = (X[:1100], LABELS[:1100])
    history = model.fit(X, LABELS, validation_data=validation, callbacks=list(callbacks()), **settings).history
    scores = model.evaluate(X, LABELS, batch_size=SIZE, verbose=0)
    return model, (history, scores, model.predict(X, batch_size=SIZE, verbose=0), model.get_weights())


def fits_and_moves(fit: Callable[[int], Fitted], share: float = 0.85) -> Iterator[Any]:
    """What is found in a budget that fits, then in a share of what the step needs, in which tensors move."""
    model, found = fit(AMPLE)
    assert not tfmem.report(model).transfers, tfmem.report(model)
    yield found
    peak = tfmem.report(model).peak_before
    del model
    gc.collect()  # else its variables take of the budget of the next
    model, found = fit(round(share * peak))
    assert tfmem.report(model).decision == "moved", tfmem.report(model)
    yield found


def require_equal_fits(library: Any, build: Callable[[Any], Any], *, share: float = 0.85, **settings: Any) -> None:
    """That logs, predictions and weights are equal to the bit."""
    fit = partial(fitted, library, build, **settings)
    _, expected = fit(None)
    gc.collect()
    for found in fits_and_moves(fit, share):
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


@contextmanager
def precision(library: Any, name: str) -> Iterator[None]:
    library.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        library.mixed_precision.set_global_policy("float32")


# ---- of both libraries ----


def mixed_precision(library: Any) -> None:
    """float16 with a scaled loss, for which TensorFlow asks whether gradients are finite."""
    for name in ("mixed_bfloat16", "mixed_float16"):
        with precision(library, name):
            require_equal_fits(library, dense)


def batch_norms(library: Any) -> None:
    require_equal_fits(library, normalized, share=0.9)


def embeddings(library: Any) -> None:
    """The last batch is smaller, so the step has no fixed size. Where tensors move, gradients differ by rounding."""
    _, expected = fitted(library, embedded, None)
    gc.collect()
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    for found in fits_and_moves(partial(fitted, library, embedded)):
        tf.nest.map_structure(close, found, expected)


def metrics(library: Any) -> None:
    """The metrics of a replica are summed."""
    several = [library.metrics.SparseTopKCategoricalAccuracy, library.metrics.SparseCategoricalAccuracy]
    require_equal_fits(library, dense, metrics=lambda: [each() for each in several])


def callbacks(library: Any) -> None:
    """Each run has a separate folder, with equal files."""
    with tempfile.TemporaryDirectory() as folder:
        runs: list[Path] = []

        def made() -> list[Any]:
            run = Path(folder, str(len(runs)))
            runs.append(run)
            run.mkdir()
            stops = library.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)  # after its second epoch
            saves = library.callbacks.ModelCheckpoint(str(run / "last.weights.h5"), save_weights_only=True)
            rates = library.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
            board = library.callbacks.TensorBoard if find_spec("tensorboard") else library.callbacks.CSVLogger
            logs = board(str(run / "logs"))
            # Keras 3's BackupAndRestore takes the model out of the strategy's scope.
            backs_up = [tf_keras.callbacks.BackupAndRestore(str(run / "backup"))] if library is tf_keras else []
            return [stops, saves, rates, logs, *backs_up]

        require_equal_fits(library, dense, callbacks=made, epochs=3)
        assert len(runs) == 3
        assert all((run / "last.weights.h5").is_file() for run in runs)
        assert len({len(list(run.rglob("*"))) for run in runs}) == 1


def strategies_of_one_variable(library: Any) -> None:
    """CentralStorageStrategy, whose variables are on one device, and OneDeviceStrategy."""
    central = tf.distribute.experimental.CentralStorageStrategy
    for make in (
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        lambda: central(["CPU:0"], "CPU:0"),
        lambda: central(["CPU:0", "CPU:1"], "CPU:0"),
    ):
        require_equal_fits(library, dense, strategy=make)


LIBRARIES = (keras, tf_keras)
OF_BOTH = (mixed_precision, batch_norms, embeddings, metrics, callbacks, strategies_of_one_variable)


# ---- of one library ----


def several_steps_per_execution() -> None:
    """The last execution of an epoch has fewer steps."""
    require_equal_fits(tf_keras, dense, steps_per_execution=3)


def what_fails_in_keras_3() -> None:
    """Two things that Keras 3.15 cannot do on TensorFlow 2.21 under MirroredStrategy; one of them works with tfmem."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="You must feed a value for placeholder"):
        fitted(keras, dense, None, steps_per_execution=3)
    _, expected = fitted(keras, dense, None)
    for found in fits_and_moves(partial(fitted, keras, dense, steps_per_execution=3)):
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)

    def accumulating() -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    for budget in (None, AMPLE):
        with pytest.raises(RuntimeError, match="merge_call"):
            fitted(keras, dense, budget, optimizer=accumulating)


def optimizers_of_keras_3() -> None:
    """With what they keep beside weights."""
    require_equal_fits(keras, dense, optimizer=lambda: keras.optimizers.AdamW(global_clipnorm=1.0, use_ema=True))


def recurrent_layers() -> None:
    """They are replaced by other kernels on the replica's device, so numbers are close, with a budget and without."""
    _, expected = fitted(keras, recurrent, None)
    gc.collect()

    def close(found: Any) -> None:
        tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-3), found, expected)

    for found in fits_and_moves(partial(fitted, keras, recurrent), share=0.95):
        close(found)
    keras.utils.set_random_seed(1)
    with mirrored().scope():
        model = recurrent(keras)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(True), jit_compile=False)
    tfmem.optimize(model)
    model.fit(X, LABELS, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    assert len(tfmem.report(model).replaced) == 2, tfmem.report(model)
    np.testing.assert_allclose(model.predict(X, batch_size=SIZE, verbose=0), expected[2], atol=2e-3)


# ---- custom loops ----


class Distributed(Training):
    """The net, on parts of a batch that the caller made, of unequal sizes."""

    def losses(self, function: Any = None) -> list[float]:
        function = tf.function(self.in_all) if function is None else function
        parts = np.split(BATCH, [ROWS // 2 + 8])
        given = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )
        return [float(function(given)) for _ in range(5)]


class Iterated(Training):
    """The net, on batches of a distributed data set."""

    def losses(self, function: Any = None) -> list[float]:
        function = tf.function(self.in_all) if function is None else function
        rows = tf.data.Dataset.from_tensor_slices(np.concatenate([BATCH, BATCH[:100]])).batch(ROWS)
        return [float(function(x)) for x in self.strategy.experimental_distribute_dataset(rows)] * 2


class Accumulated(AllReduced):
    """The net, whose replicas add up the gradients of two halves of their batch before they meet."""

    def step(self, x: Any) -> Any:
        losses, sums = [], None
        for half in tf.split(x, 2):
            with tf.GradientTape() as tape:
                loss = self.loss(half)
            gradients = tape.gradient(loss, self.weights)
            sums = gradients if sums is None else [one + other for one, other in zip(sums, gradients, strict=True)]
            losses.append(loss)
        self.apply(sums)
        return tf.add_n(losses)


def custom_loops() -> None:
    plain, ours = (Distributed(mirrored()) for _ in range(2))
    require_moves(plain, ours)
    accumulated(0)


def other_custom_loops() -> None:
    plain, ours = (Iterated(mirrored()) for _ in range(2))
    require_moves(plain, ours)
    accumulated(5 * WIDTH * WIDTH * 4)


def accumulated(packed: int) -> None:
    """That tensors move where replicas meet in collectives of so many bytes after two halves of a batch."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=packed)
    require_moves(Accumulated(mirrored(), 0.0, options), Accumulated(mirrored(), 0.0, options))


def loops_of_strategies_with_one_variable() -> None:
    central = tf.distribute.experimental.CentralStorageStrategy
    for make in (
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        lambda: central(["CPU:0"], "CPU:0"),
    ):
        expected = Deep(make()).losses()
        for budget in (AMPLE, SCARCE):
            training = Deep(make())
            step = optimized(training.in_all, budget)
            assert training.losses(step) == expected
            assert (tfmem.report(step).decision == "moved") == (budget != AMPLE), tfmem.report(step)


def batches_of_an_iterator() -> None:
    """Where a step takes them itself, their size is not known: the report says so of each tensor that depends on it."""
    losses, rows = [], tf.data.Dataset.from_tensor_slices(BATCH).repeat()
    for budget in (None, AMPLE):
        training = Training(mirrored())
        batches = iter(training.strategy.experimental_distribute_dataset(rows.batch(ROWS)))

        def step(batches: Any, training: Any = training) -> Any:
            found = training.strategy.run(training.step, (next(batches),))
            return training.strategy.reduce("SUM", found, axis=None)

        function = tf.function(step) if budget is None else optimized(step, budget)
        losses.append([float(function(batches)) for _ in range(5)])
    assert losses[0] == losses[1], losses
    told = [why for tensor, why in tfmem.report(function).not_moved if tensor.startswith("IteratorGetNext")]
    assert told == ["its size is not known before it runs"] * 2


CASES: dict[str, Sequence[Callable[[], None]]] = {
    "loops": (custom_loops, loops_of_strategies_with_one_variable, batches_of_an_iterator),
    "other_loops": (other_custom_loops,),
    "of_keras_3": (what_fails_in_keras_3,),
    "optimizers": (optimizers_of_keras_3,),
    "recurrent": (recurrent_layers,),
    "of_tf_keras": (several_steps_per_execution, partial(metrics, tf_keras)),
    **{f"{case.__name__}_{library.__name__}": (partial(case, library),) for case in OF_BOTH for library in LIBRARIES},
}

if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
