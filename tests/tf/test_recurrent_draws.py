"""Random numbers that a loop draws: what one op drew is the same wherever states and results read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import TOLERANCE, UNITS, numbers

BATCH, TIME, ENDS = 3, 30, 13
R = tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.4)
DRAWS: dict[str, Callable[[], Any]] = {
    "normal": lambda: tf.random.normal([BATCH, UNITS]),
    "uniform": lambda: tf.random.uniform([BATCH, UNITS]),
    "truncated": lambda: tf.random.truncated_normal([BATCH, UNITS]),
}


def noisy(h: Any, draw: Callable[[], Any], early: bool, backwards: bool = False) -> tuple[Any, ...]:
    """A loop whose states, whose lists and a sum of which read the same noise.

    Returns:
        All states, the noise, what of both no cell can express, twice the noise, the sum of its first numbers.
    """
    lists = [
        tf.TensorArray(tf.float32, TIME, element_shape=[BATCH, width]) for width in (UNITS, UNITS, 2 * UNITS, UNITS)
    ]

    def body(i: Any, left: Any, h: Any, total: Any, *lists: Any) -> Any:
        noise = draw()
        h = tf.tanh(h @ R) + noise
        items = h, noise, tf.nn.softmax(tf.concat([h, noise], 1)), 2 * noise
        at = TIME - 1 - i if backwards else i
        written = [each.write(at, item) for each, item in zip(lists, items, strict=True)]
        return i + 1, left - 1.0, h, total + noise[:, 0], *written

    def goes_on(i: Any, left: Any, *_: Any) -> Any:
        return (i < TIME) & tf.reduce_any(left > 0.5) if early else i < TIME

    start = (0, tf.fill([BATCH], float(ENDS)), h, tf.zeros([BATCH]), *lists)
    _, _, _, total, *lists = tf.while_loop(goes_on, body, start)
    return *(each.stack() for each in lists), total


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_one_draw_is_one_number_everywhere(kind: str, early: bool, training: bool) -> None:
    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(h)
            found = noisy(h, DRAWS[kind], early)
            loss = tf.reduce_sum(found[0] ** 2) + tf.reduce_sum(found[2])
        return (*found, tape.gradient(loss, h)) if training else found

    optimized = tfmem.optimize(run, passes=("recurrent",))
    start = numbers(BATCH, UNITS)
    steps = ENDS if early else TIME
    seen = []
    for _ in range(2):
        states, noise, both, twice, total, *gradient = map(np.asarray, optimized(tf.constant(start)))
        before = np.concatenate([start[None], states[: steps - 1]])
        drawn = states[:steps] - np.tanh(before @ R.numpy())
        close = {"rtol": TOLERANCE, "atol": TOLERANCE}
        np.testing.assert_allclose(noise[:steps], drawn, **close)
        np.testing.assert_allclose(twice[:steps], 2 * drawn, **close)
        softmax = tf.nn.softmax(np.concatenate([states[:steps], drawn], 2)).numpy()
        np.testing.assert_allclose(both[:steps], softmax, **close)
        np.testing.assert_allclose(total, drawn[:, :, 0].sum(0), **close)
        assert not np.any(states[steps:])
        assert not np.any(noise[steps:])
        assert len(np.unique(drawn)) > 0.99 * drawn.size
        seen.append(drawn)
        if training:
            np.testing.assert_allclose(gradient[0], _gradient(start, drawn), rtol=1e-4, atol=1e-4)
    assert np.abs(seen[0] - seen[1]).max() > 0.1
    report = tfmem.report(optimized)
    assert report.replaced, report.not_replaced


def _gradient(start: Any, drawn: Any) -> Any:
    """The gradient of the loss, step by step, for what was drawn."""
    h = first = tf.constant(start)
    loss = tf.zeros([])
    with tf.GradientTape() as tape:
        tape.watch(first)
        for noise in drawn:
            h = tf.tanh(h @ R) + noise
            loss += tf.reduce_sum(h**2) + tf.reduce_sum(tf.nn.softmax(tf.concat([h, noise], 1)))
    return tape.gradient(loss, first)


def test_an_end_that_is_drawn() -> None:
    """In training the steps run twice, to be counted and to be differentiated: both end at the same state."""

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, h: Any, _: Any, total: Any) -> Any:
            noise = tf.random.uniform([BATCH, UNITS])
            return i + 1, h + noise * tf.sigmoid(h), h, total + noise

        with tf.GradientTape() as tape:
            tape.watch(h)
            start = (0, h, tf.zeros_like(h), tf.zeros_like(h))
            found = tf.while_loop(lambda i, h, *_: (i < 40) & tf.reduce_all(h < 2.0), body, start)
            loss = tf.reduce_sum(found[1] ** 2)
        return *found, tape.gradient(loss, h)

    optimized = tfmem.optimize(run, passes=("recurrent",))
    for _ in range(20):
        count, end, before, total, gradient = map(np.asarray, optimized(tf.zeros([BATCH, UNITS])))
        assert 3 < count < 40
        assert before.max() < 2.0 <= end.max()
        assert np.all(total < end / 0.5)
        assert np.all(gradient > 2 * end)
    (line,) = tfmem.report(optimized).replaced
    assert "and its gradient" in line


def test_results_written_from_the_end() -> None:
    run = tf.function(lambda h: noisy(h, DRAWS["normal"], early=False, backwards=True), autograph=False)
    optimized = tfmem.optimize(run, passes=("recurrent",))
    start = numbers(BATCH, UNITS)
    states, noise, *_ = map(np.asarray, optimized(tf.constant(start)))
    before = np.concatenate([states[1:], start[None]])
    np.testing.assert_allclose(noise, states - np.tanh(before @ R.numpy()), rtol=TOLERANCE, atol=TOLERANCE)
    assert tfmem.report(optimized).replaced


def test_a_condition_that_draws() -> None:
    """Its draws are others than the body's, of which one has the same name."""

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, h: Any, noise: Any) -> Any:
            return i + 1, tf.tanh(h @ R), noise.write(i, tf.random.uniform([BATCH]))

        noise = tf.TensorArray(tf.float32, TIME, element_shape=[BATCH])
        count, h, noise = tf.while_loop(
            lambda i, h, _: (i < TIME) & tf.reduce_all(tf.random.uniform([1]) + 0 * h[:, 0] < 0.8), body, (0, h, noise)
        )
        return count, h, noise.stack()

    optimized = tfmem.optimize(run, passes=("recurrent",))
    start = tf.constant(numbers(BATCH, UNITS))
    counts, above = [], []
    for _ in range(60):
        count, _, noise = optimized(start)
        assert not np.any(noise.numpy()[int(count) :])
        counts.append(int(count))
        above += list(noise.numpy()[: int(count), 0] > 0.8)
    assert 2 < np.mean(counts) < 7
    assert len(set(counts)) > 5
    assert tfmem.report(optimized).replaced
    assert any(above), "what the body draws is not what the condition drew"
