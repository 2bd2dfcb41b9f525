"""Strategies and forms of steps that tfmem does not plan: they run as without tfmem, or one sentence says what to do.

Called with the cases; says "equal" when all was well.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.experimental import dtensor

import tfmem
from tests.tf.in_replicas import AMPLE, BATCH, MIB, ROWS, SCARCE, WIDTH, Deep, Training, mirrored, optimized, run_cases

LABELS = np.arange(ROWS) % 7


@cache
def given() -> tf.Tensor:
    """The batch, once devices are known."""
    return tf.constant(BATCH)


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returns, and tfmem's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]


# ---- parts of a step ----


def in_a_loop(training: Training) -> Callable[[Any], Any]:
    def steps(x: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(2):
            total += training.in_all(x)
        return total

    return steps


def in_a_branch(training: Training) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e30, lambda: training.in_all(x), lambda: tf.constant(0.0))

    return step


def collectives_in_loops_and_branches() -> None:
    for make in (in_a_loop, in_a_branch):
        plain = Deep(mirrored())
        expected = plain.losses(tf.function(make(plain)))
        for budget in (None, AMPLE):
            ours = Deep(mirrored())
            step = optimized(make(ours), budget)
            found, told = warned(lambda ours=ours, step=step: ours.losses(step))
            assert found == expected
            assert not told, told
            report = tfmem.report(step)
            assert report.decision.startswith("unchanged"), report
            assert budget is None or "is inside of functions that the step calls" in report.notes[0], report
        ours = Deep(mirrored())
        ours.refused(optimized(make(ours), SCARCE), "is inside of functions that", "the function of one step")


def collectives_without_tokens() -> None:
    devices = ("CPU:0", "CPU:1")
    weights = [[tf.Variable(tf.eye(WIDTH) * 0.5) for _ in range(8)] for _ in devices]

    def step(x: Any) -> Any:
        losses = []
        for device, own in zip(devices, weights, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                y = x
                for weight in own:
                    y = tf.tanh(y @ weight)
                loss = tf.reduce_mean(y**2)
            with tf.device(device):
                for key, (weight, gradient) in enumerate(zip(own, tape.gradient(loss, own), strict=True)):
                    summed = tf.raw_ops.CollectiveReduce(
                        input=gradient,
                        group_size=2,
                        group_key=77,
                        instance_key=key,
                        merge_op="Add",
                        final_op="Id",
                        subdiv_offsets=[0],
                    )
                    weight.assign_sub(0.1 * summed)
            losses.append(loss)
        return tf.add_n(losses)

    with pytest.raises(tfmem.ReplicasError, match="no constant group key and ordering token"):
        optimized(step, 6 * MIB)(given())
    np.testing.assert_array_equal(weights[0][0], tf.eye(WIDTH) * 0.5)
    before = float(optimized(step, AMPLE)(given()))
    assert float(optimized(step)(given())) < before  # it trains


class Gradients(Deep):
    """Replicas that do not meet."""

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        return [loss, *tape.gradient(loss, list(self.weights))]


def what_run_calls_may_be_optimised_where_replicas_do_not_meet() -> None:
    local = mirrored().experimental_local_results
    training = Gradients(mirrored())
    expected = tf.nest.map_structure(local, mirrored().run(tf.function(training.step), (given(),)))
    for budget in (None, AMPLE, SCARCE):
        eager, traced = optimized(training.step, budget), optimized(training.step, budget)
        around = tf.function(lambda x, traced=traced: mirrored().run(traced, (x,)))
        for _ in range(4):
            for found in (mirrored().run(eager, (given(),)), around(given())):
                parts = tf.nest.map_structure(local, found)
                tf.nest.map_structure(np.testing.assert_array_equal, parts, expected)
        for step in (eager, traced):
            assert (tfmem.report(step).decision == "moved") == (budget == SCARCE), tfmem.report(step)


# ---- forms of a step ----


def concrete_functions() -> None:
    expected = Deep(mirrored()).losses()
    for budget in (AMPLE, SCARCE):
        decision = "moved" if budget == SCARCE else "unchanged: fits"
        made = Deep(mirrored())
        concrete = tf.function(made.in_all).get_concrete_function(given())
        found = tfmem.optimize(concrete, memory_budget=budget, cache_directory="")
        assert made.losses(found) == expected
        assert tfmem.report(found).decision == decision
        asked = Deep(mirrored())
        step = optimized(asked.in_all, budget)
        assert asked.losses(step.get_concrete_function(given())) == expected
        assert tfmem.report(step).decision == decision
        inner = Deep(mirrored())
        step = optimized(inner.in_all, budget)
        assert inner.losses(tf.function(lambda x, step=step: step(x))) == expected
        assert tfmem.report(step).decision == decision


def saved_models() -> None:
    """TensorFlow saves no step with collectives; what else a mirrored model computes is saved, and optimised."""

    class Saved(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            training = Deep(mirrored())
            self.weights = training.weights
            self.serve = tf.function(training.loss, input_signature=[tf.TensorSpec(given().shape)])
            self.train = tf.function(training.in_all, input_signature=[tf.TensorSpec(given().shape)])

    with tempfile.TemporaryDirectory() as folder:
        path, model = str(Path(folder, "model")), Saved()
        expected = model.serve(given())
        model.train(given())
        with pytest.raises((AssertionError, KeyError, ValueError)):
            tf.saved_model.save(model, path)
        path, model = str(Path(folder, "second")), Saved()
        del model.train
        tf.saved_model.save(model, path, signatures={"serve": model.serve})
        found = tf.saved_model.load(tfmem.optimize(path)).signatures["serve"](given())
        np.testing.assert_array_equal(*found.values(), expected)
        with mirrored().scope():
            loaded = tf.saved_model.load(tfmem.optimize(path, output=str(Path(folder, "third"))))
        found = mirrored().run(loaded.signatures["serve"], (given(),))
        for part in mirrored().experimental_local_results(*found.values()):
            np.testing.assert_array_equal(part, expected)


def sessions() -> None:
    """Replicas of a `tf.Graph` sum on one device, without collectives; none of their tensors moves."""
    v1 = tf.compat.v1

    def losses(how: str, budget: int | None) -> list[float]:
        with tf.Graph().as_default() as graph:
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            with strategy.scope():
                begin = v1.orthogonal_initializer(seed=1)
                weights = [v1.get_variable(f"w{number}", [WIDTH, WIDTH], initializer=begin) for number in range(8)]
                rule = v1.train.GradientDescentOptimizer(0.1)
            fed = v1.placeholder(tf.float32, BATCH.shape)

            def step(x: Any) -> Any:
                for weight in weights:
                    x = tf.tanh(x @ weight)
                loss = tf.reduce_mean(x**2)
                ours = tfmem.wrap_optimizer(rule, memory_budget=budget) if how == "wrapped" else rule
                with tf.control_dependencies([ours.minimize(loss)]):
                    return tf.identity(loss)

            total = strategy.reduce("SUM", strategy.run(step, (fed,)), axis=None)
            if how == "optimised":
                tfmem.optimize(graph, memory_budget=budget, fetches=[total.name])
            config = v1.ConfigProto(device_count={"CPU": 2})
            with v1.Session(graph=graph, config=tfmem.session_config(config)) as session:
                session.run(v1.global_variables_initializer())
                return [float(session.run(total, {fed: BATCH})) for _ in range(4)]

    expected = losses("plain", None)
    for how in ("optimised", "wrapped"):
        assert losses(how, AMPLE) == expected
        with pytest.raises(tfmem.ReplicasError, match=r"optimise the tf\.function around `strategy\.run`"):
            losses(how, 4 * MIB)


# ---- other strategies ----


def on_parameter_servers() -> None:
    """With both servers in this process."""
    os.environ["TF_GRPC_REUSE_PORT"] = "1"  # sockets that only share ports hold them until the servers listen
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("localhost", 0))
        addresses = [f"localhost:{each.getsockname()[1]}" for each in (first, second)]
        cluster = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
        servers = [tf.distribute.Server(cluster, job, 0, protocol="grpc") for job in ("worker", "ps")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(tf.ones([WIDTH, WIDTH]))

    @tf.function(input_signature=[])
    def step() -> Any:
        return tf.reduce_sum(BATCH @ weight)

    says = "give ClusterCoordinator.schedule the tf.function itself"
    for budget in (None, MIB):
        with pytest.raises(tfmem.ReplicasError, match=says):
            tfmem.optimize(step, memory_budget=budget)
    concrete = step.get_concrete_function()
    with pytest.raises(tfmem.ReplicasError, match=says):
        tfmem.optimize(concrete, memory_budget=MIB)
    ours = tfmem.optimize(concrete, passes=("recurrent", "fusion", "offload"))
    assert coordinator.schedule(ours).fetch() == coordinator.schedule(step).fetch()

    def rows(_: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((BATCH, LABELS)).batch(256).repeat()

    def history(budget: int | None, ours: bool) -> Any:
        tf_keras.utils.set_random_seed(1)
        with strategy.scope():
            model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), tf_keras.layers.Dense(7)])
            model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if ours:
            tfmem.optimize(model, memory_budget=budget)
        creator = tf_keras.utils.experimental.DatasetCreator(rows)
        return model.fit(creator, epochs=2, steps_per_epoch=4, verbose=0).history

    expected = history(None, ours=False)
    found, told = warned(lambda: history(None, ours=True))
    assert found == expected
    assert [says in message for message in told] == [True], told
    with pytest.raises(tfmem.ReplicasError, match="or fit the model itself"):
        history(MIB, ours=True)
    del servers


def on_tpus() -> None:
    """Without any: a variable says which strategy it is of."""
    weight = tf.Variable(tf.eye(WIDTH))
    weight._distribute_strategy = object.__new__(tf.distribute.TPUStrategy)

    def step(x: Any) -> Any:
        return tf.reduce_sum(x @ weight)

    with pytest.raises(tfmem.ReplicasError, match="on GPUs under MirroredStrategy"):
        optimized(step, AMPLE)(given())
    ours = tfmem.optimize(tf.function(step), passes=("recurrent", "fusion", "offload"))
    found, told = warned(lambda: ours(given()))
    assert float(found) == float(tf.function(step)(given()))
    assert ["under TPUStrategy XLA compiles" in message for message in told] == [True], told
    assert "under TPUStrategy" in tfmem.report(ours).notes[0]


def on_meshes() -> None:
    mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
    whole = dtensor.Layout.replicated(mesh, rank=2)
    x = dtensor.pack([given()[: ROWS // 2], given()[ROWS // 2 :]], dtensor.Layout.batch_sharded(mesh, "batch", rank=2))

    def training() -> Callable[[Any], Any]:
        begin = dtensor.call_with_layout(tf.ones, whole, [WIDTH, WIDTH]) / WIDTH
        weights = [dtensor.DVariable(begin) for _ in range(4)]

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                for weight in weights:
                    x = tf.tanh(x @ weight)
                loss = tf.reduce_mean(x**2)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return step

    def losses(step: Any) -> list[float]:
        return [float(step(x)) for _ in range(5)]

    expected = losses(tf.function(training()))
    step = tfmem.optimize(tf.function(training()), passes=("recurrent", "fusion", "offload"))
    found, told = warned(lambda: losses(step))
    assert found == expected
    assert ["DTensor splits the ops" in message for message in told] == [True], told
    with pytest.raises(tfmem.ReplicasError, match=r"DTensor splits the ops .*MirroredStrategy"):
        losses(optimized(training(), AMPLE))
    with pytest.raises(tfmem.ReplicasError, match="DTensor splits the ops"):
        optimized(lambda x: tf.reduce_sum(tf.tanh(x)), AMPLE)(x)  # it captures nothing


def keras_distributions() -> None:
    """On TensorFlow, Keras keeps all weights on one device, and tfmem plans that one."""

    def trained(budget: int | None, ours: bool) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(64, "gelu") for _ in range(8))])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        if ours:
            tfmem.optimize(model, memory_budget=budget, cache_directory="")
        history = model.fit(BATCH, LABELS, batch_size=ROWS, epochs=12, verbose=0).history
        return model, (history, model.predict(BATCH, batch_size=ROWS, verbose=0), model.get_weights())

    _, expected = trained(None, ours=False)
    cpus = keras.distribution.list_devices("cpu")
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2,), ["batch"], cpus))
    for distribution in (
        keras.distribution.DataParallel(devices=cpus),
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"),
    ):
        keras.distribution.set_distribution(distribution)
        try:
            model, found = trained(None, ours=False)
            assert {weight.value.device for weight in model.weights} == {tf.zeros([]).device}
            tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
            fits, found = trained(AMPLE, ours=True)
            tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
            moves, found = trained(round(0.8 * tfmem.report(fits).peak_before), ours=True)
            tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
            assert tfmem.report(moves).decision == "moved", tfmem.report(moves)
        finally:
            keras.distribution.set_distribution(None)


FORMS = (
    collectives_in_loops_and_branches,
    collectives_without_tokens,
    what_run_calls_may_be_optimised_where_replicas_do_not_meet,
    concrete_functions,
    saved_models,
    sessions,
)
CASES = {
    "forms": FORMS,
    "servers": (on_parameter_servers,),
    "meshes": (on_tpus, on_meshes, keras_distributions),
}

if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
