"""Recurrences over rewards and over probabilities: reinforcement learning, CTC, CRF, filters, sums."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.recurrent.forms.kit import INPUTS, ROWS, STEPS, UNITS, Kit, Maker, Run, time_major


def _advantages(kit: Kit) -> Run:
    """Generalised advantage estimation, `[time, batch]`, from the end."""
    value = kit.weight(INPUTS, 1)

    def run(x: Any) -> Any:
        rewards, values = tf.transpose(x[:, :, 0]), tf.transpose((x @ value)[:, :, 0])
        following = tf.concat([values[1:], tf.zeros([1, ROWS])], 0)
        deltas = rewards + 0.99 * following - values
        array = tf.TensorArray(tf.float32, STEPS)

        def body(i: Any, advantage: Any, array: Any) -> Any:
            advantage = deltas[STEPS - 1 - i] + 0.99 * 0.95 * advantage
            return i + 1, advantage, array.write(STEPS - 1 - i, advantage)

        return tf.while_loop(lambda i, *_: i < STEPS, body, (0, tf.zeros([ROWS]), array))[2].stack()

    return run


def _advantages_range(kit: Kit) -> Run:
    """Generalised advantage estimation by a range from the end."""
    value = kit.weight(INPUTS, 1)

    def run(x: Any) -> Any:
        rewards, values = tf.transpose(x[:, :, 0]), tf.transpose((x @ value)[:, :, 0])
        deltas, advantage = rewards - values, tf.zeros([ROWS])
        array = tf.TensorArray(tf.float32, STEPS)
        for t in tf.range(STEPS - 1, -1, -1):
            advantage = deltas[t] + 0.9 * advantage
            array = array.write(t, advantage)
        return array.stack()

    return run


def _returns(kit: Kit) -> Run:
    """Discounted returns by a reversed scan over scalars of each row."""
    value = kit.weight(INPUTS, 1)

    def run(x: Any) -> Any:
        rewards = tf.transpose((x @ value)[:, :, 0])
        return tf.scan(lambda r, reward: reward + 0.9 * r, rewards, tf.zeros([ROWS]), reverse=True)

    return run


def _returns_of_one(kit: Kit) -> Run:
    """Discounted returns of one episode, `[time]`: the state is a single number."""
    value = kit.weight(INPUTS, 1)

    def run(x: Any) -> Any:
        rewards = (x[0] @ value)[:, 0]
        return tf.scan(lambda r, reward: reward + 0.9 * r, rewards, tf.constant(0.0), reverse=True)

    return run


def _lambda_returns(kit: Kit) -> Run:
    """TD(lambda) with discounts of each step."""
    value, discount = kit.weight(INPUTS, 1), kit.weight(INPUTS, 1)

    def run(x: Any) -> Any:
        values, discounts = (tf.transpose((x @ w)[:, :, 0]) for w in (value, discount))
        inputs = (values, tf.sigmoid(discounts))
        return tf.scan(lambda r, now: now[0] + now[1] * (0.05 * now[0] + 0.95 * r), inputs, values[-1], reverse=True)

    return run


def _crf(kit: Kit) -> Run:
    """The forward algorithm of a CRF: logsumexp over the tags before."""
    emit, move = kit.weight(INPUTS, 5), kit.weight(5, 5)

    def run(x: Any) -> Any:
        items = time_major(x @ emit)

        def step(alpha: Any, item: Any) -> Any:
            return tf.reduce_logsumexp(alpha[:, :, None] + move, 1) + item

        return tf.reduce_logsumexp(tf.foldl(step, items[1:], items[0]), 1)

    return run


def _viterbi(kit: Kit) -> Run:
    """The best path's score: the maximum over the tags before."""
    emit, move = kit.weight(INPUTS, 5), kit.weight(5, 5)

    def run(x: Any) -> Any:
        items = time_major(x @ emit)

        def step(alpha: Any, item: Any) -> Any:
            return tf.reduce_max(alpha[:, :, None] + move, 1) + item

        return tf.foldl(step, items[1:], items[0])

    return run


def _ctc(kit: Kit) -> Run:
    """CTC-like: alpha of a label's states, shifted by one and two."""
    emit = kit.weight(INPUTS, UNITS)

    def run(x: Any) -> Any:
        items = time_major(tf.nn.log_softmax(x @ emit))

        def step(alpha: Any, item: Any) -> Any:
            once = tf.concat([tf.fill([ROWS, 1], -1e4), alpha[:, :-1]], 1)
            twice = tf.concat([tf.fill([ROWS, 2], -1e4), alpha[:, :-2]], 1)
            return tf.reduce_logsumexp(tf.stack([alpha, once, twice]), 0) + item

        return tf.foldl(step, items, tf.zeros([ROWS, UNITS]))

    return run


def _hidden_markov(kit: Kit) -> Run:
    """The forward algorithm with probabilities that are normalised in every step."""
    emit, move = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def run(x: Any) -> Any:
        items, matrix = time_major(tf.nn.softmax(x @ emit)), tf.nn.softmax(move)

        def step(carry: Any, item: Any) -> Any:
            alpha = (carry[0] @ matrix) * item
            total = tf.reduce_sum(alpha, 1, keepdims=True)
            return alpha / total, carry[1] + tf.math.log(total[:, 0])

        return tf.scan(step, items, (tf.ones([ROWS, UNITS]) / UNITS, tf.zeros([ROWS])))[1]

    return run


def _kalman(kit: Kit) -> Run:
    """A Kalman filter of independent units."""
    w, noise = kit.weight(INPUTS, UNITS), kit.weight(UNITS)

    def run(x: Any) -> Any:
        q = tf.nn.softplus(noise)

        def step(carry: Any, item: Any) -> Any:
            mean, variance = carry[0] * 0.9, carry[1] * 0.81 + q
            gain = variance / (variance + 1.0)
            return mean + gain * (item @ w - mean), (1.0 - gain) * variance

        return tf.scan(step, time_major(x), (tf.zeros([ROWS, UNITS]), tf.ones([ROWS, UNITS])))[0]

    return run


def _average(kit: Kit) -> Run:
    """An exponential moving average of the inputs."""
    rate = kit.weight(INPUTS)

    def run(x: Any) -> Any:
        a = tf.sigmoid(rate)
        return tf.scan(lambda m, item: a * m + (1.0 - a) * item, time_major(x))

    return run


def _matvec(kit: Kit) -> Run:
    """One sequence without a batch: matvec products, states `[units]`."""
    w, r = kit.weight(UNITS, INPUTS), kit.weight(UNITS, UNITS)

    def run(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            return tf.tanh(tf.linalg.matvec(w, item) + tf.linalg.matvec(r, h))

        return tf.scan(step, x[0], tf.zeros([UNITS]))

    return run


def _batched_matvec(kit: Kit) -> Run:
    """Matvec products for each row of a batch."""
    w, r = kit.weight(UNITS, INPUTS), kit.weight(UNITS, UNITS)

    def run(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            return tf.tanh(tf.linalg.matvec(w, item) + tf.linalg.matvec(r, h))

        return tf.scan(step, time_major(x), tf.zeros([ROWS, UNITS]))

    return run


FORMS: dict[str, Maker] = {
    "GAE, written at n - 1 - i": _advantages,
    "GAE, tf.range(n - 1, -1, -1)": _advantages_range,
    "discounted returns": _returns,
    "discounted returns of one episode": _returns_of_one,
    "TD(lambda)": _lambda_returns,
    "CRF forward": _crf,
    "Viterbi score": _viterbi,
    "CTC forward": _ctc,
    "HMM forward, normalised": _hidden_markov,
    "Kalman filter": _kalman,
    "moving average without an initial state": _average,
    "matvec without a batch": _matvec,
    "matvec in a batch": _batched_matvec,
}
