"""Real numbers of nodes: features, targets and vectors of layers below; kinds with any number of children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tf.dynamic_inputs_net import (
    FEATURES,
    RANDOM,
    ROWS,
    TARGETS,
    TREES,
    WIDTH,
    Net,
    batch,
    expected,
    given,
)
from tfmem import dynamic


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(tf.convert_to_tensor(found), tf.convert_to_tensor(wanted), rtol=2e-4, atol=2e-4)


def test_features_and_targets_have_gradients() -> None:
    """In any form: all rows, padded ones of each example, and ragged ones."""
    net = Net()
    handle = net.specialize()
    features, targets = given()
    losses, gradients = expected(net, features, targets, [*net.weights, features, targets])
    padded = np.full([3, 6, FEATURES], np.nan, np.float32)
    for at, rows in enumerate(ROWS):
        padded[at, : len(rows)] = rows
    ragged = tf.RaggedTensor.from_row_lengths(features, [len(rows) for rows in ROWS])
    of_examples = tf.reshape(targets, [3, 2, TARGETS])
    for whole, inputs in ((True, [features, targets]), (False, [padded, of_examples]), (False, [ragged, of_examples])):
        found = handle.forward_backward(batch(handle, whole), inputs=inputs)
        close(found.losses, losses)
        for mine, theirs in zip(found.gradients[:3], gradients[:3], strict=True):
            close(mine, theirs)
        if whole:
            close(found.gradients[3], gradients[3])
            close(found.gradients[4], gradients[4])


def test_a_layer_below_is_trained_through_the_net() -> None:
    net = Net()
    handle = net.specialize()
    features, targets = given()
    below = tf.Variable(RANDOM.normal(size=[FEATURES, FEATURES]).astype(np.float32))
    with tf.GradientTape() as tape:
        found = handle.forward(batch(handle, True), inputs=[tf.tanh(features @ below), targets], training=True)
        total = tf.reduce_sum(found.losses)
    with tf.GradientTape() as plain:
        rows = tf.tanh(features @ below)
        losses = [
            net.loss(tree, rows[start : start + len(ROWS[at])], targets[2 * at : 2 * at + 2])
            for at, (tree, start) in enumerate(zip(TREES, (0, 6, 9), strict=True))
        ]
        wanted = tf.add_n(losses)
    close(total, wanted)
    close(tape.gradient(total, below), plain.gradient(wanted, below))


@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_reads_other_rows_each_time(in_graph: bool) -> None:
    net, other = Net(), Net()
    handle = net.specialize(optimizer=dynamic.SGD(0.01))
    features, targets = given()
    step: Any = lambda rows: handle.step(batch(handle, True), inputs=[rows, targets]).losses  # noqa: E731
    if in_graph:
        made = batch(handle, True)
        step = tf.function(lambda rows: handle.step(made, inputs=[rows, targets]).losses)
    for scale in (1.0, 0.5):
        losses, gradients = expected(other, features * scale, targets, other.weights)
        close(step(features * scale), losses)
        for weight, gradient in zip(other.weights, gradients, strict=True):
            weight.assign_sub(0.01 * gradient)
    for mine, theirs in zip(net.weights, other.weights, strict=True):
        close(mine, theirs)


def test_rows_that_there_are_not_are_refused() -> None:
    net = Net()
    handle = net.specialize(optimizer=dynamic.SGD())
    features, targets = given()
    for call in (handle.forward, handle.forward_backward, handle.step):
        with pytest.raises(tf.errors.InvalidArgumentError, match="row 12 of input 3, which has 12 rows in this batch"):
            call(batch(handle, True), inputs=[features[:12], targets])
    with pytest.raises(dynamic.DynamicError, match=r"inputs has 1 tensors; expected 2"):
        handle.forward(batch(handle, True), inputs=[features])
    with pytest.raises(dynamic.DynamicError, match=r"input 'targets.*expected float32 \[rows, 3\]"):
        handle.forward(batch(handle, True), inputs=[features, features])
    with pytest.raises(dynamic.DynamicError, match=r"'inner', ...\) got 0 children; expected range\(1, 5\)"):
        handle.node("inner", 0)
    assert handle.number_of("inner", 2) == 2
    wrong = dynamic.inputs(4, "rows")
    with pytest.raises(dynamic.DynamicError, match=r"input 'rows.*has other rows in each batch"):
        dynamic.specialize([wrong], {"x": dynamic.node(lambda children: dynamic.matvec(wrong, dynamic.constant(1.0)))})


@pytest.mark.long
def test_optimizers_and_schedules_of_keras(tmp_path: Path) -> None:
    """Frozen parameters stay; a checkpoint goes on to the bit."""

    def made(optimizer: Any) -> tuple[Net, dynamic.Handle]:
        net = Net()
        net.encode = tf.Variable(net.encode, trainable=False, name="encode")
        return net, net.specialize(optimizer=optimizer)

    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    features, targets = given()
    for ours, theirs in (
        (dynamic.SGD(schedule), keras.optimizers.SGD(schedule)),
        (dynamic.Adam(schedule), keras.optimizers.Adam(schedule)),
        (keras.optimizers.AdamW(schedule), keras.optimizers.AdamW(schedule)),
        (keras.optimizers.RMSprop(0.01), keras.optimizers.RMSprop(0.01)),
    ):
        net, handle = made(ours)
        plain, _ = made(None)
        theirs.build(plain.weights[1:])
        for _ in range(4):
            handle.step(batch(handle, True), inputs=[features, targets])
            _, gradients = expected(plain, features, targets, plain.weights[1:])
            theirs.apply_gradients(zip(gradients, plain.weights[1:], strict=True))
        for mine, wanted in zip(net.weights, plain.weights, strict=True):
            close(mine, wanted)
        saved = tf.train.Checkpoint(net=handle).save(str(tmp_path / type(ours).__name__))
        again, other = made(type(ours).from_config(ours.get_config()) if hasattr(ours, "get_config") else ours)
        tf.train.Checkpoint(net=other).restore(saved).assert_existing_objects_matched()
        for each in (handle, other):
            each.step(batch(each, True), inputs=[features, targets])
        for mine, wanted in zip(again.weights, net.weights, strict=True):
            np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("traced", [False, True])
def test_dropout_drops_in_training_alone(traced: bool) -> None:
    table = tf.Variable(tf.ones([3, 1000]))

    def function(children: Any, row: Any, *, training: Any) -> dynamic.Result:
        x = tf.gather(table, row) if traced else dynamic.embedding_lookup(table, row)
        if training:
            x = tf.nn.dropout(x, 0.25) if traced else dynamic.dropout(x, 0.25)
        return dynamic.Result(loss=tf.reduce_sum(x) if traced else dynamic.reduce_sum(x), outputs=x)

    handle = dynamic.specialize([table], {"row": (dynamic.trace if traced else dynamic.node)(function)})
    nodes = [handle.node("row", row) for row in range(3)]
    np.testing.assert_array_equal(handle.forward(nodes).losses, [1000.0] * 3)
    found = handle.forward_backward(nodes, seed=4)
    kept = found.outputs[0].numpy()
    assert set(np.unique(kept.round(4))) == {0.0, np.float32(1.3333)}
    assert np.all(abs((kept == 0).mean(1) - 0.25) < 0.05)
    np.testing.assert_allclose(tf.convert_to_tensor(found.gradients[0]), kept)  # which the gradient drops, too
    np.testing.assert_array_equal(kept, handle.forward_backward(nodes, seed=4).outputs[0])
    assert (kept != handle.forward_backward(nodes, seed=5).outputs[0].numpy()).any()


@keras.saving.register_keras_serializable(package="tfmem_tests")
def kinds_over_features(weights: Any) -> dict[str, dynamic.NodeKind]:
    def leaf(children: Any, row: Any) -> Any:
        return tf.tanh(tf.linalg.matvec(weights["encode"], tf.gather(weights["features"], row), transpose_a=True))

    return {
        "leaf": dynamic.trace(leaf),
        "sum": dynamic.trace(lambda children: tf.add_n(list(children)), children=range(1, 4)),
    }


@pytest.mark.long
def test_a_keras_layer_over_vectors_of_layers_below(tmp_path: Path) -> None:
    """Trained with the layers below and above, saved and loaded with the optimizer's state."""
    names = dynamic.Batch._fields
    given = {name: keras.Input([None], dtype="int32", name=name) for name in names}
    raw = keras.Input([None, FEATURES], name="raw")
    rows = keras.layers.Dense(5, activation="tanh")(raw)
    layer = dynamic.Layer({"encode": (5, WIDTH), "features": (None, 5)}, kinds_over_features, state=WIDTH)
    model = keras.Model({**given, "raw": raw}, keras.layers.Dense(1)(layer({**given, "features": rows})))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    count = layer.handle.number_of
    x = {
        "kinds": np.array([[0, 0, count("sum", 2)], [0, -1, -1]], np.int32),
        "children": np.array([[0, 1], [-1, -1]], np.int32),
        "arguments": np.array([[0, 2], [1, -1]], np.int32),
        "raw": RANDOM.normal(size=[2, 3, FEATURES]).astype(np.float32),
    }
    y = np.array([[1.0], [-1.0]], np.float32)
    before = [weight.numpy() for weight in model.trainable_weights]
    losses = model.fit(x, y, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.2 * losses[0]
    assert all((weight.numpy() != old).any() for weight, old in zip(model.trainable_weights, before, strict=True))
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    again = [each.fit(x, y, epochs=2, verbose=0).history["loss"] for each in (model, loaded)]
    assert again[0] == again[1]
