"""`tfmem.dynamic.Layer` in Keras, and handles in SavedModels."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_tree
from tests.tf.python_server import run_python
from tfmem import dynamic
from tfmem.dynamic.batch import flatten

WORDS, WIDTH = 6, 8
INTEGERS = {"kinds": tf.int32, "children": tf.int32, "arguments": tf.int32}


@keras.saving.register_keras_serializable(package="test_dynamic_keras")
def kinds(weights):
    def leaf(children, word):
        return dynamic.dropout(dynamic.embedding_lookup(weights["table"], word), 0.1)

    def pair(children):
        return dynamic.tanh(dynamic.affine(weights["kernel"], dynamic.concat(children), weights["bias"]))

    return {"leaf": dynamic.node(leaf), "pair": dynamic.node(pair, children=2)}


@keras.saving.register_keras_serializable(package="test_dynamic_keras")
def kinds_without_dropout(weights):
    return {
        **kinds(weights),
        "leaf": dynamic.node(lambda children, word: dynamic.embedding_lookup(weights["table"], word)),
    }


def layer(makes_kinds=kinds):
    shapes = {"table": (WORDS, WIDTH), "kernel": (WIDTH, 2 * WIDTH), "bias": (WIDTH,)}
    return dynamic.Layer(shapes, makes_kinds, state=WIDTH)


def examples(count):
    """Trees, with label 1 if their last word is among the first three."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        kinds, children, arguments = [], [], []
        top = -1
        for position in range(int(random.integers(1, 6))):
            kinds.append(0)
            arguments.append(int(random.integers(WORDS)))
            if position:
                children += [top, len(kinds) - 1]
                kinds.append(1)
            top = len(kinds) - 1
        found.append(({"kinds": kinds, "children": children, "arguments": arguments}, int(arguments[-1] < 3)))
    return found


@pytest.mark.parametrize("ragged", [False, True])
def test_fit_trains_an_encoder_under_dense_layers(ragged):
    keras.utils.set_random_seed(0)
    given = examples(96)
    signature = ({name: tf.TensorSpec([None], dtype) for name, dtype in INTEGERS.items()}, tf.TensorSpec([], tf.int32))
    trees = tf.data.Dataset.from_generator(lambda: iter(given), output_signature=signature)
    padding = (dict.fromkeys(INTEGERS, -1), 0)
    batches = trees.ragged_batch(16) if ragged else trees.padded_batch(16, padding_values=padding)
    inputs = {name: keras.Input([None], dtype="int32", name=name, ragged=ragged) for name in INTEGERS}
    encoder = layer()
    model = keras.Model(inputs, keras.layers.Dense(2)(encoder(inputs)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.03), loss, metrics=["accuracy"])
    history = model.fit(batches, epochs=12, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert model.evaluate(batches, verbose=0)[1] > 0.9
    assert len(encoder.trainable_variables) == 3


def model_of(*layers_above, makes_kinds=kinds):
    inputs = {name: keras.Input([None], dtype="int32", name=name) for name in INTEGERS}
    result = layer(makes_kinds)(inputs)
    for above in layers_above:
        result = above(result)
    model = keras.Model(inputs, result)
    model.compile(keras.optimizers.Adam(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def padded(count):
    given = examples(count)
    signature = ({name: tf.TensorSpec([None], dtype) for name, dtype in INTEGERS.items()}, tf.TensorSpec([], tf.int32))
    trees = tf.data.Dataset.from_generator(lambda: iter(given), output_signature=signature)
    return trees.padded_batch(16, padding_values=(dict.fromkeys(INTEGERS, -1), 0))


def test_a_loaded_model_predicts_and_trains_on(tmp_path):
    """With the moments of the optimizer; but not with the seeds of dropout, which Keras saves of no layer."""
    keras.utils.set_random_seed(0)
    model, batches = model_of(keras.layers.Dense(2), makes_kinds=kinds_without_dropout), padded(48)
    model.fit(batches, epochs=2, verbose=0)
    model.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    np.testing.assert_array_equal(loaded.predict(batches, verbose=0), model.predict(batches, verbose=0))
    histories = [each.fit(batches, epochs=3, verbose=0).history["loss"] for each in (model, loaded)]
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-6)


def test_another_process_loads_a_model(tmp_path):
    """It imports the module that registers the kinds."""
    model, batches = model_of(), padded(16)
    model.save(tmp_path / "net.keras")
    np.savez(tmp_path / "batch.npz", **next(iter(batches))[0])
    (tmp_path / "load.py").write_text(
        "import keras, numpy as np, tests.tf.test_dynamic_keras\n"
        "print(keras.saving.load_model('net.keras').predict(dict(np.load('batch.npz')), verbose=0).tolist())\n"
    )
    found = run_python(["load.py"], cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    expected = model.predict(next(iter(batches))[0], verbose=0)
    np.testing.assert_allclose(json.loads(found.stdout), expected, rtol=1e-6)


def test_a_cloned_model_has_weights_of_its_own():
    model = model_of(keras.layers.Dense(2))
    clone = keras.models.clone_model(model)
    assert [weight.shape for weight in clone.weights] == [weight.shape for weight in model.weights]
    before = model.get_weights()
    clone.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    clone.fit(padded(16), verbose=0)
    for weight, known in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, known)


def test_a_layer_is_made_again_from_its_configuration():
    shapes = {"table": (WORDS, WIDTH), "kernel": (WIDTH, 2 * WIDTH), "bias": [WIDTH]}
    encoder = dynamic.Layer(
        shapes, functools.partial(kinds), state=(WIDTH,), initializer=keras.initializers.Constant(0.5), name="net"
    )
    again = dynamic.Layer.from_config(encoder.get_config())
    assert again.get_config() == encoder.get_config()
    assert again.name == "net"
    assert again.handle.text == encoder.handle.text
    np.testing.assert_array_equal(again.handle.parameters[0], np.full([WORDS, WIDTH], 0.5))
    assert again.handle.parameters[0] is not encoder.handle.parameters[0]


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "dynamic.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {"__name__": "example"}
    exec(compile(example, "docs/dynamic.md", "exec"), names)
    losses = names["history"].history["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert names["loaded"].evaluate(names["batches"], verbose=0) < losses[-1]


def test_losses_of_nodes_are_added():
    net = TreeLSTM()

    def of_tree_lstm(weights):
        net.embedding, net.leaf_kernel, net.leaf_bias, net.kernel, net.bias = list(weights.values())[:5]
        net.output_kernel, net.output_bias = list(weights.values())[5:]
        return {"leaf": dynamic.node(net.leaf), "pair": dynamic.node(net.pair, children=2)}

    shapes = {str(number): parameter.shape.as_list() for number, parameter in enumerate(net.parameters)}
    encoder = dynamic.Layer(shapes, of_tree_lstm, state=(net.hidden, net.hidden))
    trees = [random_tree(np.random.default_rng(seed), 4) for seed in range(3)]
    roots = encoder(encoder.handle.batch([nodes(encoder.handle, tree) for tree in trees]))
    walked = [net.walk(tree) for tree in trees]
    np.testing.assert_allclose(roots, [h for h, _, _ in walked], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(encoder.losses, [np.mean([loss for _, _, loss in walked])], rtol=1e-5)


def test_dropout_drops_in_training_alone():
    encoder = layer()
    batch = encoder.handle.batch([([0], [], [3])] * 40)
    row = encoder.handle.parameters[0].numpy()[3]
    np.testing.assert_array_equal(encoder(batch), np.tile(row, [40, 1]))
    drawn = encoder.handle.forward(batch, training=True, states=True, seed=1).states[0].numpy()
    again = encoder.handle.forward(batch, training=True, states=True, seed=1).states[0].numpy()
    np.testing.assert_array_equal(drawn, again)
    assert 0.02 < np.mean(drawn == 0) < 0.25
    np.testing.assert_allclose(drawn[drawn != 0], np.tile(row, [40, 1])[drawn != 0] / 0.9, rtol=1e-6)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(encoder.handle.forward(batch, training=True, states=True, seed=1).states[0])
    gradient = tf.convert_to_tensor(tape.gradient(total, encoder.handle.parameters[0])).numpy()
    np.testing.assert_allclose(gradient[3], np.sum(drawn != 0, 0) / 0.9, rtol=1e-5)


def test_each_call_in_training_drops_other_positions():
    encoder = layer()
    batch = encoder.handle.batch([([0], [], [3])] * 40)
    kept = [encoder(batch, training=True).numpy() != 0 for _ in range(2)]
    assert (kept[0] != kept[1]).any()


def test_dropout_that_is_recorded_drops_in_training_alone():
    table = tf.Variable(tf.ones([WORDS, WIDTH]))
    handle = dynamic.specialize([table])

    def loss(word):
        return dynamic.reduce_sum(dynamic.dropout(dynamic.embedding_lookup(table, word), 0.5))

    batch = handle.batch([loss(word % WORDS) for word in range(40)])
    assert (handle.forward(batch).losses.numpy() == WIDTH).all()
    assert np.ptp(handle.forward(batch, training=True, seed=1).losses) > 0


def test_a_saved_model_serves_graphs_and_trains_on(tmp_path):
    net = TreeLSTM()
    handle = net.specialize(optimizer=dynamic.SGD(0.1))
    integers = tf.TensorSpec([None, None], tf.int32)

    class Served(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = net.parameters

        @tf.function(input_signature=[integers] * 3)
        def logits(self, kinds, children, arguments):
            return handle.forward((kinds, children, arguments)).outputs[0]

        @tf.function(input_signature=[integers] * 3)
        def train(self, kinds, children, arguments):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(handle.forward((kinds, children, arguments), training=True).losses)
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss

    tree = random_tree(np.random.default_rng(1), 5)
    lists = [tf.constant([numbers], tf.int32) for numbers in flatten(nodes(handle, tree))]
    expected = handle.forward(tuple(lists)).outputs[0].numpy()
    tf.saved_model.save(Served(), str(tmp_path / "net"))
    tfmem.load_ops()
    loaded = tf.saved_model.load(str(tmp_path / "net"))
    np.testing.assert_array_equal(loaded.logits(*lists), expected)
    losses = [float(loaded.train(*lists)) for _ in range(5)]
    assert losses[-1] < losses[0]
