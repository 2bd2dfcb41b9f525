"""A dynamic net in a SavedModel whose signature takes ragged tensors: loaded by Python, by Keras and without Python."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_tree
from tests.tf.python_server import run_python
from tests.tf.served import numbers, served
from tfmem import dynamic
from tfmem.dynamic.batch import flatten

NAMES = ("kinds", "children", "arguments")
RAGGED = tf.RaggedTensorSpec([None, None], tf.int32, ragged_rank=1)


class Served(tf.Module):
    """A Tree-LSTM that says the loss of each tree."""

    def __init__(self, net: TreeLSTM, handle: dynamic.Handle) -> None:
        super().__init__()
        self.weights = net.parameters
        self.handle = handle

    @tf.function(input_signature=[RAGGED] * 3)
    def losses(self, kinds: tf.RaggedTensor, children: tf.RaggedTensor, arguments: tf.RaggedTensor) -> tf.Tensor:
        return {"losses": self.handle.forward((kinds, children, arguments)).losses}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]], np.ndarray]:
    """The SavedModel, a batch of three trees of several sizes as lists, and the losses of these."""
    net = TreeLSTM()
    handle = net.specialize()
    module = Served(net, handle)
    path = tmp_path_factory.mktemp("dynamic") / "net"
    tf.saved_model.save(module, str(path), signatures=module.losses)
    random = np.random.default_rng(1)
    trees = [flatten(nodes(handle, random_tree(random, size))) for size in (5, 1, 8)]
    batch = {name: [list(map(int, tree[at])) for tree in trees] for at, name in enumerate(NAMES)}
    ragged = [tf.ragged.constant(batch[name], tf.int32, ragged_rank=1) for name in NAMES]
    return path, batch, module.losses(*ragged)["losses"].numpy()


LOAD = """
import json, sys
import keras, tensorflow as tf, tfmem
tfmem.load_ops()
batch = json.load(open("batch.json"))
ragged = {name: tf.ragged.constant(rows, tf.int32, ragged_rank=1) for name, rows in batch.items()}
flat = {name: tensor.values for name, tensor in ragged.items()}
flat |= {f"{name}_1": tensor.row_splits for name, tensor in ragged.items()}
loaded = tf.saved_model.load(sys.argv[1])
found = [loaded.signatures["serving_default"](**flat), loaded.losses(**ragged)]
# Keras gives a signature one input alone, so the layer calls the function
kinds, others = ragged["kinds"], {name: ragged[name] for name in ("children", "arguments")}
found.append(keras.layers.TFSMLayer(sys.argv[1], call_endpoint="losses")(kinds, **others))
print(json.dumps([each["losses"].numpy().tolist() for each in found]))
"""


def test_another_process_loads_it_by_tensorflow_and_by_keras(exported: tuple, tmp_path: Path) -> None:
    path, batch, expected = exported
    (tmp_path / "load.py").write_text(LOAD)
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    done = run_python(["load.py", str(path)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.long  # the C API starts for seconds
def test_a_program_without_python_loads_it(exported: tuple) -> None:
    path, batch, expected = exported
    inputs = []
    for name, rows in batch.items():
        values = [number for row in rows for number in row]
        starts = np.cumsum([0, *map(len, rows)])
        inputs += [f"{name}=int32:{','.join(map(str, values))}", f"{name}_1=int64:{','.join(map(str, starts))}"]
    np.testing.assert_allclose(numbers(served(path, *inputs)), expected, rtol=1e-6)


def test_optimising_it_keeps_its_results(exported: tuple, tmp_path: Path) -> None:
    path, batch, expected = exported
    with pytest.warns(tfmem.TfmemWarning, match="copy"):
        again = tfmem.optimize(path, output=tmp_path / "again")
    ragged = {name: tf.ragged.constant(rows, tf.int32, ragged_rank=1) for name, rows in batch.items()}
    loaded = tf.saved_model.load(again)
    np.testing.assert_allclose(loaded.losses(**ragged)["losses"], expected, rtol=1e-6)


def test_a_keras_model_with_ragged_inputs_is_exported(tmp_path: Path) -> None:
    """`export` makes the inputs of its signature dense, padded with -1."""
    keras.utils.set_random_seed(0)

    def kinds(weights: dict[str, tf.Variable]) -> dict[str, dynamic.NodeKind]:
        def leaf(children: list[tf.Tensor], word: tf.Tensor) -> tf.Tensor:
            return dynamic.embedding_lookup(weights["table"], word)

        def pair(children: list[tf.Tensor]) -> tf.Tensor:
            return dynamic.tanh(dynamic.affine(weights["kernel"], dynamic.concat(children), weights["bias"]))

        return {"leaf": dynamic.node(leaf), "pair": dynamic.node(pair, children=2)}

    shapes = {"table": (6, 4), "kernel": (4, 8), "bias": (4,)}
    inputs = {name: keras.Input([None], dtype="int32", name=name, ragged=True) for name in NAMES}
    encoded = dynamic.Layer(shapes, kinds, state=4)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(encoded))
    batch = {"kinds": [[0, 0, 1], [0]], "children": [[0, 1], []], "arguments": [[2, 3], [5]]}
    ragged = {name: tf.ragged.constant(rows, tf.int32, ragged_rank=1) for name, rows in batch.items()}
    expected = model(ragged)
    model.export(tmp_path / "net", verbose=False)
    padded = {name: tensor.to_tensor(-1) for name, tensor in ragged.items()}
    layer = keras.layers.TFSMLayer(tmp_path / "net", call_endpoint="serve")
    loaded = tf.saved_model.load(tmp_path / "net")
    for found in (loaded.serve(padded), layer(padded)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
