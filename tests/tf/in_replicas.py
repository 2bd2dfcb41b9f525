"""Steps under a MirroredStrategy with two replicas, each on a device of the CPU; says "equal" when all was well."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

ROWS, WIDTH, LAYERS = 1024, 128, 14
BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
MIB = 1 << 20
AMPLE, SCARCE = 4096 * MIB, 8 * MIB


class Training:
    """A deep net, each layer with weights of its own."""

    def __init__(self, strategy: tf.distribute.Strategy, rate: float = 0.0) -> None:
        """`rate` is of dropout."""
        tf.random.set_seed(1)
        self.strategy, self.rate = strategy, rate
        with strategy.scope():
            self.weights = [
                tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [seed, 2], stddev=0.1)) for seed in range(LAYERS)
            ]
            self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(self.weights)
        self.gradients: Callable[..., Any] | None = None

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.tanh(h @ weight)
                if self.rate:
                    h = tf.nn.dropout(h, self.rate, seed=3)
            loss = tf.reduce_mean(h**2)
        take = self.gradients
        gradients = tape.gradient(loss, self.weights) if take is None else take(loss, self.weights)
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return loss

    def in_all(self, x: Any) -> Any:
        return self.strategy.reduce("SUM", self.strategy.run(self.step, (x,)), axis=None)

    def losses(self, function: Callable[..., Any] | None = None) -> list[float]:
        function = tf.function(self.in_all) if function is None else function
        return [float(function(tf.constant(BATCH))) for _ in range(5)]

    def refused(self, function: Any, *words: str) -> None:
        """That a call is refused before anything ran."""
        before = [weight.numpy() for weight in self.weights]
        with pytest.raises(tfmem.ReplicasError) as caught:
            function(tf.constant(BATCH))
        assert all(word in str(caught.value) for word in words), caught.value
        for weight, old in zip(self.weights, before, strict=True):
            np.testing.assert_array_equal(weight.numpy(), old)


def mirrored(**options: Any) -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], **options)


def optimized(function: Any, budget: int | None = None) -> Any:
    limits = {} if budget is None else {"memory_budget": budget, "cache_directory": ""}
    return tfmem.optimize(tf.function(function), **limits)


def a_step_that_fits_runs_as_given() -> None:
    for rate in (0.0, 0.5):
        plain, ours = Training(mirrored(), rate), Training(mirrored(), rate)
        step = optimized(ours.in_all, AMPLE)
        expected = plain.losses()
        tf.random.set_seed(1)
        assert ours.losses(step) == expected
        assert tfmem.report(step).decision.startswith("unchanged")


def a_step_that_may_fit_is_not_probed() -> None:
    plain, ours = Training(mirrored()), Training(mirrored())
    step = optimized(ours.in_all, AMPLE)
    assert ours.losses(step) == plain.losses()
    peak = tfmem.report(step).peak_before
    step = optimized(ours.in_all, round(1.1 * peak) + 2 * MIB)
    assert ours.losses(step) == plain.losses()
    assert tfmem.report(step).decision.startswith("unchanged")


def a_budget_that_is_too_small_is_refused() -> None:
    with_collectives = Training(mirrored())
    step = optimized(with_collectives.in_all, SCARCE)
    with_collectives.refused(step, "CollectiveReduceV2", "several replicas")
    on_one = Training(mirrored(cross_device_ops=tf.distribute.ReductionToOneDevice()))
    on_one.refused(optimized(on_one.in_all, SCARCE), "replica_1/", "several replicas")
    on_one.refused(optimized(on_one.in_all, 1), "several replicas")  # no plan would do, either


def steps_that_are_edited_while_they_are_built() -> None:
    expected = Training(mirrored()).losses()
    for budget in (AMPLE, SCARCE):
        wrapping, taking = Training(mirrored()), Training(mirrored())
        wrapping.optimizer = tfmem.wrap_optimizer(wrapping.optimizer, memory_budget=budget)
        taking.gradients = lambda *given, budget=budget: tfmem.avm_gradients(*given, memory_budget=budget)
        for training in (wrapping, taking):
            if budget == AMPLE:
                assert training.losses() == expected
            else:
                training.refused(tf.function(training.in_all), "MirroredStrategy with 2 replicas")


def what_run_calls() -> None:
    for devices in (["CPU:0", "CPU:1"], ["CPU:0"]):
        strategy = tf.distribute.MirroredStrategy(devices)
        training = Training(strategy)
        inner = optimized(training.step)
        training.refused(lambda x, inner=inner, strategy=strategy: strategy.run(inner, (x,)), "the function around it")
        training.step = inner  # type: ignore[method-assign]
        training.refused(tf.function(training.in_all), "the function around it")
        apart = optimized(lambda x: 2 * x)
        found = strategy.experimental_local_results(strategy.run(apart, (tf.ones([]),)))
        assert [float(part) for part in found] == [2.0] * len(devices)


def predictions() -> None:
    x = BATCH[:64].reshape(64, 8, 16)
    for library in (keras, tf_keras):
        for layers in ("dense", "lstm"):
            with mirrored().scope():
                layer = library.layers.LSTM(4) if layers == "lstm" else library.layers.Flatten()
                model = library.Sequential([library.Input((8, 16)), layer, library.layers.Dense(3)])
            expected = model.predict(x, batch_size=16, verbose=0)
            several = model.predict(x, batch_size=24, verbose=0)
            tfmem.optimize(model)
            compare = np.testing.assert_array_equal if layers == "dense" else np.testing.assert_allclose
            tolerance = {} if layers == "dense" else {"atol": 1e-5}
            compare(model.predict(x, batch_size=16, verbose=0), expected, **tolerance)
            compare(model.predict(x, batch_size=24, verbose=0), several, **tolerance)


def main() -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    for case in (
        a_step_that_fits_runs_as_given,
        a_step_that_may_fit_is_not_probed,
        a_budget_that_is_too_small_is_refused,
        steps_that_are_edited_while_they_are_built,
        what_run_calls,
        predictions,
    ):
        print(case.__name__, flush=True)
        case()
    print("equal")


if __name__ == "__main__":
    main()
