"""Gated cells from papers, whose states are matrices `[batch, units]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.recurrent.forms.kit import (
    INPUTS,
    UNITS,
    Kit,
    Maker,
    Run,
    Step,
    by_for,
    by_keras,
    by_scan,
    by_while,
)

sigmoid, tanh = tf.sigmoid, tf.tanh


def form(loop: Callable[..., Any], sizes: tuple[int, ...], make: Callable[[Kit], Step], output: int = 0) -> Maker:
    """The form whose step `make` builds, written as the given kind of loop."""

    def form(kit: Kit) -> Run:
        step = make(kit)
        return lambda x: loop(step, sizes, x, output)

    return form


def dense(kit: Kit, *shape: int) -> Callable[[Any], Any]:
    w, b = kit.weight(*shape), kit.weight(shape[-1])
    return lambda x: x @ w + b


def joined(*parts: Any) -> Any:
    return tf.concat(parts, 1)


def gates(kit: Kit, count: int, units: int = UNITS, state: int = UNITS) -> Callable[[Any, Any], Any]:
    made = dense(kit, INPUTS + state, count * units)
    return lambda x, h: tf.split(made(joined(x, h)), count, 1)


def lstm(kit: Kit) -> Step:
    cell = gates(kit, 4)

    def step(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = cell(x, h)
        c = sigmoid(f + 1.0) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return h, (h, c)

    return step


def peephole(kit: Kit) -> Step:
    cell, p = gates(kit, 4), kit.weight(3, UNITS)

    def step(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = cell(x, h)
        c = sigmoid(f + p[0] * c) * c + sigmoid(i + p[1] * c) * tanh(g)
        h = sigmoid(o + p[2] * c) * tanh(c)
        return h, (h, c)

    return step


def coupled(kit: Kit) -> Step:
    cell = gates(kit, 3)

    def step(x: Any, h: Any, c: Any) -> Any:
        f, g, o = cell(x, h)
        c = tf.clip_by_value(sigmoid(f) * c + (1 - sigmoid(f)) * tanh(g), -1.0, 1.0)
        h = sigmoid(o) * tanh(c)
        return h, (h, c)

    return step


def packed(kit: Kit) -> Step:
    """Both states of an LSTM in one tensor."""
    cell = gates(kit, 4)

    def step(x: Any, state: Any) -> Any:
        c, h = tf.split(state, 2, 1)
        i, f, g, o = cell(x, h)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return h, (joined(c, h),)

    return step


def projected(kit: Kit) -> Step:
    cell, p = gates(kit, 4, state=5), kit.weight(UNITS, 5)

    def step(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = cell(x, h)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = (sigmoid(o) * tanh(c)) @ p
        return h, (h, c)

    return step


def layer_norm(kit: Kit) -> Step:
    w, r = kit.weight(INPUTS, 4 * UNITS), kit.weight(UNITS, 4 * UNITS)
    norms = [kit.layer(keras.layers.LayerNormalization()) for _ in range(2)]

    def step(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = tf.split(norms[0](x @ w + h @ r), 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(norms[1](c))
        return h, (h, c)

    return step


def moments(kit: Kit) -> Step:
    w, r, gain = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS), kit.weight(UNITS)

    def step(x: Any, h: Any) -> Any:
        a = x @ w + h @ r
        mean, variance = tf.nn.moments(a, [1], keepdims=True)
        h = tanh(gain * (a - mean) * tf.math.rsqrt(variance + 1e-3))
        return h, (h,)

    return step


def multiplicative(kit: Kit) -> Step:
    a, b = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)
    cell = gates(kit, 4)

    def step(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = cell(x, (x @ a) * (h @ b))
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return h, (h, c)

    return step


def minimal(kit: Kit) -> Step:
    forget, candidate = dense(kit, INPUTS + UNITS, UNITS), dense(kit, INPUTS + UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        f = sigmoid(forget(joined(x, h)))
        h = (1 - f) * h + f * tanh(candidate(joined(x, f * h)))
        return h, (h,)

    return step


def ugrnn(kit: Kit) -> Step:
    cell = gates(kit, 2)

    def step(x: Any, h: Any) -> Any:
        g, c = cell(x, h)
        h = sigmoid(g) * h + (1 - sigmoid(g)) * tanh(c)
        return h, (h,)

    return step


def highway(kit: Kit) -> Step:
    """A recurrent highway of depth 2."""
    w, first, second = kit.weight(INPUTS, 2 * UNITS), dense(kit, UNITS, 2 * UNITS), dense(kit, UNITS, 2 * UNITS)

    def step(x: Any, s: Any) -> Any:
        for depth, layer in enumerate((first, second)):
            both = layer(s) + (x @ w if depth == 0 else 0.0)
            h, t = tanh(both[:, :UNITS]), sigmoid(both[:, UNITS:])
            s = h * t + s * (1 - t)
        return s, (s,)

    return step


def sru(kit: Kit) -> Step:
    w, v = kit.weight(INPUTS, 4 * UNITS), kit.weight(2, UNITS)

    def step(x: Any, c: Any) -> Any:
        a, f, r, skip = tf.split(x @ w, 4, 1)
        f = sigmoid(f + v[0] * c)
        r = sigmoid(r + v[1] * c)
        c = f * c + (1 - f) * a
        return r * c + (1 - r) * skip, (c,)

    return step


def qrnn(kit: Kit) -> Step:
    w = kit.weight(INPUTS, 3 * UNITS)

    def step(x: Any, c: Any) -> Any:
        z, f, o = tf.split(x @ w, 3, 1)
        c = sigmoid(f) * c + (1 - sigmoid(f)) * tanh(z)
        return sigmoid(o) * c, (c,)

    return step


def independent(kit: Kit) -> Step:
    w, u = kit.weight(INPUTS, UNITS), kit.weight(UNITS)

    def step(x: Any, h: Any) -> Any:
        h = tf.nn.relu(x @ w + u * h)
        return h, (h,)

    return step


def minimal_gru(kit: Kit) -> Step:
    w = kit.weight(INPUTS, 2 * UNITS)

    def step(x: Any, h: Any) -> Any:
        z, candidate = tf.split(x @ w, 2, 1)
        h = h + sigmoid(z) * (tf.where(candidate >= 0, candidate + 0.5, sigmoid(candidate)) - h)
        return h, (h,)

    return step


def antisymmetric(kit: Kit) -> Step:
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def step(x: Any, h: Any) -> Any:
        skew = r - tf.transpose(r) - 0.1 * tf.eye(UNITS)
        h = h + 0.1 * tanh(x @ w + h @ skew)
        return h, (h,)

    return step


def echo(kit: Kit) -> Step:
    w, r = tf.constant(kit.numbers(INPUTS, UNITS)), tf.constant(kit.numbers(UNITS, UNITS) * 0.3)

    def step(x: Any, h: Any) -> Any:
        h = 0.3 * h + 0.7 * tanh(x @ w + h @ r)
        return h, (h,)

    return step


def phased(kit: Kit) -> Step:
    """Units that are open in a part of their period; the time is a state of one number a row."""
    cell, period = gates(kit, 3), kit.weight(UNITS)

    def step(x: Any, h: Any, t: Any) -> Any:
        z, r, g = cell(x, h)
        phase = tf.math.floormod(t - 0.1, 1.0 + tf.abs(period)) / (1.0 + tf.abs(period))
        k = tf.where(phase < 0.5, 2.0 * phase, 2.0 - 2.0 * phase)
        new = sigmoid(z) * h + (1 - sigmoid(z)) * tanh(g * sigmoid(r))
        h = k * new + (1 - k) * h
        return h, (h, t + 1.0)

    return step


def exponential(kit: Kit) -> Step:
    """The sLSTM of xLSTM, with its stabiliser."""
    cell = gates(kit, 4)

    def step(x: Any, h: Any, c: Any, n: Any, m: Any) -> Any:
        i, f, z, o = cell(x, h)
        new = tf.maximum(tf.math.log_sigmoid(f) + m, i)
        i, f = tf.exp(i - new), tf.exp(tf.math.log_sigmoid(f) + m - new)
        c, n = f * c + i * tanh(z), f * n + i
        h = sigmoid(o) * c / tf.maximum(n, 1e-3)
        return h, (h, c, n, new)

    return step


def nas(kit: Kit) -> Step:
    w, r = kit.weight(INPUTS, 8 * UNITS), kit.weight(UNITS, 8 * UNITS)

    def step(x: Any, h: Any, c: Any) -> Any:
        a = [p + q for p, q in zip(tf.split(h @ r, 8, 1), tf.split(x @ w, 8, 1), strict=True)]
        left = tanh(sigmoid(a[0]) * tf.nn.relu(a[1])) + sigmoid(a[2]) * tanh(a[3])
        c = tanh(left) * c + tf.nn.relu(a[4]) * sigmoid(a[5])
        h = tanh(c * sigmoid(a[6]) + a[7])
        return h, (h, c)

    return step


FORMS: dict[str, Maker] = {
    "LSTM by tf.while_loop": form(by_while, (UNITS, UNITS), lstm),
    "LSTM by tf.scan": form(by_scan, (UNITS, UNITS), lstm),
    "LSTM by autograph": form(by_for, (UNITS, UNITS), lstm),
    "LSTM with peepholes": form(by_keras, (UNITS, UNITS), peephole),
    "LSTM with coupled, clipped gates": form(by_while, (UNITS, UNITS), coupled),
    "LSTM, concat([c, h])": form(by_scan, (2 * UNITS,), packed, UNITS),
    "LSTMP": form(by_keras, (5, UNITS), projected),
    "LSTM with keras LayerNormalization": form(by_keras, (UNITS, UNITS), layer_norm),
    "RNN with tf.nn.moments": form(by_scan, (UNITS,), moments),
    "multiplicative LSTM": form(by_for, (UNITS, UNITS), multiplicative),
    "minimal gated unit": form(by_keras, (UNITS,), minimal),
    "UGRNN": form(by_while, (UNITS,), ugrnn),
    "recurrent highway": form(by_keras, (UNITS,), highway),
    "SRU": form(by_scan, (UNITS,), sru),
    "QRNN": form(by_for, (UNITS,), qrnn),
    "IndRNN": form(by_keras, (UNITS,), independent),
    "minGRU": form(by_scan, (UNITS,), minimal_gru),
    "antisymmetric RNN": form(by_while, (UNITS,), antisymmetric),
    "echo state network": form(by_scan, (UNITS,), echo),
    "phased GRU": form(by_for, (UNITS, 1), phased),
    "sLSTM (xLSTM)": form(by_scan, (UNITS,) * 4, exponential),
    "NASCell": form(by_keras, (UNITS, UNITS), nas),
}
