"""Fused steps under a MirroredStrategy with two replicas on two CPU devices; says "equal" when all was well."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any
from unittest import mock

from graph_passes.decision import Fusion, FusionWhy
from graph_passes.passes.fuse.plan import FusionPlan
from tests.tf.composed_steps import UntilDecided
from tests.tf.in_replicas import (
    AMPLE,
    BATCH,
    ROWS,
    WIDTH,
    AllReduced,
    Training,
    keras,
    mirrored,
    np,
    run_cases,
    tf,
    tf_keras,
    tfmem,
)
from tfmem.capture.concrete_function import capture_concrete
from tfmem.steps.fused_replicas import against_edited, against_fusion
from tfmem.timing import ab_timing

MOST = 90  # calls until a step has settled
PASSES = ("recurrent", "fusion", "offload")


def fused(function: Any, tune: str = "off", **limits: Any) -> Any:
    options = tfmem.Options(passes=PASSES, fusion=tfmem.FusionOptions(tune=tune), cache_directory="", **limits)
    return tfmem.optimize(function, options=options)


def require_stitched(found: Any, timed: bool = False) -> None:
    """That a step is stitched; if it is timed, by either choice."""
    report = tfmem.report(found)
    assert report.regions
    if timed:
        assert ", in turn" in report.fusion, report.fusion
        return
    assert report.decision == "stitched", report
    assert "on all replicas" in report.fusion, report.fusion


def require_mirrored(variables: Any) -> int:
    """That replicas have equal variables, to the bit; how many variables are mirrored."""
    found = [variable.values for variable in variables if hasattr(variable, "values")]
    for first, *others in found:
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())
    return len(found)


def require_equal(plain: Training, ours: Training, tune: str = "off", **limits: Any) -> Any:
    """That losses and weights are those without tfmem, to rounding."""
    step = fused(tf.function(ours.in_all), tune, **limits)
    tf.random.set_seed(1)
    times, reference = 1 if tune == "off" else 7, tf.function(plain.in_all)
    expected = [loss for _ in range(times) for loss in plain.losses(reference)]
    tf.random.set_seed(1)
    np.testing.assert_allclose([loss for _ in range(times) for loss in ours.losses(step)], expected, rtol=1e-4)
    require_stitched(step, timed=tune != "off")
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.values[0].numpy(), given.values[0].numpy(), atol=1e-5)
    assert require_mirrored(ours.weights) == len(ours.weights)
    return tfmem.report(step)


def loops_with_collectives() -> None:
    """With one collective and with several; random streams are those without tfmem."""
    equal_regions(0, 0.0, "off")
    equal_regions(5 * WIDTH * WIDTH * 4, 0.5, "fast")


def loops_with_other_collectives() -> None:
    for packed, rate, tune in ((0, 0.5, "fast"), (0, 0.5, "full"), (5 * WIDTH * WIDTH * 4, 0.0, "off")):
        equal_regions(packed, rate, tune)


def equal_regions(packed: int, rate: float, tune: str) -> None:
    """That both devices run equal regions beside collectives of so many bytes."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=packed)
    plain, ours = AllReduced(mirrored(), rate, options), AllReduced(mirrored(), rate, options)
    report = require_equal(plain, ours, tune)
    ops = [sorted(op for step in region.steps for _, op in step.ops) for region in report.regions]
    updates = [found for found in ops if "AssignSubVariableOp" in found]
    assert len(updates) == 2, "each device updates its variables in a region"
    assert all(ops.count(found) == 2 for found in ops), report


def loops_without() -> None:
    for reduced in (tf.distribute.ReductionToOneDevice, tf.distribute.HierarchicalCopyAllReduce):
        require_equal(Training(mirrored(reduced), 0.2), Training(mirrored(reduced), 0.2))


def back_through_a_peer() -> None:
    """A device reads what another made behind a collective that waits for both: it is in no region with what is before.

    GPU:0    a0 -> c0    b0              {a0, b0} would wait for c1, which waits for c0 to begin.
    GPU:1    a1 -> c1 -> b1 -> b0
    """

    def replica(x: Any) -> Any:
        before = tf.exp(tf.sin(tf.exp(tf.sin(x))))
        summed = tf.distribute.get_replica_context().all_reduce("SUM", before)
        return before, tf.exp(-tf.abs(summed))

    def step(x: Any) -> Any:
        before, behind = mirrored().run(replica, (x,))
        with tf.device("CPU:0"):
            mine, theirs = before.values[0], behind.values[1]
            return tf.sin(mine * theirs + tf.exp(-mine) * theirs) + mine

    x = tf.constant(BATCH)
    captured = capture_concrete(tf.function(step).get_concrete_function(x))
    assert not against_edited(captured, FusionPlan(), {})
    nodes = {node.name: node for node in captured.graph_def.node}
    assert not against_fusion(captured, {})
    size = nodes[nodes["CollectiveReduceV2"].input[1]].attr["value"].tensor
    size.int_val[0] = 4  # as if two more replicas were in another process
    assert against_fusion(captured, {}) == FusionWhy.OTHER_WORKERS
    size.int_val[0] = 2
    nodes["Sin"].input.append("^replica_1/Neg")  # as if a region held both what is before and what is behind
    assert "wait for itself" in against_edited(captured, FusionPlan(), {})
    ours = fused(tf.function(step))
    np.testing.assert_allclose(ours(x).numpy(), tf.function(step)(x).numpy(), rtol=1e-4, atol=1e-6)
    require_stitched(ours)


def within_an_ample_budget() -> None:
    require_equal(Training(mirrored(), 0.2), Training(mirrored(), 0.2), memory_budget=AMPLE)


def not_asked_for() -> None:
    """Neither where nothing has to move, nor where something has."""
    training = Training(mirrored())
    step = tfmem.optimize(tf.function(training.in_all))
    training.losses(step)
    assert not tfmem.report(step).regions
    budget = scarce(Training(mirrored()))
    step = tfmem.optimize(tf.function(training.in_all), memory_budget=budget, cache_directory="")
    settled(training, step)
    report = tfmem.report(step)
    assert report.decision == "moved", report
    assert not report.regions


class Gelus(AllReduced):
    """A net of which regions take much."""

    layers = 6

    def loss(self, x: Any) -> tf.Tensor:
        for weight in self.weights:
            x = tf.nn.gelu(x @ weight)
            if self.rate:
                x = tf.nn.dropout(x, self.rate, seed=3)
        return tf.reduce_mean(x**2)


class Uneven(Gelus):
    """A net of which the first device computes more behind a collective."""

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        gradients = tape.gradient(loss, self.weights)
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients, self.options)
        changes = [0.1 * tf.tanh(gradient) for gradient in summed]
        for weight, change in zip(self.weights, changes, strict=True):
            weight.assign_sub(change)
        return loss, changes[0]

    def in_all(self, x: Any) -> Any:
        losses, changes = self.strategy.run(self.step, (x,))
        with tf.device("CPU:0"):
            more = tf.reduce_mean(tf.exp(changes.values[0]))
        return self.strategy.reduce("SUM", losses, axis=None) + more


def gelus(packed: int = 0, rate: float = 0.0, kind: type[Gelus] = Gelus) -> Gelus:
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=packed)
    return kind(mirrored(), rate, options)


def scarce(training: Training) -> int:
    """A budget under which tensors of a net have to move."""
    step = tfmem.optimize(tf.function(training.in_all), memory_budget=AMPLE, cache_directory="")
    training.losses(step)
    return round(0.8 * tfmem.report(step).peak_before)


def settled(training: Training, step: Any) -> list[float]:
    """The losses of a step until it has settled, and of five calls more."""
    found = training.losses(step)
    ((managed,),) = [list(each.values()) for each in step._steps.values()]
    while not managed.settled and len(found) < MOST:
        managed.wait()
        found += training.losses(step)
    assert managed.settled, managed.phase
    return [*found, *training.losses(step)]


def moved(plain: Training, ours: Training, budget: int, regions_win: bool = True, **how: Any) -> Any:
    """The report of a net that trains within a budget as one without tfmem, to rounding; replicas stay equal."""
    step, reference = fused(tf.function(ours.in_all), memory_budget=budget, **how), tf.function(plain.in_all)
    tf.random.set_seed(1)
    with (
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: regions_win)),
    ):
        found = settled(ours, step)
    tf.random.set_seed(1)
    expected = [loss for _ in range(len(found) // 5) for loss in plain.losses(reference)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    require_mirrored(ours.weights)
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), given.numpy(), atol=1e-5)
    report = tfmem.report(step)
    assert report.decision == "moved", report
    return report


def require_within(report: Any) -> None:
    """That regions run beside moves, and that the allocator's budget is kept."""
    require_both(report)
    (device,) = report.devices
    assert device.peak_measured == report.peak_measured <= device.budget, report
    assert not any("OVER BUDGET" in note for note in report.notes), report


def require_both(report: Any) -> None:
    """That regions run beside moves of both devices, equal ones on both."""
    assert report.fusion_state == Fusion.STITCHED, report
    assert report.running, report
    of_second = [record.tensor.startswith("replica_1/") for record in report.transfers]
    assert len(set(of_second)) == 2 or any("fusion" in record.tensor for record in report.transfers), report
    ops = [sorted(op for step in region.steps for _, op in step.ops) for region in report.running]
    assert not any(ops.count(each) % 2 for each in ops if "AssignSubVariableOp" in each), report


def beside_moves() -> None:
    """Timed in turn with what runs without regions; random streams are those without tfmem."""
    budget = scarce(gelus(rate=0.2))
    require_within(moved(gelus(rate=0.2), gelus(rate=0.2), budget, tune="full"))


def beside_moves_of_unequal_devices() -> None:
    """What updates a variable is in equal regions, or in none."""
    plain, ours = gelus(kind=Uneven), gelus(kind=Uneven)
    require_within(moved(plain, ours, scarce(gelus(kind=Uneven)), tune="full"))


def beside_moves_of_several_collectives() -> None:
    packed = 2 * WIDTH * WIDTH * 4
    budget = scarce(gelus(packed))
    require_within(moved(gelus(packed), gelus(packed), budget, tune="fast"))


def moves_stay_where_regions_are_slower() -> None:
    report = moved(gelus(), gelus(), scarce(gelus()), regions_win=False, tune="full")
    assert report.fusion_state == Fusion.LEFT
    assert report.fusion.startswith("left unchanged: stitched it t"), report.fusion


def beside_moves_as_the_model_chooses() -> None:
    """Whether measured or not, no call is timed; the budget is kept by plan."""
    budget = scarce(gelus())
    for how in ({"tune": "off"}, {"tune": "fast", "observe": False}):
        report = moved(gelus(), gelus(), budget, **how)
        assert report.fusion in (FusionWhy.REPLICAS, FusionWhy.SLOWER), report
        assert report.regions
        assert report.devices[0].peak_predicted <= budget


def beside_moves_of_one_replica() -> None:
    """A strategy of one replica, whose variables have one copy."""
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    made = [Gelus(one, 0.0, None) for _ in range(3)]
    for each in made:
        each.apply = partial(Training.apply, each)  # type: ignore[method-assign]
    first, plain, ours = made
    report = moved(plain, ours, scarce(first), tune="full")
    assert report.running, report.fusion
    assert not report.devices
    assert report.peak_measured <= report.budget


def fitted(epochs: int, **options: Any) -> tuple[Any, Any]:
    """A model that `fit` trained for so many epochs, or until it is decided whether regions run; and its logs."""
    keras.utils.set_random_seed(1)
    with mirrored().scope():
        parts = [keras.Input((WIDTH,))]
        for _ in range(6):
            parts += [keras.layers.Dense(256), keras.layers.BatchNormalization(), keras.layers.Activation("gelu")]
        model = keras.Sequential([*parts, keras.layers.Dropout(0.2), keras.layers.Dense(7)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    until = []
    if options:
        fused(model, **options)
        until = [UntilDecided()] if "memory_budget" in options else []
    batches = tf.data.Dataset.from_tensors((BATCH, np.arange(ROWS) % 7)).repeat(8)  # each epoch makes an iterator
    settings = tf.data.Options()
    settings.autotune.enabled = False  # whose thread sleeps for up to a minute before an iterator can end
    logs = model.fit(batches.with_options(settings), epochs=epochs, verbose=0, callbacks=until).history
    return model, logs


def models_train_beside_moves() -> None:
    """With moving averages, metrics and momentum, all equal on both devices."""
    model, _ = fitted(1, memory_budget=AMPLE, tune="full")
    budget = round(0.9 * tfmem.report(model).peak_before)
    del model
    gc.collect()  # what it holds counts towards the budget
    with (
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: True)),
    ):
        model, found = fitted(8, memory_budget=budget, tune="full")
    _, expected = fitted(len(found["loss"]))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=2e-3)
    np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=0.02)
    assert require_mirrored([each.value for each in (*model.trainable_variables, *model.optimizer.variables)]) > 16
    reports = (tfmem.report(model), *tfmem.report(model).others)
    require_both(next(each for each in reports if each.function == "train"))


def trained(library: Any, ours: bool) -> tuple[Any, Any]:
    """A model, and all that `fit`, `evaluate` and `predict` give, with partial last batches."""
    x, y = BATCH, np.arange(ROWS) % 7
    library.utils.set_random_seed(1)
    with mirrored().scope():
        parts = [library.Input((WIDTH,))]
        for _ in range(3):
            parts += [library.layers.Dense(64), library.layers.BatchNormalization(), library.layers.Activation("gelu")]
        model = library.Sequential([*parts, library.layers.Dropout(0.2), library.layers.Dense(7)])
        rate = library.optimizers.schedules.ExponentialDecay(1e-3, 2, 0.9)
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = library.optimizers.Adam(rate, clipnorm=1.0)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    if ours:
        fused(model)
    history = model.fit(x, y, batch_size=1000, epochs=2, shuffle=False, verbose=0).history
    scores = model.evaluate(x, y, batch_size=600, verbose=0)
    return model, (history, scores, model.predict(x, batch_size=600, verbose=0), model.get_weights())


def models_train(library: Any) -> None:
    _, expected = trained(library, False)
    model, found = trained(library, True)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), found, expected)
    require_stitched(model)
    every = (*model.trainable_variables, *model.optimizer.variables)
    variables = [each if hasattr(each, "values") else each.value for each in every]
    assert require_mirrored(variables) > 3 * len(model.trainable_variables)


def models_of_keras_train() -> None:
    models_train(keras)


def models_of_tf_keras_train() -> None:
    models_train(tf_keras)


CASES = {
    "loops": (loops_with_collectives, loops_without, back_through_a_peer, within_an_ample_budget),
    "collectives": (loops_with_other_collectives,),
    "moves": (not_asked_for, beside_moves, beside_moves_of_unequal_devices),
    "moves_keras": (models_train_beside_moves,),
    "other_moves": (
        beside_moves_of_several_collectives,
        moves_stay_where_regions_are_slower,
        beside_moves_as_the_model_chooses,
        beside_moves_of_one_replica,
    ),
    "keras": (models_of_keras_train,),
    "tf_keras": (models_of_tf_keras_train,),
}


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)  # ops side by side would take other memory in each call
    run_cases(CASES[sys.argv[1]])
