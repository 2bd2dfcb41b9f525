"""Steps under a MirroredStrategy with two replicas, each on a device of the CPU; says "equal" when all was well."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tfmem.steps import measuring

ROWS, WIDTH = 1024, 128
BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
LIMIT, MIB = 300, 1 << 20  # seconds of a case, and bytes
AMPLE = 4096 * MIB
SCARCE = 8 * MIB  # for a `Deep` net


class Training:
    """A net, each layer with separate weights: enough layers for plans to have a choice."""

    layers = 10

    def __init__(self, strategy: tf.distribute.Strategy, rate: float = 0.0) -> None:
        """`rate` is of dropout."""
        tf.random.set_seed(1)
        self.strategy, self.rate = strategy, rate
        with strategy.scope():
            self.weights = [
                tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [seed, 2], stddev=0.1))
                for seed in range(self.layers)
            ]
            self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(self.weights)
        self.gradients: Callable[..., Any] | None = None

    def loss(self, x: Any) -> tf.Tensor:
        for weight in self.weights:
            x = tf.tanh(x @ weight)
            if self.rate:
                x = tf.nn.dropout(x, self.rate, seed=3)
        return tf.reduce_mean(x**2)

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        take = self.gradients
        gradients = tape.gradient(loss, self.weights) if take is None else take(loss, self.weights)
        self.apply(gradients)
        return loss

    def apply(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))

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


class Deep(Training):
    """A net that needs more than `SCARCE`."""

    layers = 14


class AllReduced(Training):
    """The net, whose replicas sum their gradients themselves, in collectives of a size."""

    def __init__(self, strategy: tf.distribute.Strategy, rate: float, options: Any) -> None:
        super().__init__(strategy, rate)
        self.options = options

    def apply(self, gradients: Any) -> None:
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients, self.options)
        for weight, gradient in zip(self.weights, summed, strict=True):
            weight.assign_sub(0.1 * gradient)


@cache
def mirrored(reduced: type[Any] | None = None) -> tf.distribute.MirroredStrategy:
    """One for all cases: each strategy counts its collectives from the same number, and TensorFlow remembers shapes."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduced() if reduced else None)


def peak_of(training: Training) -> int:
    """Bytes that a step of it takes on both devices, as predicted."""
    step = optimized(training.in_all, AMPLE)
    step(tf.constant(BATCH))
    return int(tfmem.report(step).peak_before)


@cache
def usual_peak(rate: float = 0.0) -> int:
    """The usual peak of a net; `rate` is of dropout."""
    return peak_of(Training(mirrored(), rate))


def optimized(function: Any, budget: int | None = None) -> Any:
    limits = {} if budget is None else {"memory_budget": budget, "cache_directory": ""}
    return tfmem.optimize(tf.function(function), **limits)


def a_step_that_fits_runs_as_given() -> None:
    plain, ours = Training(mirrored(), 0.5), Training(mirrored(), 0.5)
    step = optimized(ours.in_all, AMPLE)
    expected = plain.losses()
    tf.random.set_seed(1)
    assert ours.losses(step) == expected
    assert tfmem.report(step).decision.startswith("unchanged")


def a_step_that_may_fit_is_not_probed() -> None:
    plain, ours = Training(mirrored()), Training(mirrored())
    step = optimized(ours.in_all, 2 * usual_peak())
    assert ours.losses(step) == plain.losses()
    assert tfmem.report(step).decision.startswith("unchanged")


def tensors_move_on_each_device() -> None:
    """With several collectives, and with sums on one device; values and weights stay equal to the bit."""
    collectives_of(5 * WIDTH * WIDTH * 4, 0.5)
    sums_on(tf.distribute.ReductionToOneDevice)


def tensors_move_whatever_is_packed() -> None:
    """With one collective, with several, with one for each tensor, and with other sums on one device."""
    for packed in (0, 5 * WIDTH * WIDTH * 4, WIDTH * WIDTH):
        for rate in (0.0, 0.5):
            collectives_of(packed, rate)
    sums_on(tf.distribute.HierarchicalCopyAllReduce)


def collectives_of(packed: int, rate: float) -> None:
    """That tensors move beside collectives of so many bytes; `rate` is of dropout."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=packed)
    plain, ours = (AllReduced(mirrored(), rate, options) for _ in range(2))
    require_moves(plain, ours)


def sums_on(reduced: type[Any]) -> None:
    """That tensors move beside sums of this kind."""
    plain, ours = (Training(mirrored(reduced)) for _ in range(2))
    require_moves(plain, ours)


def require_moves(plain: Training, ours: Training) -> None:
    """That half of what the step needs beyond its variables is enough, and that nothing else is computed."""
    step = optimized(ours.in_all, AMPLE)
    ours.losses(step)
    peak = tfmem.report(step).peak_before
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        weight.assign(given)
    step = optimized(ours.in_all, round(0.8 * peak))
    tf.random.set_seed(1)
    expected = plain.losses()
    tf.random.set_seed(1)
    assert ours.losses(step) == expected
    report = tfmem.report(step)
    assert report.decision == "moved", report
    (on_cpus,) = report.devices  # one allocator for both
    assert (on_cpus.device, on_cpus.lanes, on_cpus.budget) == ("CPU:0", 2, round(0.8 * peak)), on_cpus
    assert on_cpus.peak_measured == report.peak_measured, on_cpus
    assert on_cpus.transfers == len(report.transfers)
    replicas = [name.startswith("replica_1/") for name in (record.tensor for record in report.transfers)]
    assert any(replicas)
    assert not all(replicas)
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        for mine, theirs in zip(weight.values, given.values, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def moves_are_bounded_by_what_the_host_takes() -> None:
    """All devices together: each alone would fit."""
    training, budget = Training(mirrored()), round(0.8 * usual_peak())
    step = optimized(training.in_all, budget)
    step(tf.constant(BATCH))
    moved = tfmem.report(step).bytes_out_predicted
    bounded = tfmem.OffloadOptions(spill_budget=moved - 1)
    options = tfmem.Options(memory_budget=budget, cache_directory="", offload=bounded)
    with pytest.raises(tfmem.HostMemoryError, match="spill_budget"):
        tfmem.optimize(tf.function(training.in_all), options=options)(tf.constant(BATCH))


def steps_that_take_more_than_planned_are_planned_again() -> None:
    """Losses stay equal to the bit while plans follow one another; a budget that is missed in the end is told."""
    plain, ours = (Training(mirrored(), 0.5) for _ in range(2))
    step = optimized(ours.in_all, round(0.8 * usual_peak(0.5)))
    reference = tf.function(plain.in_all)
    tf.random.set_seed(1)
    expected = [loss for _ in range(6) for loss in plain.losses(reference)]
    tf.random.set_seed(1)
    assert [loss for _ in range(6) for loss in ours.losses(step)] == expected
    report = tfmem.report(step)
    (found,) = report.devices
    assert 0.5 * found.peak_predicted < found.peak_measured, found
    told = any("OVER BUDGET" in note for note in report.notes)
    assert told == (found.over > 0), report


def what_other_models_fill_is_no_bug() -> None:
    """Where measured times allow no plan within what is left of the budget, the plan by estimates stays."""
    plain, ours = Training(mirrored()), Training(mirrored())
    step = optimized(ours.in_all, round(0.8 * usual_peak()))

    def refuse(*_: Any, **__: Any) -> None:
        raise tfmem.InfeasibleBudgetError("too small; give at least 9 bytes", 9, "op")

    expected = plain.losses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "plan_replicas", refuse)
        with pytest.warns(tfmem.TfmemWarning) as caught:
            assert ours.losses(step) == expected
    told = [str(each.message) for each in caught if "planning by measured times" in str(each.message)]
    assert len(told) == 1, told
    assert "was not possible: too small" in told[0], told
    assert "free what other models hold" in told[0], told
    assert "bug" not in told[0], told
    assert tfmem.report(step).decision == "moved"


def budgets_by_device_are_those_of_the_strategy() -> None:
    training = Training(mirrored())
    step = tfmem.optimize(tf.function(training.in_all), memory_budget={"CPU:0": AMPLE}, cache_directory="")
    training.losses(step)
    assert [found.budget for found in tfmem.report(step).devices] == [AMPLE]
    with pytest.raises(tfmem.InvalidBudgetError, match="for CPU:0 instead of CPU:1"):
        tfmem.optimize(tf.function(training.in_all), memory_budget={"CPU:0": AMPLE, "CPU:1": AMPLE})


def a_budget_that_is_too_small_is_refused() -> None:
    training = Training(mirrored())
    before = [weight.numpy() for weight in training.weights]
    with pytest.raises(
        tfmem.InfeasibleBudgetError, match=r"not split along the batch: .* cannot be split, so no device"
    ):
        optimized(training.in_all, MIB)(tf.constant(BATCH))
    for weight, old in zip(training.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), old)


def trained(library: Any, budget: int | None) -> tuple[Any, Any]:
    """A model, and all that `fit`, `evaluate` and `predict` give, with partial last batches."""
    x, y = BATCH, np.arange(ROWS) % 7
    library.utils.set_random_seed(1)
    with mirrored().scope():
        parts = [library.Input((WIDTH,))]
        for _ in range(3):
            parts += [library.layers.Dense(128), library.layers.BatchNormalization(), library.layers.Activation("gelu")]
        model = library.Sequential([*parts, library.layers.Dropout(0.2), library.layers.Dense(7)])
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(library.optimizers.Adam(), loss, metrics=["accuracy"], jit_compile=False)
    if budget is not None:
        tfmem.optimize(model, memory_budget=budget)
    history = model.fit(x, y, batch_size=1000, epochs=2, shuffle=False, verbose=0).history
    scores = model.evaluate(x, y, batch_size=600, verbose=0)
    return model, (history, scores, model.predict(x, batch_size=600, verbose=0), model.get_weights())


def models_train(library: Any) -> None:
    """Logs, predictions and weights are equal to the bit, whether tensors move or not."""
    _, expected = trained(library, None)
    fits, found = trained(library, AMPLE)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    moves, found = trained(library, round(0.92 * tfmem.report(fits).peak_before))
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    assert tfmem.report(moves).decision == "moved", tfmem.report(moves)


def models_of_keras_train() -> None:
    models_train(keras)


def models_of_tf_keras_train() -> None:
    models_train(tf_keras)


def steps_that_are_edited_while_they_are_built() -> None:
    expected = Deep(mirrored()).losses()
    for budget in (AMPLE, SCARCE):
        wrapping, taking = Deep(mirrored()), Deep(mirrored())
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


def predictions(library: Any) -> None:
    x = BATCH[:64].reshape(64, 8, 16)
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


def predictions_of_keras() -> None:
    predictions(keras)


def predictions_of_tf_keras() -> None:
    predictions(tf_keras)


LOOPS = (
    a_step_that_fits_runs_as_given,
    a_step_that_may_fit_is_not_probed,
    tensors_move_on_each_device,
    a_budget_that_is_too_small_is_refused,
    moves_are_bounded_by_what_the_host_takes,
    steps_that_take_more_than_planned_are_planned_again,
    what_other_models_fill_is_no_bug,
    budgets_by_device_are_those_of_the_strategy,
    steps_that_are_edited_while_they_are_built,
    what_run_calls,
)
CASES = {
    "loops": LOOPS,
    "collectives": (tensors_move_whatever_is_packed,),
    "keras": (models_of_keras_train,),
    "predictions": (predictions_of_keras,),
    "tf_keras": (models_of_tf_keras_train, predictions_of_tf_keras),
}


def run_cases(cases: Sequence[Callable[[], None]]) -> None:
    """Run each case in this process, which has two devices. If one hangs, it prints all stacks and ends."""
    cpu, two = tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    for case in cases:
        print(getattr(case, "__name__", case), flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        gc.collect()  # what earlier cases leave counts towards budgets until it is gone
        case()
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # what comes after the last
    print("equal", flush=True)


if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
