"""Dynamic nets under a MirroredStrategy, against one device with the whole batch; says "equal" when all was well."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from custom_ops.errors import DynamicError
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tf.in_replicas import AMPLE, mirrored, run_cases
from tfmem import dynamic

TREES = random_trees(8)
OPTIMIZERS: Sequence[Callable[[], Any]] = (
    lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    lambda: keras.optimizers.Adam(0.01),
    lambda: tf_keras.optimizers.Adam(0.01),
)


def of_one_device(optimizer: Any) -> tuple[list[float], list[Any]]:
    tree = TreeLSTM()
    net = tree.specialize()
    optimizer.build(tree.parameters)
    losses = []
    for _ in range(5):
        outcome = net.forward_backward([nodes(net, each) for each in TREES])
        optimizer.apply_gradients(zip(outcome.gradients, tree.parameters, strict=True))
        losses.append(float(tf.reduce_sum(outcome.losses)))
    return losses, [parameter.numpy() for parameter in tree.parameters]


def handles_of_mirrored_parameters() -> None:
    """Each replica has half of the trees; weights of both are equal to the bit, and to one device's to rounding."""
    for make in OPTIMIZERS:
        expected, parameters = of_one_device(make())
        for budget in (None, AMPLE):
            with mirrored().scope():
                tree, optimizer = TreeLSTM(), make()
                optimizer.build(tree.parameters)
            net = tree.specialize()

            def replica(batch: Any, net: Any = net, tree: Any = tree, optimizer: Any = optimizer) -> Any:
                outcome = net.forward_backward(batch)
                optimizer.apply_gradients(zip(outcome.gradients, tree.parameters, strict=True))
                return tf.reduce_sum(outcome.losses)

            @tf.function
            def step(batch: Any, replica: Any = replica) -> Any:
                return mirrored().reduce("SUM", mirrored().run(replica, (batch,)), axis=None)

            halves = [net.batch([nodes(net, each) for each in part]) for part in (TREES[:4], TREES[4:])]
            given = mirrored().experimental_distribute_values_from_function(
                lambda context, halves=halves: halves[context.replica_id_in_sync_group]
            )
            ours = step if budget is None else tfmem.optimize(step, memory_budget=budget)
            found = [float(ours(given)) for _ in range(5)]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            for variable, wanted in zip(tree.parameters, parameters, strict=True):
                first, second = (each.numpy() for each in variable.values)
                np.testing.assert_array_equal(first, second)
                np.testing.assert_allclose(first, wanted, atol=1e-5)


def nodes_that_tensorflow_traces() -> None:
    """`dynamic.trace` finds mirrored parameters by the resources that they stand for."""

    def losses(strategy: Any) -> Any:
        with strategy.scope() if strategy else nullcontext():
            begin = np.random.default_rng(3).normal(size=(30, 4)).astype(np.float32)
            table, kernel = tf.Variable(begin), tf.Variable(begin[:4])
        leaf = dynamic.trace(lambda _, word: tf.gather(table, word))
        pair = dynamic.trace(
            lambda both: dynamic.Result(
                state=tf.tanh(tf.linalg.matvec(kernel, both[0] + both[1])), loss=tf.reduce_sum(both[0] * both[1])
            ),
            children=2,
        )
        net = dynamic.specialize([table, kernel], {"leaf": leaf, "pair": pair}, state=4)
        batch = net.batch([net.node("pair", net.node("leaf", 3), net.node("leaf", 7))])
        run = strategy.run if strategy else lambda function, args: function(*args)
        local = strategy.experimental_local_results if strategy else lambda value: (value,)
        outcome = run(lambda batch: tuple(map(tf.convert_to_tensor, net.forward_backward(batch).gradients)), (batch,))
        return [local(gradient) for gradient in outcome]

    for (expected,), found in zip(losses(None), losses(mirrored()), strict=True):
        for each in found:
            np.testing.assert_array_equal(each, expected)


def steps_of_handles_are_refused() -> None:
    with mirrored().scope():
        mirrors = TreeLSTM().specialize(optimizer=dynamic.Adam())
    alone = TreeLSTM().specialize(optimizer=dynamic.Adam())
    batch = alone.batch([nodes(alone, each) for each in TREES])
    says = r"of one replica alone, under MirroredStrategy; .*give the gradients of Handle\.forward_backward"
    for call in (lambda: mirrors.step(batch), lambda: mirrored().run(alone.step, (batch,))):
        with pytest.raises(DynamicError, match=says):
            call()
    alone.step(batch)


def kinds(weights: Any) -> Any:
    def leaf(children: Any, word: Any) -> Any:
        return dynamic.embedding_lookup(weights["table"], word)

    def pair(children: Any) -> Any:
        return dynamic.tanh(dynamic.affine(weights["kernel"], dynamic.concat(children), weights["bias"]))

    return {"leaf": dynamic.node(leaf), "pair": dynamic.node(pair, children=2)}


def layers_in_models() -> None:
    """`fit` of a model with a `dynamic.Layer`."""
    integers = {name: tf.TensorSpec([None], tf.int32) for name in dynamic.Batch._fields}

    def examples() -> Any:
        for at in range(32):
            pair = {"kinds": [0, 0, 1], "children": [0, 1], "arguments": [at % 30, 7 * at % 30]}
            yield pair if at % 3 else {"kinds": [0], "children": [], "arguments": [at % 30]}, at % 3

    rows = tf.data.Dataset.from_generator(examples, output_signature=(integers, tf.TensorSpec([], tf.int32)))
    rows = rows.padded_batch(8, padding_values=(dict.fromkeys(integers, -1), 0)).cache()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def fitted(strategy: Any, budget: int | None) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else nullcontext():
            inputs = {name: keras.Input([None], dtype="int32", name=name) for name in integers}
            shapes = {"table": (30, 16), "kernel": (16, 32), "bias": (16,)}
            encoded = dynamic.Layer(shapes, kinds, state=16)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(3)(encoded))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
        if budget is not None:
            tfmem.optimize(model, memory_budget=budget)
        history = model.fit(rows.with_options(options), epochs=3, verbose=0).history
        return history["loss"], model.get_weights()

    expected = fitted(None, None)
    for budget in (None, AMPLE):
        found = fitted(mirrored(), budget)
        tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), found, expected)


def the_example_of_the_documentation() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "distribution.md"
    section = page.read_text().partition("## Dynamic networks")[2]
    (example,) = re.findall(r"```python\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(example.replace("Strategy()", "Strategy(['CPU:0', 'CPU:1'])"), "<the example>", "exec"), names)
    assert names["count"] == 2
    assert names["losses"][-1] < 0.5 * names["losses"][0], names["losses"]


CASES = {
    "example": (the_example_of_the_documentation,),
    "dynamic": (
        handles_of_mirrored_parameters,
        nodes_that_tensorflow_traces,
        steps_of_handles_are_refused,
        layers_in_models,
    ),
}

if __name__ == "__main__":
    run_cases(CASES[sys.argv[1]])
