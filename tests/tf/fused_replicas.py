"""Fused steps under a MirroredStrategy with two replicas on two CPU devices; says "equal" when all was well."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from graph_passes.decision import FusionWhy
from graph_passes.passes.fuse.plan import FusionPlan
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


def under_a_budget() -> None:
    """Fused where nothing has to move; a step whose tensors move stays unfused."""
    report = require_equal(Training(mirrored(), 0.2), Training(mirrored(), 0.2), memory_budget=AMPLE)
    training = Training(mirrored(), 0.2)
    step = fused(tf.function(training.in_all), memory_budget=round(0.8 * report.peak_before))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.losses(step)
    report = tfmem.report(step)
    assert report.decision == "moved", report
    assert not report.regions


def not_asked_for() -> None:
    training = Training(mirrored())
    step = tfmem.optimize(tf.function(training.in_all))
    training.losses(step)
    assert not tfmem.report(step).regions


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
    "loops": (loops_with_collectives, loops_without, back_through_a_peer, under_a_budget, not_asked_for),
    "collectives": (loops_with_other_collectives,),
    "keras": (models_of_keras_train,),
    "tf_keras": (models_of_tf_keras_train,),
}


if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
