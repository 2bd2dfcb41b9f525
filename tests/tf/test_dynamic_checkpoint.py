"""What training changes is found by TensorFlow's checkpoints and SavedModels: a net that was restored trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic

OPTIMIZERS = {
    "sgd": dynamic.SGD(0.1),
    "momentum": dynamic.SGD(0.1, 0.9),
    "adam": dynamic.Adam(0.01),
}


class WithDropout(TreeLSTM):
    """What is dropped in a step depends on its number, so that has to be restored, too."""

    def result(self, h: Any, c: Any, label: Any) -> dynamic.Result:
        logits = dynamic.affine(self.output_kernel, dynamic.dropout(h, 0.5), self.output_bias)
        return dynamic.Result(state=(h, c), loss=dynamic.sparse_softmax_cross_entropy(label, logits))


def train(handle: dynamic.Handle, steps: range) -> list[bytes]:
    found = []
    for step in steps:
        trees = random_trees(4, seed=step)
        found.append(handle.step([nodes(handle, tree) for tree in trees]).losses.numpy().tobytes())
    return found


def values(net: TreeLSTM) -> list[bytes]:
    return [parameter.numpy().tobytes() for parameter in net.parameters]


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_restored_net_trains_on_as_if_uninterrupted(rule: str, tmp_path: Path) -> None:
    net = WithDropout()
    handle = net.specialize(optimizer=OPTIMIZERS[rule])
    train(handle, range(5))
    path = tf.train.Checkpoint(net=handle).write(str(tmp_path / "checkpoint"))
    losses = train(handle, range(5, 10))

    restored = WithDropout(seed=1)
    other = restored.specialize(optimizer=OPTIMIZERS[rule])
    train(other, range(20, 22))
    tf.train.Checkpoint(net=other).read(path).assert_consumed()
    assert train(other, range(5, 10)) == losses
    assert values(restored) == values(net)


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    net = TreeLSTM()
    handle = net.specialize(optimizer=dynamic.Adam())
    path = tf.train.Checkpoint(net=handle).write(str(tmp_path / "checkpoint"))
    found = {name for name, _ in tf.train.list_variables(path) if name.startswith("net/")}
    count = len(net.parameters)
    expected = {f"net/{of}/{number}" for of in ("parameters", "slots/m", "slots/v") for number in range(count)}
    assert found == {f"{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in {*expected, "net/slots/steps"}}


def test_a_net_without_an_optimizer_is_saved_too(tmp_path: Path) -> None:
    net, other = TreeLSTM(), TreeLSTM(seed=1)
    path = tf.train.Checkpoint(net=net.specialize()).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(net=other.specialize()).read(path).assert_consumed()
    assert values(other) == values(net)


class Trainer(tf.Module):
    """A step that a SavedModel takes along."""

    def __init__(self, handle: dynamic.Handle) -> None:
        super().__init__()
        self.handle = handle

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int32, 1)] * 3)
    def train(self, kinds: tf.RaggedTensor, children: tf.RaggedTensor, arguments: tf.RaggedTensor) -> tf.Tensor:
        return self.handle.step((kinds, children, arguments)).losses


def test_a_saved_model_trains_on(tmp_path: Path) -> None:
    net = WithDropout()
    handle = net.specialize(optimizer=dynamic.Adam(0.01))
    batches = [handle.batch([nodes(handle, tree) for tree in random_trees(4, seed=step)]) for step in range(6)]
    trainer = Trainer(handle)
    for batch in batches[:3]:
        trainer.train(*batch)
    tf.saved_model.save(trainer, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    for batch in batches[3:]:
        assert loaded.train(*batch).numpy().tobytes() == trainer.train(*batch).numpy().tobytes()


def test_a_module_finds_the_parameters() -> None:
    net = TreeLSTM()
    trainer = Trainer(net.specialize(optimizer=dynamic.Adam()))
    assert {id(variable) for variable in trainer.trainable_variables} == {id(one) for one in net.parameters}
    assert len(trainer.variables) == 3 * len(net.parameters) + 1


def layer_kinds(weights: Any) -> dict[str, dynamic.NodeKind]:
    def leaf(children: Any, word: Any) -> Any:
        return dynamic.tanh(dynamic.embedding_lookup(weights["table"], word))

    def pair(children: Any) -> Any:
        return dynamic.tanh(dynamic.matvec(weights["kernel"], dynamic.concat(children)))

    return {"leaf": dynamic.node(leaf), "pair": dynamic.node(pair, children=2)}


def keras_model() -> keras.Model:
    inputs = [keras.Input([None], dtype="int32") for _ in range(3)]
    states = dynamic.Layer({"table": [9, 4], "kernel": [4, 8]}, layer_kinds, state=4)(tuple(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(states))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize("how", ["checkpoint", "weights"])
def test_a_keras_model_with_a_layer_of_graphs_trains_on(how: str, tmp_path: Path) -> None:
    batch = [np.array([[0, 0, 1], [1, 0, 0]]), np.array([[0, 1], [1, 2]]), np.array([[3, 4], [8, 8]])]
    goal = np.ones([2, 2], np.float32)
    model, other = keras_model(), keras_model()
    for _ in range(3):
        model.train_on_batch(batch, goal)
    if how == "checkpoint":
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_existing_objects_matched()
    else:
        model.save_weights(tmp_path / "model.weights.h5")
        other.optimizer.build(other.trainable_variables)
        other.load_weights(tmp_path / "model.weights.h5")
    for _ in range(3):
        assert float(model.train_on_batch(batch, goal)) == float(other.train_on_batch(batch, goal))
