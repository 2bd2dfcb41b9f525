"""State-space, continuous-time, latent and memory models, and decoders that feed their output back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.recurrent.forms.gated import dense, form, gates, joined
from benchmarks.recurrent.forms.kit import (
    INPUTS,
    ROWS,
    STEPS,
    UNITS,
    Kit,
    Maker,
    Run,
    Step,
    by_for,
    by_keras,
    by_scan,
    by_while,
    time_major,
)

sigmoid, tanh = tf.sigmoid, tf.tanh
ORDER = 4  # of a state-space model's memory


def legendre(kit: Kit) -> Step:
    """LMU: a memory of fixed polynomials beside the units."""
    e, k, m = kit.weight(INPUTS, 1), kit.weight(UNITS, 1), kit.weight(ORDER, 1)
    a, b = tf.constant(kit.numbers(ORDER, ORDER) * 0.2), tf.constant(kit.numbers(1, ORDER))
    hidden = dense(kit, INPUTS + UNITS + ORDER, UNITS)

    def step(x: Any, h: Any, memory: Any) -> Any:
        u = x @ e + h @ k + memory @ m
        memory = memory @ a + u @ b
        h = tanh(hidden(joined(x, h, memory)))
        return h, (h, memory)

    return step


def time_constant(kit: Kit) -> Step:
    """LTC: synapses between all pairs of units, summed over one axis of a small matrix."""
    w, mu, sigma, e = kit.weight(INPUTS, UNITS), *(kit.weight(UNITS, UNITS) for _ in range(3))

    def step(x: Any, v: Any) -> Any:
        synapses = sigmoid(mu) * sigmoid(sigma * (v[:, :, None] - mu))
        total, driven = tf.reduce_sum(synapses, 1), tf.reduce_sum(synapses * e, 1)
        v = (v + 0.1 * (x @ w + driven)) / (1.0 + 0.1 * total)
        return v, (v,)

    return step


def closed_form(kit: Kit) -> Step:
    """CfC without a backbone."""
    heads = [dense(kit, INPUTS + UNITS, UNITS) for _ in range(3)]

    def step(x: Any, h: Any) -> Any:
        both = joined(x, h)
        gate = sigmoid(-heads[0](both) * 0.5)
        h = tanh(heads[1](both)) * gate + (1.0 - gate) * tanh(heads[2](both))
        return h, (h,)

    return step


def closed_form_backbone(kit: Kit) -> Step:
    """CfC with a backbone that is wider than the state."""
    backbone, heads = dense(kit, INPUTS + UNITS, 12), [dense(kit, 12, UNITS) for _ in range(3)]

    def step(x: Any, h: Any) -> Any:
        both = 1.7159 * tanh(0.666 * backbone(joined(x, h)))
        gate = sigmoid(heads[0](both))
        h = tanh(heads[1](both)) * gate + (1.0 - gate) * tanh(heads[2](both))
        return h, (h,)

    return step


def ode(kit: Kit) -> Step:
    """An ODE-RNN: a few Euler steps of a wider net between two inputs, in an inner loop."""
    first, second, cell = dense(kit, UNITS, 12), dense(kit, 12, UNITS), gates(kit, 2)

    def step(x: Any, h: Any) -> Any:
        def euler(k: Any, h: Any) -> Any:
            return k + 1, h + 0.25 * second(tanh(first(h)))

        h = tf.while_loop(lambda k, _: k < 3, euler, (0, h))[1]
        g, c = cell(x, h)
        h = sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)
        return h, (h,)

    return step


def rotation(kit: Kit) -> Step:
    """A complex diagonal state as two real ones (S4D, LRU)."""
    b, c, angle = kit.weight(INPUTS, 2 * UNITS), kit.weight(2 * UNITS, UNITS), kit.weight(UNITS)

    def step(x: Any, re: Any, im: Any) -> Any:
        u, v = tf.split(x @ b, 2, 1)
        cos, sin = 0.95 * tf.cos(angle), 0.95 * tf.sin(angle)
        re, im = cos * re - sin * im + u, sin * re + cos * im + v
        return tf.nn.gelu(joined(re, im) @ c), (re, im)

    return step


def complex_rotation(kit: Kit) -> Run:
    """A complex diagonal state, of complex64."""
    b, angle = kit.weight(INPUTS, UNITS), kit.weight(UNITS)

    def run(x: Any) -> Any:
        factor = tf.complex(0.95 * tf.cos(angle), 0.95 * tf.sin(angle))
        start = tf.zeros([ROWS, UNITS], tf.complex64)
        found = tf.scan(lambda h, u: factor * h + tf.cast(u @ b, tf.complex64), time_major(x), start)
        return tf.math.real(found)

    return run


def selective(kit: Kit) -> Run:
    """Mamba's state `[batch, units, order]`."""
    w, a, bc, rate = kit.weight(INPUTS, UNITS), kit.weight(UNITS, ORDER), kit.weight(INPUTS, 2 * ORDER), kit.weight(
        INPUTS, UNITS
    )  # fmt: skip

    def run(x: Any) -> Any:
        items = time_major(x)

        def body(i: Any, h: Any, array: Any) -> Any:
            item = items[i]
            u, delta = item @ w, tf.nn.softplus(item @ rate)
            b, c = tf.split(item @ bc, 2, 1)
            decay = tf.exp(-delta[:, :, None] * tf.nn.softplus(a))
            h = decay * h + (delta * u)[:, :, None] * b[:, None, :]
            return i + 1, h, array.write(i, tf.reduce_sum(h * c[:, None, :], 2))

        array = tf.TensorArray(tf.float32, STEPS)
        return tf.while_loop(lambda i, *_: i < STEPS, body, (0, tf.zeros([ROWS, UNITS, ORDER]), array))[2].stack()

    return run


def fast_weights(kit: Kit) -> Run:
    """Linear attention: a matrix for each row as the state."""
    w = kit.weight(INPUTS, 3 * ORDER)

    def run(x: Any) -> Any:
        items = time_major(x)

        def body(i: Any, state: Any, array: Any) -> Any:
            q, k, v = tf.split(items[i] @ w, 3, 1)
            state = 0.9 * state + k[:, :, None] * v[:, None, :]
            return i + 1, state, array.write(i, tf.einsum("bk,bkv->bv", q, state))

        array = tf.TensorArray(tf.float32, STEPS)
        return tf.while_loop(lambda i, *_: i < STEPS, body, (0, tf.zeros([ROWS, ORDER, ORDER]), array))[2].stack()

    return run


def rwkv(kit: Kit) -> Step:
    """RWKV's time mixing, with its running maximum."""
    w, decay, bonus = kit.weight(INPUTS, 3 * UNITS), kit.weight(UNITS), kit.weight(UNITS)

    def step(x: Any, num: Any, den: Any, top: Any) -> Any:
        k, v, r = tf.split(x @ w, 3, 1)
        high = tf.maximum(top, bonus + k)
        a, b = tf.exp(top - high), tf.exp(bonus + k - high)
        out = sigmoid(r) * (a * num + b * v) / (a * den + b + 1e-6)
        high = tf.maximum(top - tf.exp(decay), k)
        a, b = tf.exp(top - tf.exp(decay) - high), tf.exp(k - high)
        return out, (a * num + b * v, a * den + b, high)

    return step


def world_model(kit: Kit) -> Step:
    """RSSM: a deterministic and a stochastic state of other widths."""
    inner, cell, prior = dense(kit, 5 + INPUTS, UNITS), gates(kit, 3, state=2 * UNITS), dense(kit, UNITS, 10)

    def step(x: Any, h: Any, z: Any) -> Any:
        a = tf.nn.elu(inner(joined(z, x)))
        r, g, u = cell(x, joined(a, h))
        u = sigmoid(u - 1.0)
        h = u * tanh(sigmoid(r) * g) + (1.0 - u) * h
        mean, deviation = tf.split(prior(h), 2, 1)
        z = mean + tf.nn.softplus(deviation) * 0.1
        return joined(h, z), (h, z)

    return step


def variational(kit: Kit) -> Step:
    """VRNN, with noise that is given: the latent is narrower than the state."""
    encoder, prior, decoder = dense(kit, INPUTS + UNITS, 4), dense(kit, UNITS, 4), dense(kit, 2 + UNITS, INPUTS)
    cell = gates(kit, 2, state=UNITS + 2)

    def step(x: Any, h: Any) -> Any:
        mean, log = tf.split(encoder(joined(x, h)), 2, 1)
        before, log_before = tf.split(prior(h), 2, 1)
        z = mean + tf.exp(0.5 * log) * 0.3
        distance = 0.5 * (log_before - log + (tf.exp(log) + (mean - before) ** 2) / tf.exp(log_before) - 1.0)
        g, c = cell(x, joined(h, z))
        h = sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)
        return joined(decoder(joined(z, h)), distance), (h,)

    return step


def forecast(kit: Kit) -> Step:
    """The forecast is fed back as an input."""
    cell, head = gates(kit, 2, state=UNITS + 2), dense(kit, UNITS, 2)

    def step(x: Any, h: Any, y: Any) -> Any:
        g, c = cell(x, joined(h, y))
        h = sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)
        y = y + head(h)
        return y, (h, y)

    return step


def greedy(kit: Kit) -> Run:
    """Greedy decoding: the embedding of the most probable token is the next input."""
    table, cell, head = kit.weight(7, INPUTS), gates(kit, 2), dense(kit, UNITS, 7)

    def run(x: Any) -> Any:
        def body(i: Any, token: Any, h: Any, array: Any) -> Any:
            g, c = cell(tf.gather(table, token), h)
            h = sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)
            logits = head(h)
            return i + 1, tf.argmax(logits, 1, tf.int32), h, array.write(i, logits)

        start = (0, tf.zeros([ROWS], tf.int32), tf.reduce_mean(x, 1) @ tf.ones([INPUTS, UNITS]))
        return tf.while_loop(lambda i, *_: i < STEPS, body, (*start, tf.TensorArray(tf.float32, STEPS)))[3].stack()

    return run


def until_ended(kit: Kit) -> Run:
    """Greedy decoding that ends when all rows have ended."""
    table, cell, head = kit.weight(7, INPUTS), gates(kit, 2), dense(kit, UNITS, 7)

    def run(x: Any) -> Any:
        def body(i: Any, ended: Any, token: Any, h: Any) -> Any:
            g, c = cell(tf.gather(table, token), h)
            h = sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)
            token = tf.argmax(head(h), 1, tf.int32)
            return i + 1, tf.logical_or(ended, tf.equal(token, 1)), token, h

        start = (
            0,
            tf.zeros([ROWS], tf.bool),
            tf.zeros([ROWS], tf.int32),
            tf.reduce_mean(x, 1) @ tf.ones([INPUTS, UNITS]),
        )
        goes_on = lambda i, ended, *_: (i < STEPS) & ~tf.reduce_all(ended)  # noqa: E731
        return tf.while_loop(goes_on, body, start)[3]

    return run


def sampled(kit: Kit) -> Run:
    """Each step adds noise by a seed that counts steps."""
    cell = gates(kit, 2)

    def run(x: Any) -> Any:
        items = time_major(x)

        def body(i: Any, h: Any) -> Any:
            g, c = cell(items[i], h)
            noise = tf.random.stateless_normal([ROWS, UNITS], tf.stack([i, 5]))
            return i + 1, sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c) + 0.1 * noise

        return tf.while_loop(lambda i, _: i < STEPS, body, (0, tf.zeros([ROWS, UNITS])))[1]

    return run


def counted_rows(kit: Kit) -> Run:
    """A counter of how often each row was active, beside the state."""
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)

    def run(x: Any) -> Any:
        items = time_major(x)

        def body(i: Any, h: Any, active: Any, total: Any) -> Any:
            h = tanh(items[i] @ w + h @ r)
            now = tf.reduce_mean(h, 1) > 0.0
            return i + 1, h, active + tf.cast(now, tf.int32), total + i

        start = (0, tf.zeros([ROWS, UNITS]), tf.zeros([ROWS], tf.int32), tf.constant(0))
        return tf.while_loop(lambda i, *_: i < STEPS, body, start)[1:]

    return run


def attention(score: str) -> Maker:
    """A decoder that attends to the encoder's outputs."""

    def made(kit: Kit) -> Run:
        query, memory, v = kit.weight(UNITS, UNITS), kit.weight(INPUTS, UNITS), kit.weight(UNITS)
        cell = gates(kit, 2, state=UNITS + INPUTS)

        def run(x: Any) -> Any:
            keys, items = x @ memory, time_major(x)

            def body(i: Any, h: Any, context: Any, weights: Any) -> Any:
                q = h @ query
                if score == "bahdanau":
                    scores = tf.reduce_sum(v * tanh(keys + q[:, None]), 2)
                elif score == "luong":
                    scores = tf.einsum("btu,bu->bt", keys, q)
                else:  # Tacotron: what was attended before counts
                    scores = tf.reduce_sum(v * tanh(keys + q[:, None] + weights[:, :, None]), 2)
                now = tf.nn.softmax(scores)
                context = tf.einsum("bt,bti->bi", now, x)
                g, c = cell(items[i], joined(h, context))
                return i + 1, sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c), context, weights + now

            start = (0, tf.zeros([ROWS, UNITS]), tf.zeros([ROWS, INPUTS]), tf.zeros([ROWS, STEPS]))
            return tf.while_loop(lambda i, *_: i < STEPS, body, start)[1]

        return run

    return made


def diffusion(kit: Kit) -> Run:
    """DCRNN: a GRU on the nodes of a graph."""
    w, r, graph = (
        kit.weight(1, 2 * ORDER),
        kit.weight(2 * ORDER, 2 * ORDER),
        tf.constant(kit.numbers(INPUTS, INPUTS) * 0.3),
    )

    def run(x: Any) -> Any:
        items = time_major(x)

        def body(i: Any, h: Any) -> Any:
            spread = tf.einsum("nm,bmu->bnu", graph, h)
            g, c = tf.split(tf.einsum("bnu,uv->bnv", tf.concat([h, spread], 2), r) + items[i][:, :, None] * w[0], 2, 2)
            return i + 1, sigmoid(g) * h + (1.0 - sigmoid(g)) * tanh(c)

        return tf.while_loop(lambda i, _: i < STEPS, body, (0, tf.zeros([ROWS, INPUTS, ORDER])))[1]

    return run


FORMS: dict[str, Maker] = {
    "LMU": form(by_keras, (UNITS, ORDER), legendre),
    "LTC": form(by_keras, (UNITS,), time_constant),
    "CfC": form(by_scan, (UNITS,), closed_form),
    "CfC with a backbone": form(by_keras, (UNITS,), closed_form_backbone),
    "ODE-RNN with an inner loop": form(by_while, (UNITS,), ode),
    "complex state as two real ones": form(by_scan, (UNITS, UNITS), rotation),
    "complex state": complex_rotation,
    "Mamba": selective,
    "linear attention": fast_weights,
    "RWKV": form(by_while, (UNITS, UNITS, UNITS), rwkv),
    "RSSM": form(by_scan, (UNITS, 5), world_model, UNITS + 5),
    "VRNN": form(by_while, (UNITS,), variational, INPUTS + 2),
    "forecast feedback": form(by_for, (UNITS, 2), forecast, 2),
    "greedy decoding": greedy,
    "greedy decoding until all rows ended": until_ended,
    "noise by a seed that counts": sampled,
    "int states, scalar and per row": counted_rows,
    "attention decoder, Bahdanau": attention("bahdanau"),
    "attention decoder, Luong": attention("luong"),
    "attention decoder, Tacotron": attention("tacotron"),
    "DCRNN": diffusion,
}
