"""Replicas in pieces of the batch, under a MirroredStrategy on two devices; says "equal" when all was well."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from graph_passes import lane_splitting
from graph_passes.passes.split.split_regions import Exactness
from tests.tf.in_replicas import AMPLE, MIB, mirrored, run_cases
from tfmem.steps import dividing, splits
from tfmem.steps.phases import Phase

ROWS, STEPS = 64, 6
IMAGES = np.random.default_rng(0).normal(size=(ROWS, 32, 32, 2)).astype(np.float32)
LABELS = np.arange(ROWS) % 5
TOLERANCE = 1e-4
SHARES = {"": 0.35, "stateful": 0.42, "stateless": 0.45, "generator": 0.35}  # of the bytes of a step


class Net:
    """Convolutions, whose results are large, with a batch norm by hand; each replica has part of the batch.

    Attributes:
        moving: the moving average of each replica; its mean is read.
    """

    def __init__(self, draws: str = "") -> None:
        """`draws`: how it drops numbers out: by "stateful" ops, by "stateless" ones, by a "generator", or not."""
        tf.random.set_seed(1)
        self.draws = draws
        with mirrored().scope():
            shapes = [(3, 3, 2, 16), (3, 3, 16, 16), (16, 5)]
            self.weights = [
                tf.Variable(tf.random.stateless_normal(shape, [place, 2], stddev=0.2))
                for place, shape in enumerate(shapes)
            ]
            self.moving = tf.Variable(
                tf.zeros([16]),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )
            self.generator = tf.random.Generator.from_seed(5) if draws == "generator" else None

    def dropped(self, x: Any) -> Any:
        if self.draws == "stateful":
            return tf.nn.dropout(x, 0.3, seed=3)
        if self.draws == "stateless":
            place = tf.distribute.get_replica_context().replica_id_in_sync_group
            return tf.nn.experimental.stateless_dropout(x, 0.3, seed=tf.stack([7, place]))
        if self.generator is not None:
            return x * tf.cast(self.generator.uniform([x.shape[0], 1, 1, 1]) > 0.3, x.dtype)
        return x

    def step(self, x: Any, y: Any) -> Any:
        first, second, head = self.weights
        with tf.GradientTape() as tape:
            h = tf.nn.conv2d(self.dropped(x), first, 1, "SAME")
            mean, variance = tf.nn.moments(h, [0, 1, 2])
            h = tf.nn.relu((h - mean) * tf.math.rsqrt(variance + 1e-3))
            h = tf.nn.relu(tf.nn.conv2d(self.dropped(h), second, 1, "SAME"))
            logits = tf.reduce_mean(h, [1, 2]) @ head
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=ROWS)
        self.moving.assign(0.9 * self.moving + 0.1 * mean)
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, self.weights))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    def in_all(self, x: Any, y: Any) -> Any:
        return mirrored().reduce("SUM", mirrored().run(self.step, (x, y)), axis=None)

    def values(self) -> list[Any]:
        """What each replica has of all variables; of the trained ones equal to the bit."""
        for weight in self.weights:
            first, second = (value.numpy() for value in weight.values)
            np.testing.assert_array_equal(first, second)
        return [value.numpy() for variable in (*self.weights, self.moving) for value in variable.values]


def dealt() -> tuple[Any, Any]:
    """The batch, a half for each replica."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(ROWS)
    return next(iter(mirrored().experimental_distribute_dataset(data)))


def losses(function: Callable[..., Any], arguments: tuple[Any, Any], steps: int = STEPS) -> list[float]:
    tf.random.set_seed(1)
    return [float(function(*arguments)) for _ in range(steps)]


def optimized(function: Any, budget: int, **options: Any) -> Any:
    offload = tfmem.OffloadOptions(**options)
    return tfmem.optimize(tf.function(function), memory_budget=budget, offload=offload, cache_directory="")


def refused_at(share: float, run: Callable[..., Any]) -> int:
    """A budget that is refused with nothing split.

    Args:
        share: what it is of the bytes that the step needs by plan.
        run: runs the step within a budget, with options of the pass, and returns what was optimised.
    """
    ample = run(AMPLE)
    budget = int(share * tfmem.report(ample).peak_before)
    del ample
    with pytest.raises(tfmem.InfeasibleBudgetError):
        run(budget, split="never")
    gc.collect()
    return budget


def require_split(report: Any, budget: int) -> None:
    assert report.splits, report
    assert {record.device for record in report.splits} == {"CPU:0", "CPU:1"}, report
    assert len({len(record.pieces) for record in report.splits}) == 1, report
    assert {record.exactness for record in report.splits} == {Exactness.SUMS}
    assert f"on {report.splits[0].device}: " in str(report)
    (found,) = report.devices
    assert found.peak_predicted <= budget < found.peak_before, found
    assert found.peak_measured is None or found.peak_measured < found.peak_before, found


def close(found: Any, expected: Any) -> None:
    tf.nest.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE), found, expected
    )


def refused(draws: str, arguments: tuple[Any, Any], share: float) -> int:
    def run(size: int, **options: Any) -> Any:
        step = optimized(Net(draws).in_all, size, **options)
        step(*arguments)
        return step

    return refused_at(share, run)


def replicas_in_pieces(draws: str) -> None:
    """Losses, weights and moving averages are those of the unmodified step, to rounding."""
    plain, ours, arguments = Net(draws), Net(draws), dealt()
    budget = refused(draws, arguments, SHARES[draws])
    expected = losses(tf.function(plain.in_all), arguments)
    step = optimized(ours.in_all, budget)
    close(losses(step, arguments), expected)
    close(ours.values(), plain.values())
    require_split(tfmem.report(step), budget)


def loops_without_draws() -> None:
    replicas_in_pieces("")


def loops_that_read_their_data() -> None:
    """The step takes a batch from a distributed iterator itself."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(ROWS, drop_remainder=True).repeat()

    def reading(net: Net) -> Any:
        batches = iter(mirrored().experimental_distribute_dataset(data))
        return lambda: net.in_all(*next(batches))

    plain, ours = Net(), Net()
    expected = losses(tf.function(reading(plain), autograph=False), ())

    def run(size: int, **options: Any) -> Any:
        step = optimized(tf.autograph.experimental.do_not_convert(reading(Net())), size, **options)
        step()
        return step

    budget = refused_at(0.5, run)
    step = optimized(tf.autograph.experimental.do_not_convert(reading(ours)), budget)
    close(losses(step, ()), expected)
    require_split(tfmem.report(step), budget)


def stateful_draws_are_those_of_the_unmodified_step() -> None:
    replicas_in_pieces("stateful")


def stateless_draws_are_those_of_the_unmodified_step() -> None:
    replicas_in_pieces("stateless")


def generators_are_those_of_the_unmodified_step() -> None:
    replicas_in_pieces("generator")


def verification_says_how_near_results_are() -> None:
    net, arguments = Net(), dealt()
    step = optimized(net.in_all, refused("", arguments, SHARES[""]))
    held = tfmem.verify(tf.function(net.in_all), step, arguments, steps=2, variables=net.weights)
    assert held.exactness == Exactness.SUMS
    assert not held.bit_equal


def contested(measured: float, draws: str = "stateful") -> tuple[Any, list[Any], bool]:
    """A step whose moves are said to be slow, until it is settled; its losses are those of the unmodified step.

    Args:
        measured: how much of the time of moves the divided step may take, as measured.
        draws: see `Net`.

    Returns:
        Its report, its phases, and whether losses were equal to the bit.
    """
    plain, ours, arguments = Net(draws), Net(draws), dealt()
    step = optimized(ours.in_all, AMPLE)
    step(*arguments)
    budget, ours = int(0.7 * tfmem.report(step).peak_before), Net(draws)
    step, phases, found = optimized(ours.in_all, budget, split="faster"), [], []
    tf.random.set_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "rate_of", lambda *_: 1e-9)
        patch.setattr(lane_splitting, "CLEARLY", float("inf"))
        patch.setattr(dividing, "FASTER", measured)
        while not phases or not phases[-1].is_final:
            found.append(float(step(*arguments)))
            ((managed,),) = [list(each.values()) for each in step._steps.values()]
            managed.wait()
            phases += [managed.phase] if managed.phase not in phases[-1:] else []
        found += [float(step(*arguments)) for _ in range(3)]
    expected = losses(tf.function(plain.in_all), arguments, len(found))
    close(found, expected)
    close(ours.values(), plain.values())
    return tfmem.report(step), phases, found == expected


def pieces_that_are_faster_stay() -> None:
    report, phases, _ = contested(float("inf"))
    assert phases[-2:] == [Phase.DIVIDING, Phase.SETTLED], phases
    assert {record.device for record in report.splits} == {"CPU:0", "CPU:1"}, report
    assert any(str(note).startswith("split along the batch: ") for note in report.notes), report.notes
    assert report.step_measured_ns


def pieces_that_are_not_faster_go() -> None:
    """Random streams go on in the step that has moves; some steps were divided, and the report says so."""
    report, phases, _ = contested(1e-9)
    assert phases[-2:] == [Phase.DIVIDING, Phase.SETTLED], phases
    assert not report.splits
    (note,) = (str(note) for note in report.notes if "not split along the batch" in str(note))
    assert note.startswith("not split along the batch, after some steps that were, whose sums are equal to rounding: ")


def pieces_that_fail_go() -> None:
    """After an error of tfmem's the step keeps its moves, and its bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "split_lanes", lambda *_: {}[168])
        with pytest.warns(tfmem.TfmemWarning, match="splitting the batch failed"):
            report, phases, equal = contested(float("inf"))
    assert phases[-2:] == [Phase.DIVIDING, Phase.SETTLED], phases
    assert equal
    assert not report.splits


def what_cannot_be_split_says_why() -> None:
    arguments = dealt()
    with pytest.raises(tfmem.InfeasibleBudgetError, match="not split along the batch: split='never' was passed"):
        optimized(Net().in_all, MIB, split="never")(*arguments)
    with pytest.raises(tfmem.InfeasibleBudgetError, match=r"not split along the batch: .*CPU:0 cannot be split, so no"):
        optimized(Net().in_all, 1 << 10)(*arguments)


def model(library: Any) -> Any:
    """Smooth ops: with ReLU and maxima, a changed last bit of the input moves weights by 3e-4 in eight steps."""
    layers = library.layers
    library.utils.set_random_seed(1)
    with mirrored().scope():
        h = given = library.Input((32, 32, 2))
        h = layers.Conv2D(32, 3, padding="same", activation="tanh")(h)
        gate = layers.Conv2D(32, 3, padding="same", activation="sigmoid")(h)
        h = layers.Conv2D(8, 4, 4)(layers.Multiply()([h, gate]))  # before any op that needs the whole batch
        h = layers.Flatten()(layers.Activation("tanh")(layers.BatchNormalization()(h)))
        h = layers.Dropout(0.3, seed=3)(layers.Dense(32, activation="tanh")(h))
        found = library.Model(given, layers.Dense(5)(h))
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(library.optimizers.SGD(0.05, 0.9), loss, metrics=["accuracy"], jit_compile=False)
    return found


def fitted(library: Any, budget: int | None, **options: Any) -> tuple[Any, Any]:
    """A model, and all that `fit` and `evaluate` give."""
    found = model(library)
    if budget is not None:
        offload = tfmem.OffloadOptions(**options)
        found = tfmem.optimize(found, memory_budget=budget, offload=offload, cache_directory="")
    x, y = IMAGES[:61], LABELS[:61]
    history = found.fit(x, y, batch_size=48, epochs=4, shuffle=False, verbose=0).history
    return found, (history, found.evaluate(x, y, batch_size=16, verbose=0), found.get_weights())


def models_train(library: Any, share: float) -> None:
    """The last batch is partial, and its replicas have 7 and 6 examples."""
    expected = fitted(library, None)[1]
    budget = refused_at(share, lambda size, **options: fitted(library, size, **options)[0])
    ours, found = fitted(library, budget)
    close(found, expected)
    require_split(tfmem.report(ours), budget)


def models_of_keras_train() -> None:
    models_train(keras, 0.66)


def models_of_tf_keras_train() -> None:
    models_train(tf_keras, 0.66)


CASES = {
    "loops": (
        loops_without_draws,
        stateful_draws_are_those_of_the_unmodified_step,
        verification_says_how_near_results_are,
        what_cannot_be_split_says_why,
    ),
    "faster": (pieces_that_are_faster_stay, pieces_that_are_not_faster_go, pieces_that_fail_go),
    "draws": (stateless_draws_are_those_of_the_unmodified_step, generators_are_those_of_the_unmodified_step),
    "data": (loops_that_read_their_data,),
    "keras": (models_of_keras_train,),
    "tf_keras": (models_of_tf_keras_train,),
}


if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
