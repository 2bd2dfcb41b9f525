"""Steps that draw by a seed of each step, of any number of steps: the numbers are those of the loop, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import load
from graph_passes.passes.recurrent.lower.step_draws import MOST_STEPS, STEP_DRAWS
from graph_passes.refusals import Reason
from tests.tf.recurrent_training import INPUTS, TOLERANCE, UNITS, numbers
from tests.tf.test_recurrent_stepped import Drawing, both, zoneout
from tfmem.kernels import replace_recurrent

BATCH = 3
LENGTHS = (5, 0, 1, MOST_STEPS + 5)
Draw = Callable[[Any, Any], Any]
S = tf.random
SHAPE = [BATCH, UNITS]


def split_in_step(i: Any, seed: Any) -> Any:
    """Two draws from the parts of a seed."""
    first, second = tf.unstack(S.split(S.fold_in(seed, i), 2))
    return S.stateless_normal(SHAPE, first) * S.stateless_uniform(SHAPE, second)


def split_by_index(i: Any, seed: Any) -> Any:
    keys = S.split(tf.stack([seed[0] - i, i * 3]), 3)
    return S.stateless_truncated_normal(SHAPE, keys[2]) + S.stateless_uniform(SHAPE, keys[0])


def whole(i: Any, seed: Any) -> Any:
    drawn = S.stateless_uniform(SHAPE, tf.concat([seed[:1], [i]], 0), -3, 5, tf.int32)
    return tf.cast(drawn, tf.float32) / 8.0


def of_other_type(i: Any, seed: Any) -> Any:
    return tf.cast(S.stateless_normal(SHAPE, seed + i, dtype=tf.float64), tf.float32)


def old(i: Any, seed: Any) -> Any:
    """Ops of older programs, which take the seed itself."""
    where = {"shape": SHAPE, "seed": tf.cast(tf.stack([i, 5]), tf.int64), "dtype": tf.float32}
    return tf.raw_ops.StatelessRandomUniform(**where) - tf.raw_ops.StatelessTruncatedNormal(**where)


DRAWS: dict[str, Draw] = {
    "counted": lambda i, _: S.stateless_normal(SHAPE, tf.stack([i, 5])),
    "folded": lambda i, seed: S.stateless_uniform(SHAPE, S.fold_in(seed, i)),
    "column": lambda i, seed: S.stateless_uniform([BATCH, 1], S.fold_in(seed, i)) * tf.ones(SHAPE),
    "scalar": lambda i, seed: S.stateless_normal([], S.fold_in(seed, i)) * tf.ones(SHAPE),
    "shifted": lambda i, seed: S.stateless_normal(SHAPE, seed + tf.stack([0, i])),
    "split in step": split_in_step,
    "split by index": split_by_index,
    "whole": whole,
    "float64": of_other_type,
    "old": old,
}


def loop(
    draw: Draw, backwards: bool = False, bound: bool = False, training: bool = False, steps: int | None = None
) -> Any:
    """A recurrence that adds what it draws, and gives out that as well."""
    kernel, recurrent = tf.Variable(numbers(INPUTS, UNITS)), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.3)

    def run(x: Any, n: Any, seed: Any) -> Any:
        count = n if bound else tf.shape(x)[0] if steps is None else steps

        def body(i: Any, h: Any, drawn: Any, states: Any) -> Any:
            noise = draw(i, seed)
            new = tf.tanh(x[count - 1 - i if backwards else i] @ kernel + h @ recurrent + noise * h + 0.1 * noise)
            return i + 1, new, drawn.write(i, noise), states.write(i, new)

        arrays = [tf.TensorArray(tf.float32, count, element_shape=SHAPE) for _ in range(2)]
        start = (0, tf.ones(SHAPE) * tf.reduce_mean(kernel), *arrays)
        _, h, drawn, states = tf.while_loop(lambda i, *_: i < count, body, start)
        return h, drawn.stack(), states.stack()

    def step(x: Any, n: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            h, drawn, states = run(x, n, seed)
            loss = tf.reduce_sum(h**2) + tf.reduce_sum(tf.sin(states))
        return drawn, h, states, *tape.gradient(loss, [kernel, recurrent, x])

    def infer(x: Any, n: Any, seed: Any) -> Any:
        h, drawn, states = run(x, n, seed)
        return drawn, h, states

    scalar, seed = tf.TensorSpec([], tf.int32), tf.TensorSpec([2], tf.int32)
    items = tf.TensorSpec([steps, BATCH, INPUTS], tf.float32)
    return tf.function(step if training else infer, autograph=False, input_signature=[items, scalar, seed])


def check(function: Any, more: int = 0) -> tfmem.Report:
    """`more`: items behind the last step."""
    optimized = tfmem.optimize(function, passes=("recurrent",))
    for place, length in enumerate(LENGTHS):
        given = tf.constant(numbers(length + more, BATCH, INPUTS)), tf.constant(length), tf.constant([7, place])
        expected, found = function(*given), optimized(*given)
        np.testing.assert_array_equal(found[0], expected[0])
        for a, b in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=20 * TOLERANCE, atol=20 * TOLERANCE)
    return tfmem.report(optimized)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_an_unknown_number_of_steps(name: str, training: bool) -> None:
    report = check(loop(DRAWS[name], training=training))
    assert report.replaced
    assert not report.not_replaced


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("backwards", "bound"), [(True, False), (False, True), (True, True)])
def test_directions_and_bounds(backwards: bool, bound: bool, training: bool) -> None:
    report = check(loop(split_in_step, backwards, bound, training), more=2 if bound else 0)
    assert report.replaced
    assert not report.not_replaced


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("draw", [zoneout, both], ids=lambda draw: draw.__name__)
def test_keras_layers_of_an_unknown_length(draw: Any, backwards: bool, training: bool) -> None:
    """Values, gradients, and what is left in the generator."""
    keras.utils.set_random_seed(4)
    layer = keras.layers.RNN(Drawing(draw), return_sequences=True, go_backwards=backwards)
    layer.build((None, None, INPUTS))
    weights, state = [weight.value for weight in layer.trainable_weights], layer.cell.seeds.state.value

    @tf.function(input_signature=[tf.TensorSpec([BATCH, None, INPUTS], tf.float32)])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        return (y, *tape.gradient(loss, [*weights, x])) if training else (y,)

    def outcome(function: Any, length: int) -> tuple[Any, Any]:
        state.assign([1, 5])
        found = [each for _ in range(2) for each in function(tf.constant(numbers(BATCH, length, INPUTS)))]
        return found, state.numpy().tolist()

    optimized = tfmem.optimize(step, passes=("recurrent",))
    for length in LENGTHS:
        (expected, left), (found, now) = outcome(step, length), outcome(optimized, length)
        assert now == left
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=20 * TOLERANCE, atol=20 * TOLERANCE)
    report = tfmem.report(optimized)
    assert report.replaced
    assert not report.not_replaced


# ---- what stays ----


def sampler(shape: Any, steps: int | None, item: str) -> Any:
    """Langevin steps, with nothing, with a number or with a matrix of each step beside them."""
    drift = tf.constant(numbers(UNITS, UNITS) * 0.1)
    scales = tf.TensorSpec([None] if item == "number" else [None, *shape], tf.float32)

    @tf.function(autograph=False, input_signature=[scales, tf.TensorSpec([], tf.int32)])
    def run(x: Any, n: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            noise = S.stateless_normal(shape, tf.stack([i, 5]))
            return i + 1, h @ drift + noise * (0.1 if item == "none" else x[i])

        count = n if steps is None else steps
        return tf.while_loop(lambda i, _: i < count, body, (0, tf.zeros(shape)))[1]

    return run


@pytest.mark.parametrize("item", ["none", "number", "matrix"])
@pytest.mark.parametrize("steps", [None, MOST_STEPS, MOST_STEPS + 1])
def test_numbers_that_alone_would_fill_the_memory(item: str, steps: int | None) -> None:
    run, length = sampler(SHAPE, steps, item), steps or 9
    x = tf.constant(numbers(length, *([] if item == "number" else SHAPE)))
    optimized = tfmem.optimize(run, passes=("recurrent",))
    np.testing.assert_allclose(optimized(x, length), run(x, length), rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    if item == "matrix" or steps == MOST_STEPS:
        assert report.replaced
        return
    (why,) = report.not_replaced
    drawn = {"node": "while/stateless_random_normal/StatelessRandomNormalV2", "op": "StatelessRandomNormalV2"}
    assert str(Reason.DRAWS_ROOM(**drawn, most=MOST_STEPS, shape=tuple(SHAPE))) in why


@pytest.mark.parametrize("bound", [MOST_STEPS, MOST_STEPS + 1])
@pytest.mark.parametrize("training", [False, True])
def test_loops_that_their_states_end(bound: int, training: bool) -> None:
    weight = tf.Variable(numbers(UNITS, UNITS) * 0.5)

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, tf.tanh(h @ weight) + 0.2 * S.stateless_uniform(SHAPE, tf.stack([i, 5]))

        goes_on = lambda _, h: tf.reduce_any(h < 0.15)  # noqa: E731
        with tf.GradientTape() as tape:
            h = tf.while_loop(goes_on, body, (0, h), maximum_iterations=bound)[1]
            loss = tf.reduce_sum(h)
        return (h, tape.gradient(loss, weight)) if training else (h,)

    optimized = tfmem.optimize(run, passes=("recurrent",))
    for seed in range(3):
        h = tf.constant(numbers(*SHAPE, seed=seed))
        for a, b in zip(optimized(h), run(h), strict=True):
            np.testing.assert_allclose(a, b, rtol=20 * TOLERANCE, atol=20 * TOLERANCE)
    report = tfmem.report(optimized)
    assert bool(report.replaced) == (bound == MOST_STEPS)
    drawn = {"node": "while/stateless_random_uniform/StatelessRandomUniformV2", "op": "StatelessRandomUniformV2"}
    assert all(str(Reason.STEP_DRAWS(**drawn, most=MOST_STEPS)) in why for why in report.not_replaced)


# ---- GPUs, whose kernel of the op draws no truncated normals ----


@pytest.fixture
def _unrolls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as for a GPU, and run on a CPU."""
    needs = replace_recurrent.plan.Needs

    def of_gpu(*given: Any, **named: Any) -> Any:
        return needs(*given, **{**named, "unrolls_draws": True})

    monkeypatch.setattr(replace_recurrent.plan, "Needs", of_gpu)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("_unrolls")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_ops_for_each_of_a_known_number_of_steps(name: str, training: bool) -> None:
    run = loop(DRAWS[name], training=training, steps=5)
    optimized = tfmem.optimize(run, passes=("recurrent",))
    given = tf.constant(numbers(5, BATCH, INPUTS)), tf.constant(5), tf.constant([7, 3])
    expected, found = run(*given), optimized(*given)
    np.testing.assert_array_equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=20 * TOLERANCE, atol=20 * TOLERANCE)
    report = tfmem.report(optimized)
    assert report.replaced
    nodes = optimized.get_concrete_function(*given).graph.as_graph_def().node
    assert not [node.name for node in nodes if node.op == STEP_DRAWS and b"Truncated" in node.attr["op"].s]
    truncated = [node.name for node in nodes if node.op.startswith("StatelessTruncated")]
    assert len(truncated) == (5 if name == "split by index" else 0)  # of "old" seeds are constants, and numbers folded


@pytest.mark.usefixtures("_unrolls")
@pytest.mark.parametrize("steps", [None, MOST_STEPS + 5])
def test_too_many_steps_to_write_ops_for(steps: int | None) -> None:
    length = steps or 5
    given = tf.constant(numbers(length, BATCH, INPUTS)), tf.constant(length), tf.constant([7, 3])
    for name in ("split by index", "old", "folded", "counted", "whole"):
        optimized = tfmem.optimize(loop(DRAWS[name], steps=steps), passes=("recurrent",))
        optimized(*given)
        if name not in ("split by index", "old"):
            assert not tfmem.report(optimized).not_replaced
            continue
        (why,) = tfmem.report(optimized).not_replaced
        assert "truncated normals on GPUs" in why


# ---- the op ----

KEYS = {"op": "StatelessRandomGetKeyCounter", "Tout": [tf.uint64, tf.uint64], "shapes": [[1], [2]]}


@pytest.mark.parametrize(
    ("inputs", "attrs", "error"),
    [
        ([(3, 2)], {"of_steps": [False]}, "no input of .* differs between steps"),
        ([(3, 2)], {"of_steps": []}, "of_steps"),
        ([()], {"of_steps": [True]}, r"expected an item for each|must be at least rank 1"),
        ([(3, 2), (3, 2)], {"of_steps": [True, True]}, "expected a stateless random op"),
        ([(3, 2)], {"of_steps": [True], "op": "StatelessWhile"}, "expected a stateless random op"),
        ([(3, 2)], {"of_steps": [True], "op": "Unknown"}, "Unknown"),
        ([(3, 5)], {"of_steps": [True]}, "seed must have shape"),
    ],
)
def test_calls_that_are_refused(inputs: Any, attrs: Any, error: str) -> None:
    given = [tf.zeros(shape, tf.int32) for shape in inputs]
    with pytest.raises((tf.errors.OpError, ValueError), match=error):
        load().ops.tfmem_step_draws(inputs=given, **{**KEYS, **attrs})


def test_inputs_of_other_lengths_and_shapes_that_differ() -> None:
    key, counter = tf.zeros([3, 1], tf.uint64), tf.zeros([3, 2], tf.uint64)
    shapes = tf.constant([[2, 4], [2, 4], [4, 2]])
    draw = {"op": "StatelessRandomNormalV2", "Tout": [tf.float32], "shapes": [[None, None]]}
    draw["of_steps"] = [True, True, True, False]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"draws \[4,2\] in step 2; expected \[2,4\]"):
        load().ops.tfmem_step_draws(inputs=[shapes, key, counter, 3], **draw)
    draw["of_steps"] = [False, True, True, False]
    with pytest.raises((tf.errors.OpError, ValueError)):  # more numbers than a shape can count
        load().ops.tfmem_step_draws(inputs=[tf.constant([2**62, 0], tf.int64), key, counter, 3], **draw)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected an item for each of 2 steps|must be equal"):
        load().ops.tfmem_step_draws(inputs=[[2, 4], key[:2], counter, 3], **draw)


def test_shapes_are_known_before_the_op_runs() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int32)])
    def run(seeds: Any) -> Any:
        unknown = load().ops.tfmem_step_draws(inputs=[seeds], of_steps=[True], **KEYS)
        known = load().ops.tfmem_step_draws(inputs=[seeds], of_steps=[True], steps=3, **KEYS)
        assert [each.shape.as_list() for each in (*unknown, *known)] == [[None, 1], [None, 2], [3, 1], [3, 2]]
        return known

    run(tf.zeros([3, 2], tf.int32))
