"""Pure conditions as both branches and a select: numbers and gradients are TensorFlow's; others stay conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import close, optimized, run
from tfmem.capture.branches import CONDITIONS, with_selects
from tfmem.capture.captured import every_node
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler

SHAPE = [5, 7]


def ops(graph_def: Any) -> Counter[str]:
    return Counter(node.op for node in every_node(graph_def))


def selected(function: Any, *arguments: Any, grappled: bool = False) -> tuple[Any, Any]:
    """A function without its pure conditions, and its graph."""
    concrete = function.get_concrete_function(*arguments)
    captured = capture_concrete(concrete)
    found = with_selects(run_grappler(captured, nested=True) if grappled else captured)
    return restore_concrete(concrete, found, found.graph_def), found.graph_def


def nested(x: Any, flag: Any) -> Any:
    """A condition in a condition; one branch makes NaN and infinity of some numbers that the other is for."""
    return tf.cond(
        flag,
        lambda: tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sqrt(x) * tf.math.log(x), lambda: x * x),
        lambda: tf.tanh(x) / x,
    )


@pytest.mark.parametrize("grappled", [False, True], ids=["as traced", "after Grappler"])
def test_values_and_gradients(grappled: bool) -> None:
    @tf.function
    def step(x: Any, flag: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = nested(x, flag)
            loss = tf.reduce_sum(made * made)
        return made, tape.gradient(loss, x)

    random = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    special = random.copy()
    special.flat[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e15]
    for x in (random, abs(random), special, -special):
        for flag in (True, False):
            given = tf.constant(x), tf.constant(flag)
            function, graph_def = selected(step, *given, grappled=grappled)
            assert not any(node.op in CONDITIONS or node.op.startswith("Optional") for node in graph_def.node)
            for found, expected in zip(function(*given), step(*given), strict=True):
                np.testing.assert_array_equal(found, expected)
            exact = tf.function(nested)(tf.constant(x, tf.float64), given[1])
            np.testing.assert_allclose(function(*given)[0], exact, rtol=1e-5, atol=1e-6)


def place(x: Any) -> Any:
    return tf.cast(x[0, 0], tf.int32)


STAYS: dict[str, Callable[[Any, Any], Any]] = {
    "an update": lambda x, v: tf.cond(x[0, 0] > 0.0, lambda: v.assign_add(1.0) + x, lambda: x),
    "a check": lambda x, v: tf.cond(x[0, 0] > 0.0, lambda: tf.debugging.check_numerics(x, "no"), lambda: x),
    "an index": lambda x, v: tf.cond(x[0, 0] > 0.0, lambda: tf.gather(x, tf.cast(x[0, :1], tf.int32)), lambda: x[:1]),
    "an index that it guards": lambda x, v: tf.cond(place(x) < 5, lambda: x[place(x)], lambda: x[0]),
    "an offset that it guards": lambda x, v: tf.cond(
        place(x) < 5, lambda: tf.slice(x, [place(x), 0], [1, 7]), lambda: x[:1]
    ),
    "an axis that it guards": lambda x, v: tf.cond(place(x) < 2, lambda: tf.reduce_sum(x, place(x)), lambda: x[:, 0]),
    "a size that it guards": lambda x, v: tf.cond(
        place(x) == 35, lambda: tf.reduce_sum(tf.reshape(x, [place(x)])), lambda: 0.0
    ),
    "shapes that it guards": lambda x, v: tf.cond(
        place(x) == 5,
        lambda: tf.reduce_sum(tf.raw_ops.BroadcastGradientArgs(s0=[place(x), 7], s1=[5, 7]).r0),
        lambda: 0,
    ),
    "integers that are divided": lambda x, v: tf.cond(
        x[0, 0] > 0.0, lambda: 7 // tf.cast(x, tf.int32), lambda: tf.cast(x, tf.int32)
    ),
    "results of two shapes": lambda x, v: tf.reduce_sum(tf.cond(x[0, 0] > 0.0, lambda: x, lambda: x[:1])),
    "random numbers": lambda x, v: tf.cond(x[0, 0] > 0.0, lambda: tf.random.normal(SHAPE, seed=1), lambda: x),
    "much": lambda x, v: tf.cond(x[0, 0] > 0.0, lambda: tf.broadcast_to(x[0, 0], [1 << 21]), lambda: tf.zeros(1 << 21)),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    variable = tf.Variable(0.0)
    step = tf.function(lambda x: STAYS[name](x, variable))
    _, graph_def = selected(step, tf.ones(SHAPE))
    assert CONDITIONS & ops(graph_def).keys()


@pytest.mark.parametrize("ones", [tf.ones, tf.Variable], ids=["a tensor", "a variable"])
def test_one_that_guards_a_size_stays(ones: Any) -> None:
    """Where the other branch ran, it would add five rows to six."""
    open_shape = tf.TensorShape([None, 7])
    held = tf.Variable(tf.ones([6, 7]), shape=open_shape) if ones is tf.Variable else tf.ones(SHAPE)

    @tf.function(input_signature=[tf.TensorSpec(open_shape)])
    def step(x: Any) -> Any:
        same = tf.shape(x)[0] == tf.shape(held)[0]
        return tf.cond(same, lambda: tf.reduce_sum(x + held), lambda: tf.constant(0.0))

    function, graph_def = selected(step)
    assert CONDITIONS & ops(graph_def).keys()
    for rows in (5, 6):
        assert float(function(tf.ones([rows, 7]))) == float(step(tf.ones([rows, 7])))


def test_one_whose_gradient_stays_keeps_what_it_kept() -> None:
    """The gradient reads the Optionals of the condition, so that stays, too."""

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = tf.cond(x[0, 0] > 0.0, lambda: tf.tanh(x) * x, lambda: tf.math.cumprod(tf.sin(x)))
            loss = tf.reduce_sum(made)
        return loss, tape.gradient(loss, x)

    x = tf.constant(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    for given in (x, -x):
        function, _ = selected(step, given)
        for found, expected in zip(function(given), step(given), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_stitched_step_raises_nothing_that_its_conditions_guard() -> None:
    @tf.function
    def step(x: Any, index: Any) -> Any:
        y = tf.tanh(x) * tf.sigmoid(x) + tf.abs(x)
        return tf.reduce_sum(y), tf.cond(index < 5, lambda: tf.reduce_sum(x[index]), lambda: tf.constant(0.0))

    found = optimized(step, fusion=tfmem.FusionOptions(tune="full", xla=False))
    for index in (3, 5):
        given = tf.ones(SHAPE), tf.constant(index)
        close(run(found, 4, *given), run(step, 4, *given))


def test_a_step_with_conditions_is_stitched_whole() -> None:
    def made() -> Any:
        weights = tf.Variable(tf.fill([7, 7], 0.1))

        @tf.function
        def step(x: Any, flag: Any) -> Any:
            with tf.GradientTape() as tape:
                y = tf.cond(flag, lambda: tf.tanh(x @ weights) * 2.0, lambda: tf.nn.relu(x) @ weights)
                loss = tf.reduce_mean(y * y)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            return loss

        return step

    for flag in (True, False):
        given = tf.constant(np.random.default_rng(1).normal(size=[4, 7]).astype(np.float32)), tf.constant(flag)
        step = optimized(made(), fusion=tfmem.FusionOptions(tune="full", xla=False))
        close(run(step, 4, *given), run(made(), 4, *given))
        report = tfmem.report(step)
        assert not [name for name, why in report.not_stitched if "If" in why]
        assert len(report.regions) == 1
