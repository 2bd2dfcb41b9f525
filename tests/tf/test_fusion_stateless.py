"""Stateless random ops within regions: TensorFlow's numbers to the bit, drawn where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.expr import reference
from custom_ops.expr.philox import draw, seeded
from custom_ops.expr.program import ProgramError
from custom_ops.expr.table_entry import FLOATS, INTEGERS
from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Kernel, Region, TensorType
from custom_ops.load import load
from graph_passes.analysis.op_pattern import OpPattern, patterns_of
from graph_passes.graph.serde import from_tf_graph
from tests.tf.fusion_calls import run_region
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import BY_MODEL, optimized, require_stitched, stitched_ops

raw = tf.raw_ops
PHILOX, THREEFRY, AUTOMATIC = 1, 2, 3
# Among them counters whose lower half, and both halves, overflow within a tensor.
STATES = [(5, (3, 9)), (2**63 + 77, (2**64 - 3, 2**64 - 1)), (1, (2**32 - 2, 2**32 - 1)), (0, (2**64 - 900, 0))]


def uniform(shape: Any, key: Any, counter: Any, dtype: Any = tf.float32, alg: Any = PHILOX) -> Any:
    op = raw.StatelessRandomUniformFullIntV2 if tf.as_dtype(dtype).is_integer else raw.StatelessRandomUniformV2
    return op(shape=shape, key=key, counter=counter, alg=alg, dtype=dtype)


def state(key: int = 2**40 + 3, counter: tuple[int, int] = (2**64 - 2, 3)) -> tuple[Any, Any]:
    return np.array([key], np.uint64), np.array(counter, np.uint64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("given", STATES)
def test_the_definition_draws_what_tensorflow_draws(dtype: str, given: tuple[int, tuple[int, int]]) -> None:
    key, counter = state(*given)
    for size in (1, 7, 4099):
        expected = uniform([size], key, counter, dtype).numpy()
        found = draw(dtype, key, counter, np.arange(size))
        np.testing.assert_array_equal(found.astype(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_rule_is_exact(dtype: str) -> None:
    """Transposed, sliced, reshaped and broadcast, from one generator and from two."""

    def function(x: Any, key: Any, counter: Any) -> Any:
        mine = uniform(tf.shape(x), key, counter, dtype, AUTOMATIC)
        other = uniform([6], tf.constant([9], tf.uint64), counter, dtype)
        return tf.transpose(mine)[1:], tf.reshape(mine, [-1]) + mine[0, 0], mine + other[:, None], x + mine

    lowered = Lowered(function, np.zeros((6, 10)).astype(tf.as_dtype(dtype).as_numpy_dtype), *state())
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_batch_whose_size_is_not_known() -> None:
    signature = [tf.TensorSpec([None, 5]), tf.TensorSpec([2], tf.int32)]

    def function(x: Any, seed: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(tf.abs(x), 0.3, seed=seed)

    plain, step = (tf.function(function, input_signature=signature) for _ in range(2))
    step = optimized(step)
    for rows in (9, 300, 1):
        given = tf.constant(np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)), tf.constant([rows, 2])
        np.testing.assert_array_equal(step(*given), plain(*given))
    require_stitched(step, "StatelessRandomUniformV2", "SelectV2")


@pytest.mark.parametrize(
    ("alg", "within"),
    [(PHILOX, True), (AUTOMATIC, True), (THREEFRY, False), ("device", True), ("given", False), ("seeded", True)],
)
def test_which_algorithm_is_philox(alg: Any, within: bool) -> None:
    def function(given: Any, key: Any, counter: Any) -> Any:
        number = {"device": raw.StatelessRandomGetAlg, "given": lambda: given}.get(alg, lambda: alg)()
        if alg == "seeded":
            key, counter, number = raw.StatelessRandomGetKeyCounterAlg(seed=[given, 2])
        return uniform([8], key, counter, alg=number)

    specs = [tf.TensorSpec([], tf.int32), tf.TensorSpec([1], tf.uint64), tf.TensorSpec([2], tf.uint64)]
    graph = from_tf_graph(tf.function(function).get_concrete_function(*specs).graph)
    found = patterns_of(graph)
    (kind,) = [found[node.name].pattern for node in graph if node.op == "StatelessRandomUniformV2"]
    assert (kind is OpPattern.ELEMENTWISE) == within


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(37, 20), (3, 5, 33), (4099,), (1,)])
def test_a_region_draws_what_tensorflow_draws(dtype: str, shape: tuple[int, ...]) -> None:
    """Values and gradients of dropout, whose mask both use."""

    def function(x: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped = tf.nn.experimental.stateless_dropout(tf.abs(x), 0.3, seed=seed)
        return dropped, tape.gradient(dropped, x)

    plain, step = tf.function(function), optimized(tf.function(function))
    for seed in range(3):
        x = tf.cast(np.random.default_rng(seed).normal(size=shape), dtype)
        drawn = tf.constant([seed, 7])
        for found, expected in zip(step(x, drawn), plain(x, drawn), strict=True):
            np.testing.assert_array_equal(found, expected)
    require_stitched(step, "StatelessRandomUniformV2", "SelectV2")


@pytest.fixture(name="vector_bytes", params=[64, 32, 16])
def fixture_vector_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    load().limit_vector_bytes(request.param)
    yield request.param
    load().limit_vector_bytes(64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("given", STATES)
def test_every_instruction_set_draws_the_same(
    vector_bytes: int, dtype: str, given: tuple[int, tuple[int, int]]
) -> None:
    """From the beginning of a group and from within one, in order, backwards and far apart."""
    key, counter = state(*given)
    for index, count in (("a0", 4099), ("a0+3", 70), ("-1*a0+40", 41), ("7*a0+1", 9), ("a0/3", 50)):
        text = f"program 1\naxes {count}\ntensor uint64 1\ntensor uint64 1\nrandom {dtype} 0 1 {index}\noutput 0 0\n"
        program = from_text(text)
        types = (TensorType("uint64", (1,)), TensorType("uint64", (2,)), TensorType(dtype, (count,)))
        (found,) = run_region(Region(2, (), types, (Kernel(program, (0, 1), (2,)),), (2,)), [key, counter])
        (expected,) = reference.run(program, [key, counter])
        np.testing.assert_array_equal(found, expected, err_msg=f"{vector_bytes} bytes, {index}")


def test_a_mask_beside_a_softmax() -> None:
    """Read along rows, in a separate stage, in tiles that begin within a group, by several threads."""

    def function(scores: Any, incoming: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(scores)
            dropped = tf.nn.experimental.stateless_dropout(tf.nn.softmax(scores), 0.1, seed=seed)
        return dropped, tape.gradient(dropped, scores, incoming), tf.reduce_sum(dropped, 0)

    plain, step = tf.function(function), optimized(tf.function(function))
    rng = np.random.default_rng(0)
    scores, incoming = (tf.constant(rng.normal(size=(311, 1027)).astype(np.float32)) for _ in range(2))
    given = scores, incoming, tf.constant([1, 2])
    for found, expected in zip(step(*given), plain(*given), strict=True):
        np.testing.assert_array_equal(found == 0, expected == 0)
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    require_stitched(step, "StatelessRandomUniformV2", "Softmax")


class Scale(keras.layers.Layer):
    """Each input times a different weight: no product of matrices, so that nothing but a batch is added up."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x * self.scale


class Net:
    """A Keras model with dropout twice."""

    def __init__(self, first: Any, second: Any) -> None:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        parts = [first(), layers.ReLU(), layers.Dropout(0.5), second(), layers.Dropout(0.25)]
        self.model = keras.Sequential([keras.Input([2]), *parts])
        self.model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)

    def fit(self) -> list[float]:
        x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        how: dict[str, Any] = {"batch_size": 2, "epochs": 3, "verbose": 0, "shuffle": False}
        return self.model.fit(x, x, **how).history["loss"]

    def trained(self, *, stitched: bool) -> tuple[list[float], list[Any]]:
        """Losses and weights."""
        if stitched:
            tfmem.optimize(self.model, passes=("recurrent", "fusion", "offload"), fusion=BY_MODEL, cache_directory="")
        losses = self.fit()
        return losses, self.model.get_weights()


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_a_keras_model_drops_what_it_dropped() -> None:
    """Losses and weights bit for bit: what is added up are two numbers, in any order. `explain` has the random op in a
    kernel."""
    net = Net(Scale, Scale)
    losses, weights = net.trained(stitched=True)
    expected, given = Net(Scale, Scale).trained(stitched=False)
    assert losses == expected
    for found, plain in zip(weights, given, strict=True):
        np.testing.assert_array_equal(found, plain)
    report = tfmem.report(net.model)
    drawn = [
        (name, step.kind)
        for region in report.regions
        for step in region.steps
        for name, op in step.ops
        if op == "StatelessRandomUniform"
    ]
    assert [kind for _, kind in drawn] == ["kernel"] * 2
    assert all("is in region" in tfmem.explain(net.model, name) for name, _ in drawn)


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_between_products_a_keras_model_drops_what_it_dropped() -> None:
    """Products are added up by loops of our own; a number that is dropped or not shows at once."""
    layers = partial(keras.layers.Dense, 16), partial(keras.layers.Dense, 2)
    losses, weights = Net(*layers).trained(stitched=True)
    expected, given = Net(*layers).trained(stitched=False)
    np.testing.assert_allclose(losses, expected, 1e-6)
    for found, plain in zip(weights, given, strict=True):
        np.testing.assert_allclose(found, plain, 1e-5, 1e-6)


def test_stateful_ops_stay_outside() -> None:
    step = optimized(tf.function(lambda x: tf.nn.softmax(tf.nn.dropout(x * 2, 0.5, seed=1)) + 1.0))
    step(tf.ones((8, 16)))
    assert "RandomUniform" not in stitched_ops(tfmem.report(step))


SEEDS = [(0, 0), (1, 2), (-1, -(2**63)), (2**63 - 1, 2**31), (2**40 + 5, -7)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_what_tensorflow_draws(vector_bytes: int, dtype: str, seed: tuple[int, int]) -> None:
    given, count = np.array(seed, np.int64), 70
    expected = raw.StatelessRandomUniform(shape=[count], seed=given, dtype=dtype).numpy()
    np.testing.assert_array_equal(draw(dtype, *seeded(given), np.arange(count)).astype(expected.dtype), expected)
    text = f"program 1\naxes {count}\ntensor int64 1\nrandom {dtype} 0 0 a0\noutput 0 0\n"
    types = (TensorType("int64", (2,)), TensorType(dtype, (count,)))
    (found,) = run_region(Region(1, (), types, (Kernel(from_text(text), (0,), (1,)),), (1,)), [given])
    np.testing.assert_array_equal(np.asarray(found).view(expected.dtype), expected)


def test_a_seed_has_two_numbers() -> None:
    program = from_text("program 1\naxes 4\ntensor int64 1\nrandom float32 0 0 a0\noutput 0 0\n")
    types = (TensorType("int64", (3,)), TensorType("float32", (4,)))
    with pytest.raises(ProgramError, match="a seed of 3 numbers; expected 2"):
        reference.run(program, [np.zeros(3, np.int64)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a seed has 3 numbers; expected 2"):
        run_region(Region(1, (), types, (Kernel(program, (0,), (1,)),), (1,)), [np.zeros(3, np.int64)])


def seeded_dropout(x: Any, state: Any, cast: Any = tf.int32) -> Any:
    """As Keras draws: a seed of a state of int64."""
    seed = tf.cast(tf.math.floormod(state, tf.constant(2**31 - 2, tf.int64)), cast)
    with tf.GradientTape() as tape:
        tape.watch(x)
        dropped = tf.nn.experimental.stateless_dropout(tf.tanh(x), 0.3, seed=seed)
    return dropped, tape.gradient(dropped, x)


@pytest.mark.parametrize("cast", [tf.int32, tf.int64])
def test_dropout_reads_its_seed_within_a_region(cast: Any) -> None:
    plain, step = (tf.function(partial(seeded_dropout, cast=cast)) for _ in range(2))
    step = optimized(step)
    for state in SEEDS:
        given = (
            tf.constant(np.random.default_rng(0).normal(size=(9, 7)).astype(np.float32)),
            tf.constant(state, tf.int64),
        )
        for found, expected in zip(step(*given), plain(*given), strict=True):
            np.testing.assert_array_equal(found == 0, expected == 0)
            np.testing.assert_allclose(found, expected, 1e-5)
    report = require_stitched(step, "StatelessRandomUniform", "FloorMod")
    assert len(report.regions) == 1
    assert not [name for name, _ in report.not_stitched if "KeyCounter" in name]


def test_a_seed_that_a_cast_changes_is_cast() -> None:
    """2^32 and 0 are one seed of int32."""

    def function(x: Any, state: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(tf.tanh(x), 0.3, seed=tf.cast(state, tf.int32))

    plain, step = tf.function(function), optimized(tf.function(function))
    given = tf.ones([40]), tf.constant([2**32, 2**33 + 5], tf.int64)
    np.testing.assert_array_equal(step(*given), plain(*given))
    assert "StatelessRandomUniform" not in stitched_ops(tfmem.report(step))


@pytest.mark.parametrize("divisor", [2**31 - 2, 7, -3, 1, -1, 2**32 - 1])
def test_remainders_of_int64_are_exact(divisor: int) -> None:
    edges = [0, 1, -1, divisor, -divisor, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**63 - 2, 5 * divisor + 1]
    given = np.concatenate([np.array(edges, np.int64), np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)])

    def function(x: Any) -> Any:
        return tf.math.floormod(x, tf.constant(divisor, tf.int64)) + 1

    lowered = Lowered(function, given)
    for found in (lowered.run()[0], optimized(tf.function(function))(tf.constant(given))):
        np.testing.assert_array_equal(found, given % divisor + 1)
