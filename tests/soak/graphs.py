"""The training steps that `tests.soak` starts from: small, but with every kind of node that real ones have.

Each is a graph with placeholders (fed with `feeds`), "loss", the op "train" and, if it has variables, "initialize"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
RATE = 0.05


def variable(name: str, shape: Sequence[int], resource: bool = True) -> Any:
    """A weight with the same value each time."""
    values = np.random.default_rng(len(name)).normal(scale=0.2, size=shape).astype("float32")
    return v1.get_variable(name, initializer=values, use_resource=resource)


def finish(loss: Any, more: Sequence[Any] = ()) -> None:
    """The ops that every graph has."""
    weights = v1.trainable_variables()
    gradients = tf.tuple(tf.gradients(loss, weights))  # no weight is written before all are read
    updates = [v1.assign_sub(weight, RATE * gradient) for weight, gradient in zip(weights, gradients, strict=True)]
    tf.identity(loss, name="loss")
    with tf.control_dependencies([*updates, *more]):
        tf.no_op(name="train")
    v1.variables_initializer(v1.global_variables(), name="initialize")


def convolutions(resource: bool = True) -> None:
    """A small CNN with batch normalisation, pooling and a residual."""
    x = v1.placeholder(tf.float32, [8, 24, 24, 3], "x")
    labels = v1.placeholder(tf.int32, [8], "labels")
    y, updates = x, []
    for layer, (before, after) in enumerate([(3, 8), (8, 8), (8, 8)]):
        y = tf.nn.conv2d(y, variable(f"filter{layer}", [3, 3, before, after], resource), 1, "SAME")
        y = tf.nn.bias_add(y, variable(f"bias{layer}", [after], resource))
        y, mean, _, *_ = v1.nn.fused_batch_norm(
            y, variable(f"scale{layer}", [after], resource), variable(f"offset{layer}", [after], resource)
        )
        updates.append(mean.op)
        y = tf.nn.relu(y) if layer else tf.nn.relu(y) + tf.reduce_mean(x)
    y = tf.nn.max_pool2d(y, 2, 2, "VALID")
    logits = tf.reshape(y, [8, -1]) @ variable("dense", [12 * 12 * 8, 5], resource)
    finish(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)), updates)


def reference_variables() -> None:
    """The graph of `variables` with the variables of TensorFlow 1."""
    convolutions(resource=False)


def lstm() -> None:
    """An LSTM as a `tf.while_loop`, and its gradient."""
    units, time, batch = 16, 8, 16
    x = v1.placeholder(tf.float32, [time, batch, 5], "x")
    kernel, recurrent = variable("kernel", [5, 4 * units]), variable("recurrent_kernel", [units, 4 * units])
    bias = variable("bias_of_gates", [4 * units])

    def body(step: Any, state: Any, carry: Any, outputs: Any) -> Any:
        gates = tf.gather(x, step) @ kernel + state @ recurrent + bias
        i, f, g, o = tf.split(gates, 4, axis=1)
        carry = tf.sigmoid(f) * carry + tf.sigmoid(i) * tf.tanh(g)
        state = tf.sigmoid(o) * tf.tanh(carry)
        return step + 1, state, carry, outputs.write(step, state)

    zeros = tf.zeros([batch, units])
    outputs = tf.TensorArray(tf.float32, time, element_shape=[batch, units])
    *_, outputs = tf.while_loop(lambda step, *_: step < time, body, (0, zeros, zeros, outputs))
    finish(tf.reduce_mean(outputs.stack() ** 2))


def lowered_lstm() -> None:
    """The LSTM as a cycle of Enter, Merge and Switch."""
    v1.disable_control_flow_v2()
    try:
        lstm()
    finally:
        v1.enable_control_flow_v2()


def gru_inference() -> None:
    """A GRU without training, its step a function that the loop calls."""
    x = v1.placeholder(tf.float32, [4, 6, 5], "x")
    dice = np.random.default_rng(0)
    sizes = ([5, 24], [8, 24], [24])
    kernel, recurrent, bias = (tf.constant(dice.normal(scale=0.3, size=size).astype("float32")) for size in sizes)

    @tf.function(autograph=False)
    def step(row: Any, state: Any) -> Any:
        z, r, h = tf.split(row @ kernel + bias, 3, axis=1)
        uz, ur, uh = tf.split(recurrent, 3, axis=1)
        z, r = tf.sigmoid(z + state @ uz), tf.sigmoid(r + state @ ur)
        return z * state + (1 - z) * tf.tanh(h + (r * state) @ uh)

    rows = tf.transpose(x, [1, 0, 2])
    state = tf.zeros([4, 8])
    *_, last = tf.while_loop(lambda t, _: t < 6, lambda t, s: (t + 1, step(rows[t], s)), (tf.constant(0), state))
    tf.reduce_mean(last, name="loss")
    tf.no_op(name="train")


def attention() -> None:
    """A block of a transformer: einsums, softmax, layer normalisation, a stateless mask for dropout."""
    x = v1.placeholder(tf.float32, [4, 64, 32], "x")
    query, key, value = (tf.einsum("bth,hnd->bntd", x, variable(name, [32, 2, 16])) for name in ("q", "k_", "v__"))
    scores = tf.nn.softmax(tf.einsum("bntd,bnsd->bnts", query, key) / 4.0)
    mixed = tf.einsum("bnts,bnsd->btnd", scores, value)
    y = x + tf.reshape(mixed, [4, 64, 32]) @ variable("projection", [32, 32])
    mean, spread = tf.nn.moments(y, [-1], keepdims=True)
    y = (y - mean) * tf.math.rsqrt(spread + 1e-6) * variable("gain", [32])
    mask = tf.cast(tf.random.stateless_uniform([4, 64, 64], [1, 2]) > 0.1, tf.float32)
    y = y + (tf.nn.gelu(y @ variable("up_projection", [32, 64])) * mask) @ variable("down_projection", [64, 32])
    finish(tf.reduce_mean(y**2))


def adversarial() -> None:
    """Two nets and two sets of updates in one step, with noise."""
    x = v1.placeholder(tf.float32, [256, 12], "x")
    noise = tf.random.stateless_normal([256, 6], [3, 4])
    made = tf.tanh(tf.nn.relu(noise @ variable("make1", [6, 96])) @ variable("make22", [96, 12]))

    def judge(data: Any) -> Any:
        with v1.variable_scope("judge", reuse=v1.AUTO_REUSE):
            hidden = tf.nn.leaky_relu(data @ variable("first", [12, 96]))
            return hidden @ variable("second_", [96, 1])

    real, fake = judge(x), judge(made)
    loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(fake))
    other = tf.reduce_mean(tf.nn.softplus(-fake))
    mine = [weight for weight in v1.trainable_variables() if weight.name.startswith("judge")]
    rest = [weight for weight in v1.trainable_variables() if not weight.name.startswith("judge")]
    updates = [
        v1.assign_sub(weight, RATE * gradient)
        for target, weights in ((loss, mine), (other, rest))
        for weight, gradient in zip(weights, tf.gradients(target, weights), strict=True)
    ]
    tf.identity(loss + other, name="loss")
    with tf.control_dependencies(updates):
        tf.no_op(name="train")
    v1.variables_initializer(v1.global_variables(), name="initialize")


def branches() -> None:
    """A condition and a case, calls of functions in functions, and a gradient through them."""
    x = v1.placeholder(tf.float32, [256, 80], "x")
    weight, other = variable("weight", [80, 80]), variable("other_weight", [80, 80])

    @tf.function(autograph=False)
    def inner(data: Any) -> Any:
        return tf.nn.relu(data @ weight)

    @tf.function(autograph=False)
    def outer(data: Any) -> Any:
        return inner(inner(data)) + inner(data)

    y = tf.cond(tf.reduce_sum(x) > 0, lambda: outer(x), lambda: tf.tanh(x @ other))
    y += tf.switch_case(tf.cast(tf.size(x), tf.int32) % 3, [lambda: y * 2, lambda: inner(y), lambda: y])
    finish(tf.reduce_mean(y**2))


def odds() -> None:
    """What training steps have besides: strings, lookups, sparse gradients, asserts, queues of shapes, other dtypes."""
    indices = v1.placeholder(tf.int32, [6], "x")
    table = variable("table", [20, 8])
    rows = tf.nn.embedding_lookup(table, indices)
    text = tf.strings.as_string(indices)
    lengths = tf.cast(tf.strings.length(text), tf.float32)
    half = tf.cast(tf.cast(rows, tf.bfloat16) * 2, tf.float32)
    parts = tf.unstack(half, axis=0)
    y = tf.stack(parts[::-1]) * lengths[:, None]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(indices >= 0), [indices])]):
        y = tf.concat([y, tf.pad(y, [[0, 0], [1, 1]])[:, 1:9]], axis=1)
    values, _ = tf.math.top_k(y, 3)
    y = tf.where(y > 0, y, tf.zeros_like(y)) + tf.reduce_sum(values) + tf.cast(tf.shape(y)[0], tf.float32)
    gradient = tf.gradients(tf.reduce_mean(y), table)[0]
    update = v1.scatter_sub(table, gradient.indices, RATE * gradient.values)
    tf.reduce_mean(y, name="loss")
    with tf.control_dependencies([update]):
        tf.no_op(name="train")
    v1.variables_initializer(v1.global_variables(), name="initialize")


GRAPHS: Mapping[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        convolutions,
        reference_variables,
        lstm,
        lowered_lstm,
        gru_inference,
        attention,
        adversarial,
        branches,
        odds,
    )
}


# KiB: the smallest budget that there is a plan for, and what the step takes if nothing moves; about
NEEDED = {
    "convolutions": (897, 1330),
    "reference_variables": (897, 1330),
    "lstm": (20, 140),
    "lowered_lstm": (20, 140),
    "gru_inference": (2, 7),
    "attention": (650, 900),
    "adversarial": (337, 530),
    "branches": (300, 600),
    "odds": (1, 4),
}


def graph_defs() -> dict[str, Any]:
    """Every graph as a GraphDef, by name."""
    found = {}
    for name, build in GRAPHS.items():
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(1)
            build()
        found[name] = graph.as_graph_def()
    return found


def feeds(graph: Any) -> dict[str, Any]:
    """Numbers for the placeholders of an imported graph, as far as their shapes are known."""
    found = {}
    for op in graph.get_operations():
        if op.type != "Placeholder":
            continue
        tensor = op.outputs[0]
        shape = [dim if dim is not None else 2 for dim in (tensor.shape.as_list() if tensor.shape.rank else [])]
        if tensor.dtype.is_floating and np.prod(shape, dtype=float) < 1e6:
            found[tensor.name] = np.random.default_rng(0).normal(size=shape).astype(tensor.dtype.as_numpy_dtype)
        elif tensor.dtype.is_integer and np.prod(shape, dtype=float) < 1e6:
            found[tensor.name] = np.arange(int(np.prod(shape))).reshape(shape).astype(tensor.dtype.as_numpy_dtype) % 5
    return found
