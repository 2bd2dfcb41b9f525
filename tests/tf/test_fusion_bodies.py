"""Bodies of loops and conditions are stitched as the graph around them is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES, batch, close, optimized, require_stitched, values
from tests.tf.vectors import AVX512

OPTIONS: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}


def regions_in(report: tfmem.Report, caller: str) -> dict[str, list[str]]:
    """Regions of functions that ops so named call, with the types of their ops."""
    return {
        region.name: [op for step in region.steps for _, op in step.ops]
        for region in report.regions
        if region.name.startswith(caller)
    }


class Decoder(tf.Module):
    """Attends to a memory in each of a number of steps; no recurrent cell reads a memory.

    Attributes:
        weights: keys, state, query.
        train: one step of gradient descent; gives the loss.
        decode: the last state.
    """

    def __init__(self) -> None:
        super().__init__()
        shapes = ([8, 16], [16, 16], [16, 16])
        self.weights = [tf.Variable(0.3 * tf.random.stateless_normal(shape, [1, n])) for n, shape in enumerate(shapes)]
        self.decode = tf.function(self._decode)
        self.train = tf.function(self._train)

    def _decode(self, memory: Any, steps: Any) -> Any:
        keys, state, query = self.weights
        projected = tf.einsum("btf,fu->btu", memory, keys)

        def body(step: Any, hidden: Any) -> Any:
            scores = tf.reduce_sum(tf.tanh(projected + (hidden @ query)[:, None]), -1)
            context = tf.reduce_sum(tf.nn.softmax(scores)[..., None] * projected, 1)
            return step + 1, tf.tanh(hidden @ state + context)

        first = tf.zeros([tf.shape(memory)[0], 16])
        return tf.while_loop(lambda step, _: step < steps, body, (0, first))[1]

    def _train(self, memory: Any, steps: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self._decode(memory, steps) - 0.2) ** 2)
        for variable, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss


MEMORY = tf.random.stateless_normal([4, 6, 8], [3, 4])


def test_an_attention_decoder() -> None:
    plain, stitched = Decoder(), Decoder()
    decode = optimized(stitched.decode)
    for steps in (5, 1, 0):
        close(decode(MEMORY, tf.constant(steps)), plain.decode(MEMORY, tf.constant(steps)))
    found = regions_in(require_stitched(decode), "while/body")
    assert {"Tanh", "Softmax", "MatMul"} <= {op for ops in found.values() for op in ops}
    assert len(found) == 1


def test_an_attention_decoder_in_training() -> None:
    plain, stitched = Decoder(), Decoder()
    train = optimized(stitched.train)
    for _ in range(20):
        close(train(MEMORY, tf.constant(5)), plain.train(MEMORY, tf.constant(5)), 1e-4)
    close(values(stitched.weights), values(plain.weights), 1e-4)
    report = require_stitched(train)
    backward = {op for ops in regions_in(report, "gradient_tape/while/").values() for op in ops}
    assert {"TanhGrad", "MatMul"} <= backward


def updating(total: Any, counted: Callable[[Any], Any]) -> Any:
    """A loop with a condition whose branches update a variable; `counted` makes a number of the int32 counter."""

    @tf.function
    def run(x: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            def large() -> Any:
                total.assign_add(tf.tanh(value) * 0.1 + counted(count))
                return tf.sigmoid(value) * 0.5 - 1.0

            def small() -> Any:
                total.assign_sub(tf.exp(-tf.abs(value)) * 0.1)
                return tf.tanh(value * 2.0 + total) + 1.5

            return count + 1, tf.cond(tf.reduce_sum(value) > 0.0, large, small) * x

        return tf.while_loop(lambda count, _: count < 6, body, (0, x))[1]

    return run


def test_conditions_in_loops_that_update_a_variable() -> None:
    plain, stitched = tf.Variable(tf.zeros([12])), tf.Variable(tf.zeros([12]))
    expected, found = (updating(each, lambda _: 1.0) for each in (plain, stitched))
    found = optimized(found)
    x = batch()[0][0]
    for _ in range(3):
        close(found(x), expected(x))
        close(stitched, plain)
    report = require_stitched(found)
    then, other = regions_in(report, "while/body/while/cond/then"), regions_in(report, "while/body/while/cond/else")
    assert ["AssignAddVariableOp" in ops for ops in then.values()] == [True], report
    assert ["AssignSubVariableOp" in ops for ops in other.values()] == [True]


def test_state_that_grows_in_a_loop() -> None:
    @tf.function
    def run(x: Any) -> Any:
        def body(count: Any, rows: Any) -> Any:
            return count + 1, tf.concat([rows, tf.tanh(rows[-1:] * 0.5 + 1.0) * x], 0)

        shapes = (tf.TensorShape([]), tf.TensorShape([None, 12]))
        return tf.while_loop(lambda count, _: count < 4, body, (0, x), shape_invariants=shapes)[1]

    x = batch()[0][:1]
    stitched = optimized(run)
    close(stitched(x), run(x))
    assert regions_in(require_stitched(stitched), "while/body")


def test_one_function_with_two_callers() -> None:
    """What it is given by both counts, not what the first gives."""
    inner = tf.function(lambda x: tf.tanh(x * 2.0 + 1.0) * tf.reduce_sum(x) - 1.0)
    branch = inner.get_concrete_function(tf.TensorSpec(None))

    @tf.function
    def run(x: Any, y: Any) -> Any:
        asked = tf.reduce_sum(x) > 0.0
        branches = {"then_branch": branch, "else_branch": branch, "Tout": [tf.float32]}
        return tf.raw_ops.If(cond=asked, input=[x], **branches)[0], tf.raw_ops.If(cond=asked, input=[y], **branches)[0]

    stitched = optimized(run)
    x = batch()[0]
    for other in (x[:4], x[:, :3]):
        close(stitched(x, other), run(x, other))
    require_stitched(stitched, "Tanh")


def test_what_xla_compiles_stays() -> None:
    compiled = tf.function(lambda x: tf.tanh(x * 2.0 + 1.0) - 1.0, jit_compile=True)

    @tf.function
    def run(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: compiled(x), lambda: tf.sigmoid(x * 3.0 + 2.0) * x - 1.0)

    stitched = optimized(run)
    x, _ = batch()
    close(stitched(x), run(x))
    close(stitched(-x), run(-x))
    report = require_stitched(stitched, "Sigmoid")
    assert regions_in(report, "cond/else")
    assert not regions_in(report, "cond/then")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_of_keras(dtype: str) -> None:
    """Keras puts all updates of a step into one `If`, which asks whether gradients are finite."""

    def model() -> Any:
        keras.utils.set_random_seed(3)
        policy = keras.mixed_precision.Policy(dtype)
        parts = [keras.layers.Dense(16, activation="gelu", dtype=policy), keras.layers.LayerNormalization(dtype=policy)]
        made = keras.Sequential([keras.Input([12]), *parts, keras.layers.Dense(5, activation="softmax", dtype=policy)])
        # A scale so large that the first steps overflow: their updates are left out, and the scale is halved.
        adam = keras.optimizers.Adam(1e-2)
        scaled = keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0**26, dynamic_growth_steps=4)
        made.compile(scaled, "sparse_categorical_crossentropy", jit_compile=False)
        return made

    x = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)
    y = np.arange(64) % 5
    how: dict[str, Any] = {"batch_size": 16, "epochs": 6, "verbose": 0, "shuffle": False}
    plain, stitched = model(), tfmem.optimize(model(), **OPTIONS)
    expected = plain.fit(x, y, **how).history["loss"]
    np.testing.assert_allclose(stitched.fit(x, y, **how).history["loss"], expected, 2e-3 if AVX512 else 5e-3)
    assert float(stitched.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale)
    assert int(stitched.optimizer.inner_optimizer.iterations) == int(plain.optimizer.inner_optimizer.iterations)
    report = require_stitched(stitched, "AssignSubVariableOp")
    updates = [ops.count("AssignSubVariableOp") for ops in regions_in(report, "cond/then/").values()]
    assert max(updates) == len(plain.trainable_variables), report


def test_a_saved_model_with_a_loop(tmp_path: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        @tf.function(input_signature=[tf.TensorSpec([None, 6, 8])])
        def __call__(self, memory: Any) -> Any:
            return self.decoder.decode(memory, tf.constant(4))

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "plain"))
    path = tfmem.optimize(str(tmp_path / "plain"), output=str(tmp_path / "stitched"), **OPTIONS)
    close(tf.saved_model.load(path)(MEMORY), model(MEMORY))
    names = [region.name for region in require_stitched(path).regions]
    assert any("/while/body/" in name for name in names), names


def test_explain_knows_bodies() -> None:
    decode = optimized(Decoder().decode)
    decode(MEMORY, tf.constant(3))
    assert "is in region 'while/body/fusion_0'" in tfmem.explain(decode, "while/body/while/Tanh")
    assert "is in no region: While is a stateful op" in tfmem.explain(decode, "while")


def test_gradients_of_a_loop() -> None:
    decoder = Decoder()
    decode = optimized(decoder.decode)
    decode(MEMORY, tf.constant(3))
    require_stitched(decode)

    def gradient(function: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(MEMORY, tf.constant(3)) ** 2)
        return tape.gradient(loss, decoder.weights)

    with pytest.warns(tfmem.TfmemWarning, match="so the original function runs"):
        close(gradient(decode), gradient(decoder.decode))
