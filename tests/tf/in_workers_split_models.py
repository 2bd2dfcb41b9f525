"""Models of two workers that train in pieces of the batch; see `tests.tf.in_workers`, which runs these cases."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.in_replicas import AMPLE
from tests.tf.in_workers_splits import TOLERANCE, require_asked, require_within
from tests.tf.one_worker import Worker


def dense(layers: Any, given: Any) -> Any:
    h = layers.Activation("sigmoid")(layers.Dense(1024, activation="tanh")(given))
    return layers.Dropout(0.3, seed=3)(layers.Dense(32, activation="tanh")(layers.Activation("tanh")(h)))


def normalized(layers: Any, given: Any) -> Any:
    h = layers.Conv2D(32, 3, padding="same", activation="tanh")(layers.Reshape((32, 32, 2))(given))
    gate = layers.Conv2D(32, 3, padding="same", activation="sigmoid")(h)
    h = layers.Conv2D(8, 4, 4)(layers.Multiply()([h, gate]))  # before any op that needs the whole batch
    h = layers.Flatten()(layers.Activation("tanh")(layers.BatchNormalization()(h)))
    return layers.Dropout(0.3, seed=3)(layers.Dense(32, activation="tanh")(h))


def fitted(worker: Worker, budget: int | None, net: Any, rows: int, size: int) -> tuple[Any, Any]:
    """A model, and all that `fit` and `evaluate` give; the last batch is partial.

    Args:
        worker: this one.
        budget: bytes; None for no tfmem.
        net: its layers.
        rows: examples, five batches of four.
        size: numbers of an example.
    """
    tf_keras.utils.set_random_seed(1)
    with worker.strategy.scope():
        given = tf_keras.Input((size,))
        found = tf_keras.Model(given, tf_keras.layers.Dense(5)(net(tf_keras.layers, given)))
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(tf_keras.optimizers.SGD(0.05, 0.9), loss, metrics=["accuracy"])
    if budget is not None:
        tfmem.optimize(found, memory_budget=budget, cache_directory="")
    draw = np.random.default_rng(worker.index)
    labels = draw.integers(0, 5, rows)
    examples = (draw.normal(size=(rows, size)) + labels[:, None]).astype(np.float32)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.from_tensor_slices((examples, labels)).batch(rows * 4 // 5).with_options(options)
    history = found.fit(data, epochs=4, verbose=0).history
    return found, (history, found.evaluate(data, verbose=0), found.get_weights())


def models_train(worker: Worker, share: float, *net: Any) -> tuple[Any, int]:
    """That a model trains in pieces as without tfmem; its report, and the budget of this worker. Worker 0 has room."""
    _, expected = fitted(worker, None, *net)
    whole = int(tfmem.report(fitted(worker, AMPLE, *net)[0]).peak_before)
    budget = (AMPLE, int(share * whole))[worker.index]
    ours, found = fitted(worker, budget, *net)
    tf.nest.map_structure(partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), found, expected)
    require_asked(tfmem.report(ours), 1)
    history, evaluated, weights = found
    worker.both(hashlib.sha256(repr((history, evaluated)).encode()).hexdigest())
    worker.both(hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest())
    return tfmem.report(ours), budget


def models_in_pieces(worker: Worker) -> None:
    report, budget = models_train(worker, 0.5, dense, 1950, 64)
    require_within(report, budget)


def models_between_batch_norms_in_pieces(worker: Worker) -> None:
    """What oneDNN takes for convolutions beside tensors is in no estimate, so a peak may be over the budget."""
    report, _ = models_train(worker, 0.66, normalized, 60, 2048)
    assert report.splits, report
    assert worker.index == 0 or report.peak_measured < report.peak_before, report


MODELS = (models_in_pieces, models_between_batch_norms_in_pieces)
