"""`tfmem.dynamic` against plain TensorFlow: losses, gradients, updates, threads, functions."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tiers import examples
from tfmem import dynamic


def as_arrays(gradients):
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def assert_like(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("hidden", "width"), [(16, 12), (7, 5), (70, 33), (1, 1)])
def test_losses_and_gradients_are_tensorflows(hidden, width):
    net = TreeLSTM(hidden=hidden, width=width)
    trees = random_trees(40, most=15)
    handle = net.specialize()
    outcome = handle.forward_backward([nodes(handle, tree) for tree in trees])
    losses, gradients = net.gradients(trees)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    assert_like(as_arrays(outcome.gradients), gradients)
    assert isinstance(outcome.gradients[0], tf.IndexedSlices)


def test_traced_kinds_are_the_same():
    net = TreeLSTM()

    def result(h, c, label):
        logits = tf.linalg.matvec(net.output_kernel, h) + net.output_bias
        return dynamic.Result((h, c), tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits), logits)

    def leaf(children, word, label):
        x = tf.nn.embedding_lookup(net.embedding, word)
        i, o, u = tf.split(tf.linalg.matvec(net.leaf_kernel, x) + net.leaf_bias, 3)
        c = tf.sigmoid(i) * tf.tanh(u)
        return result(tf.sigmoid(o) * tf.tanh(c), c, label)

    def pair(children, label):
        (left_h, left_c), (right_h, right_c) = children
        gates = tf.linalg.matvec(net.kernel, tf.concat([left_h, right_h], 0)) + net.bias
        i, f_left, f_right, o, u = tf.split(gates, 5)
        c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(f_left) * left_c + tf.sigmoid(f_right) * right_c
        return result(tf.sigmoid(o) * tf.tanh(c), c, label)

    kinds = {"leaf": dynamic.trace(leaf), "pair": dynamic.trace(pair, children=2)}
    traced = dynamic.specialize(net.parameters, kinds, state=(net.hidden, net.hidden))
    recorded = net.specialize()
    roots = [nodes(recorded, tree) for tree in random_trees(9)]
    found, expected = traced.forward_backward(roots), recorded.forward_backward(roots)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    assert_like(as_arrays(found.gradients), as_arrays(expected.gradients), 1e-6)
    np.testing.assert_allclose(found.outputs[0], expected.outputs[0], rtol=1e-6, atol=1e-6)


def test_a_recorded_graph_is_the_same():
    net = TreeLSTM()
    trees = random_trees(5, most=6)

    def walk(tree):
        if len(tree) == 2:
            result = net.leaf((), tree[1], tree[0])
            return (*result.state, result.loss)
        left, right = walk(tree[1]), walk(tree[2])
        result = net.pair((left[:2], right[:2]), tree[0])
        return (*result.state, left[2] + right[2] + result.loss)

    handle = dynamic.specialize(net.parameters)
    outcome = handle.forward_backward([walk(tree)[2] for tree in trees])
    losses, gradients = net.gradients(trees)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    assert_like(as_arrays(outcome.gradients), gradients)


def test_runs_are_equal_to_the_bit():
    net = TreeLSTM(hidden=64)
    handle = net.specialize()
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(200, most=30)])
    first = handle.forward_backward(batch)
    for _ in range(5):
        again = handle.forward_backward(batch)
        assert np.array_equal(first.losses, again.losses)
        for a, b in zip(as_arrays(first.gradients), as_arrays(again.gradients), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ours", "keras"),
    [
        (dynamic.SGD(0.05), lambda: tf.keras.optimizers.SGD(0.05)),
        (dynamic.SGD(0.02, momentum=0.9), lambda: tf.keras.optimizers.SGD(0.02, momentum=0.9)),
        (dynamic.Adam(0.01), lambda: tf.keras.optimizers.Adam(0.01)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_steps_are_eager_tensorflows(ours, keras):
    """Every word is in every batch, so that lazy updates of the table are not seen."""
    net, plain = TreeLSTM(words=3), TreeLSTM(words=3)
    trees = [tree for seed in range(4) for tree in random_trees(6, seed=seed, words=3)]
    handle, optimizer = net.specialize(optimizer=ours), keras()
    batch = handle.batch([nodes(handle, tree) for tree in trees[:12]])
    assert set(batch.arguments.flat_values.numpy().tolist()) >= {0, 1, 2}
    found, expected = [], []
    for _ in range(examples(50)):
        found.append(float(tf.reduce_sum(handle.step(batch).losses)))
        losses, gradients = plain.gradients(trees[:12])
        expected.append(sum(losses))
        optimizer.apply_gradients(zip(map(tf.constant, gradients), plain.parameters, strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found[-1] < 0.95 * found[0]


def test_loss_weights_scale_gradients():
    net = TreeLSTM()
    handle = net.specialize()
    trees = random_trees(3)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    weighted = handle.forward_backward(batch, loss_weights=tf.constant([0.0, 2.0, 0.0]))
    _, gradients = net.gradients(trees[1:2])
    assert_like(as_arrays(weighted.gradients), [2 * gradient for gradient in gradients])


def test_a_tape_differentiates_losses_and_states():
    net, handle = TreeLSTM(), TreeLSTM().specialize()
    handle = net.specialize()
    trees = random_trees(6)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    roots = batch.kinds.row_limits() - 1
    with tf.GradientTape() as tape:
        outcome = handle.forward(batch, training=True, states=True)
        h, c = (tf.gather(state, roots) for state in outcome.states)
        total = tf.reduce_sum(tf.sin(h) * 2 + c * h) + 0.5 * tf.reduce_sum(outcome.losses)
    found = tape.gradient(total, net.parameters)
    with tf.GradientTape() as tape:
        expected = 0.0
        for tree in trees:
            h, c, loss = net.walk(tree)
            expected += tf.reduce_sum(tf.sin(h) * 2 + c * h) + 0.5 * loss
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert_like(as_arrays(found), as_arrays(tape.gradient(expected, net.parameters)))


def test_autograph_translates_nothing_of_a_call(monkeypatch):
    """Else the first call of a user's function takes a second longer."""
    translated, translate = [], api._convert_actual

    def noticed(entity, context):
        translated.append(entity.__module__)
        return translate(entity, context)

    monkeypatch.setattr(api, "_convert_actual", noticed)
    handle = TreeLSTM().specialize(optimizer=dynamic.SGD(0.1))
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(3)])
    for call in (handle.forward_backward, handle.forward):
        tf.function(lambda call=call: call(batch).losses)()
    assert set(translated) == {__name__, dynamic.Handle.__module__}


def test_a_function_trains_with_batches_of_any_size():
    net = TreeLSTM()
    handle = net.specialize(optimizer=dynamic.Adam(0.01))
    integers = tf.RaggedTensorSpec([None, None], tf.int32)
    traces = []

    @tf.function(input_signature=[dynamic.Batch(integers, integers, integers)])
    def train(batch):
        traces.append(1)
        return tf.reduce_mean(handle.step(batch).losses)

    losses = []
    for _ in range(15):
        for first in (0, 7):
            roots = [nodes(handle, tree) for tree in random_trees(7 + first, seed=first)]
            losses.append(float(train(handle.batch(roots))))
    assert len(traces) == 1
    assert losses[-1] < losses[1]
    assert losses[-2] < losses[0]


@pytest.mark.long
def test_several_threads_and_handles():
    nets = [TreeLSTM(hidden=40, seed=seed) for seed in range(2)]
    handles = [net.specialize() for net in nets]
    trees = random_trees(60, most=20)
    expected = [net.gradients(trees)[0] for net in nets]
    failures = []

    def work(number):
        handle = handles[number % 2]
        batch = handle.batch([nodes(handle, tree) for tree in trees])
        for _ in range(5):
            losses = handle.forward_backward(batch).losses
            if not np.allclose(losses, expected[number % 2], rtol=1e-5):
                failures.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_nan_propagates():
    net = TreeLSTM()
    net.embedding.assign(tf.tensor_scatter_nd_update(net.embedding, [[3]], [[float("nan")] * net.width]))
    handle = net.specialize()
    outcome = handle.forward_backward([handle.node("leaf", 3, 0), handle.node("leaf", 4, 0)])
    assert np.isnan(outcome.losses[0])
    assert np.isfinite(outcome.losses[1])
    assert np.isnan(as_arrays(outcome.gradients)[1]).all()


def test_a_node_with_two_parents_gets_both_gradients():
    net = TreeLSTM()
    handle = net.specialize()
    shared = handle.node("leaf", 1, 2)
    outcome = handle.forward_backward([handle.node("pair", shared, shared, 3)])
    _, gradients = net.gradients([(3, (2, 1), (2, 1))])
    once, _ = net.gradients([(2, 1)])
    # twice in the tree, once in the graph: the loss of the leaf counts once
    losses, _ = net.gradients([(3, (2, 1), (2, 1))])
    np.testing.assert_allclose(outcome.losses, [losses[0] - once[0]], rtol=1e-5)
    np.testing.assert_allclose(as_arrays(outcome.gradients)[3], gradients[3], rtol=1e-4, atol=1e-6)


def _parts_of(handle):
    def step(batch, **options):
        outcome = handle.step(batch, **options)
        return outcome.losses, outcome.outputs[0]

    return step


@pytest.mark.parametrize("weighted", [False, True])
def test_an_eager_step_is_that_of_a_function(weighted):
    nets = [TreeLSTM(), TreeLSTM()]
    handles = [net.specialize(optimizer=dynamic.Adam(0.01)) for net in nets]
    compiled = tf.function(_parts_of(handles[1]))
    for number, count in enumerate((3, 1, 4)):
        trees = random_trees(count, seed=number)
        batch = handles[0].batch([nodes(handles[0], tree) for tree in trees])
        more = {"loss_weights": tf.linspace(0.5, 2.0, count), "seed": number} if weighted else {}
        for one, other in zip(_parts_of(handles[0])(batch, **more), compiled(batch, **more), strict=True):
            np.testing.assert_array_equal(one, other)
        # splits of 32 bits, which have a separate trace
        short = dynamic.Batch(*(part.with_row_splits_dtype(tf.int32) for part in batch))
        np.testing.assert_array_equal(handles[0].step(short, **more).losses, compiled(batch, **more)[0])
    for one, other in zip(*(net.parameters for net in nets), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_forward_pass_alone_keeps_nothing_for_a_gradient():
    net = TreeLSTM(hidden=24)
    handle = net.specialize()
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(30)])
    with tf.GradientTape() as tape:
        kept = handle.forward(batch, training=True, states=True)
    alone = handle.forward(batch, states=True)
    assert tape.gradient(kept.losses, net.parameters[1]) is not None
    np.testing.assert_array_equal(alone.losses, kept.losses)
    for one, other in zip(alone.outputs + alone.states, kept.outputs + kept.states, strict=True):
        np.testing.assert_array_equal(one, other)
    text = handle.spec.forward_only.text
    assert "adjoint" not in text
    assert "put_child" not in text
    widths = [
        sum(int(word) for line in each.splitlines() if line.startswith("kept ") for word in line.split()[1:])
        for each in (handle.text, text)
    ]
    # of the forward pass only what a section leaves to the next
    assert widths[1] < widths[0] / 3
