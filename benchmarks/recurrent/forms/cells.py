"""Cells whose states have other widths, whose steps look at all units, or that have custom gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.recurrent.forms.gated import form, gates, joined
from benchmarks.recurrent.forms.kit import (
    INPUTS,
    ROWS,
    UNITS,
    Kit,
    Maker,
    Step,
    by_keras,
    by_scan,
    by_while,
)

sigmoid, tanh = tf.sigmoid, tf.tanh


def decayed(kit: Kit) -> Step:
    """GRU-D: inputs that are missing decay to their mean; the last input seen is a state as wide as the input."""
    cell, gamma, rho, mean = gates(kit, 3, state=UNITS + INPUTS), kit.weight(INPUTS), kit.weight(INPUTS, UNITS), 0.1

    def step(x: Any, h: Any, last: Any) -> Any:
        seen = tf.cast(x > -0.5, tf.float32)
        decay = tf.exp(-tf.nn.relu(gamma))
        last = seen * x + (1 - seen) * last
        x = seen * x + (1 - seen) * (decay * last + (1 - decay) * mean)
        h = tf.exp(-tf.nn.relu(seen @ rho)) * h
        z, r, g = cell(x, joined(h, seen))
        h = (1 - sigmoid(z)) * h + sigmoid(z) * tanh(g * sigmoid(r))
        return h, (h, last)

    return step


def swish(kit: Kit) -> Step:
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        h = tf.nn.silu(x @ w + h @ r)
        return h, (h,)

    return step


def straight_through(kit: Kit) -> Step:
    """Units that are 0 or 1, with the gradient of the probability."""
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        p = sigmoid(x @ w + h @ r)
        h = p + tf.stop_gradient(tf.cast(p > 0.5, tf.float32) - p)
        return h, (h,)

    return step


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _spike(v: Any) -> Any:
    return tf.cast(v > 0.0, tf.float32), lambda g: g / (1.0 + tf.abs(v)) ** 2


def spiking(kit: Kit) -> Step:
    """Leaky integrate-and-fire neurons with a surrogate gradient."""
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, v: Any, z: Any) -> Any:
        v = 0.9 * v + x @ w + z @ r - z
        z = _spike(v - 0.5)
        return z, (v, z)

    return step


def competing(kit: Kit) -> Step:
    """Softmax over units, and their maximum."""
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        a = x @ w + h @ r
        h = tf.nn.softmax(a) * tanh(a) / (1.0 + tf.reduce_max(tf.abs(h), 1, keepdims=True))
        return h, (h,)

    return step


def normalised(kit: Kit) -> Step:
    """Hidden states of length 1."""
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        h = tf.math.l2_normalize(tf.nn.elu(x @ w + h @ r), axis=1)
        return h, (h,)

    return step


def heads(kit: Kit) -> Step:
    """A GRU whose recurrent weights are two blocks on the diagonal."""
    w, r = kit.weight(INPUTS, 3 * UNITS), kit.weight(2, UNITS // 2, 3 * UNITS // 2)

    def step(x: Any, h: Any) -> Any:
        blocks = tf.einsum("bhd,hde->bhe", tf.reshape(h, [-1, 2, UNITS // 2]), r)
        z, q, g = (tf.reshape(part, [-1, UNITS]) for part in tf.split(blocks, 3, 2))
        a, b, c = tf.split(x @ w, 3, 1)
        h = sigmoid(a + z) * h + (1 - sigmoid(a + z)) * tanh(c + sigmoid(b + q) * g)
        return h, (h,)

    return step


def low_rank(kit: Kit) -> Step:
    w, u, v = kit.weight(INPUTS, UNITS), kit.weight(UNITS, 2), kit.weight(2, UNITS)

    def step(x: Any, h: Any) -> Any:
        h = tanh(x @ w + (h @ u) @ v)
        return h, (h,)

    return step


def hyper(kit: Kit) -> Step:
    """HyperLSTM: a smaller LSTM scales the gates of a larger one."""
    small, large = gates(kit, 4, 5, 5 + UNITS), (kit.weight(INPUTS, 4 * UNITS), kit.weight(UNITS, 4 * UNITS))
    scale = kit.weight(5, 4 * UNITS)

    def step(x: Any, h: Any, c: Any, hh: Any, hc: Any) -> Any:
        i, f, g, o = small(x, joined(h, hh))
        hc = sigmoid(f) * hc + sigmoid(i) * tanh(g)
        hh = sigmoid(o) * tanh(hc)
        i, f, g, o = tf.split((x @ large[0] + h @ large[1]) * (hh @ scale), 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return h, (h, c, hh, hc)

    return step


def zoneout(kit: Kit) -> Step:
    """Random units keep their value, by a stateless seed."""
    cell = gates(kit, 2)

    def step(x: Any, h: Any, t: Any) -> Any:
        g, c = cell(x, h)
        new = sigmoid(g) * h + (1 - sigmoid(g)) * tanh(c)
        kept = tf.cast(tf.random.stateless_uniform([ROWS, UNITS], [7, 8]) < 0.2, tf.float32)
        h = kept * h + (1 - kept) * new
        return h, (h, t * 0.9)

    return step


FORMS: dict[str, Maker] = {
    "GRU-D": form(by_keras, (UNITS, INPUTS), decayed),
    "swish": form(by_while, (UNITS,), swish),
    "straight-through binary units": form(by_while, (UNITS,), straight_through),
    "spiking neurons, custom gradient": form(by_keras, (UNITS, UNITS), spiking),
    "softmax and max over units": form(by_while, (UNITS,), competing),
    "l2_normalize over units": form(by_scan, (UNITS,), normalised),
    "block-diagonal GRU by einsum": form(by_keras, (UNITS,), heads),
    "low-rank RNN": form(by_scan, (UNITS,), low_rank),
    "HyperLSTM": form(by_keras, (UNITS, UNITS, 5, 5), hyper),
    "zoneout by a stateless seed": form(by_while, (UNITS, 1), zoneout),
}
