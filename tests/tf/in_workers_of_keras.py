"""What models of tf_keras do on two workers; see `tests.tf.in_workers`, which runs these cases."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.in_replicas import AMPLE, BATCH
from tests.tf.one_worker import Worker, survives


def models_of_tf_keras_train(worker: Worker) -> None:
    fits(worker, moves=(True, True))


def plans_of_models_differ(worker: Worker) -> None:
    """One worker moves tensors and the other runs TensorFlow's graph; Adam's updates are equal on both."""
    fits(worker, moves=(False, True))


def fits(worker: Worker, moves: tuple[bool, bool]) -> None:
    """That models train as without tfmem, in a budget that fits, and then with moves on some workers."""
    _, expected = fitted(worker, None)
    model, found = fitted(worker, AMPLE)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    assert not tfmem.report(model).transfers, tfmem.report(model)
    budget = round(0.9 * tfmem.report(model).peak_before)
    model, found = fitted(worker, budget if moves[worker.index] else AMPLE)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    assert (tfmem.report(model).decision == "moved") == moves[worker.index], tfmem.report(model)
    history, weights = found
    worker.both(hashlib.sha256(repr(history).encode() + b"".join(part.tobytes() for part in weights)).hexdigest())


def a_model_is_stitched(worker: Worker) -> None:
    """It trains, evaluates and predicts, as one without tfmem to rounding, and without a word of tfmem."""
    plain, (expected, _) = fitted(worker, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, (history, weights) = fitted(worker, None, passes=("recurrent", "fusion", "offload"))
        plain.set_weights(weights)
        tf.nest.map_structure(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), used(model), used(plain))
    told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
    assert not told, told
    assert tfmem.report(model).regions
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-3)
    worker.both(hashlib.sha256(repr(history).encode() + b"".join(part.tobytes() for part in weights)).hexdigest())


def used(model: Any) -> tuple[Any, Any]:
    """What evaluation says, and predictions."""
    return model.evaluate(batches(), verbose=0), model.predict(batches(), verbose=0)


class Kill(tf_keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the process in the middle of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


def a_model_is_killed(worker: Worker) -> None:
    """Worker 1 ends in its third epoch; `a_model_goes_on` then trains from where the second ended."""
    budget = round(0.9 * tfmem.report(fitted(worker, AMPLE)[0]).peak_before)
    last = [Kill()] if worker.index == 1 else []
    survives(lambda: fitted(worker, budget, [backup(worker), *last], epochs=1000))


def a_model_goes_on(worker: Worker) -> None:
    """Losses and weights are those of training without a pause."""
    _, (expected, weights) = fitted(worker, None, epochs=6)
    budget = round(0.9 * tfmem.report(fitted(worker, AMPLE)[0]).peak_before)
    model, (history, found) = fitted(worker, budget, [backup(worker)], epochs=6)
    assert tfmem.report(model).decision == "moved"
    done = 6 - len(history["loss"])
    assert done >= 2, history
    tf.nest.map_structure(
        np.testing.assert_array_equal, history, {name: all_[done:] for name, all_ in expected.items()}
    )
    tf.nest.map_structure(np.testing.assert_array_equal, found, weights)


def backup(worker: Worker) -> Any:
    return tf_keras.callbacks.BackupAndRestore(f"{worker.folder}-backup")


def fitted(
    worker: Worker,
    budget: int | None,
    callbacks: Sequence[Any] = (),
    epochs: int = 3,
    passes: tuple[Any, ...] | None = None,
) -> tuple[Any, Any]:
    tf_keras.utils.set_random_seed(1)
    with worker.strategy.scope():
        parts: list[Any] = [tf_keras.Input((128,))]
        for _ in range(5):
            parts += [tf_keras.layers.Dense(256), tf_keras.layers.Activation("gelu")]
        model = tf_keras.Sequential([*parts, tf_keras.layers.Dense(7)])
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.Adam(), loss, metrics=["accuracy"])
    if passes is not None:
        tfmem.optimize(model, passes=passes, cache_directory="", fusion=tfmem.FusionOptions(tune="off"))
    elif budget is not None:
        tfmem.optimize(model, memory_budget=budget)
    history = model.fit(batches(), epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return model, (history, model.get_weights())


def batches() -> tf.data.Dataset:
    """Equal batches on all workers."""
    rows = tf.data.Dataset.from_tensor_slices((BATCH, np.arange(len(BATCH)) % 7)).batch(1024)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return rows.with_options(options)
