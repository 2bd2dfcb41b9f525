"""Commands that need TensorFlow: `devices`, and `optimize` from one SavedModel to another."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.python_server import run_python
from tfmem import __main__ as cli

ROOT = Path(__file__).resolve().parents[2]


class Deep(tf.Module):
    """Ten layers whose activations, 2 MiB each, are nearly all that a step needs."""

    def __init__(self):
        super().__init__()
        self.weights = [tf.Variable(tf.random.stateless_normal([128, 128], [layer, 1]) / 8) for layer in range(10)]

    @tf.function(input_signature=[tf.TensorSpec([4096, 128], name="x")])
    def train(self, x):
        with tf.GradientTape() as tape:
            y = x
            for weights in self.weights:
                y = tf.tanh(y @ weights)
            loss = tf.reduce_mean(y * y)
        for weights, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weights.assign_sub(0.1 * gradient)
        return {"loss": loss}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    model = Deep()
    tf.saved_model.save(model, str(path), signatures={"train": model.train})
    return path


def test_devices(capsys):
    assert cli.main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("/device:CPU:0  CPU") for line in lines)
    assert any(line.startswith("  link ") and "/s out" in line for line in lines)


def test_optimize_writes_a_saved_model_that_trains_as_the_original(saved, tmp_path):
    target = tmp_path / "smaller"
    command = ["optimize", str(saved), "--memory-budget", "20MiB", "--output", str(target)]
    done = run_python(["-m", "tfmem", *command], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}\n"

    tfmem.load_ops()
    x = tf.random.stateless_normal([4096, 128], [7, 7])
    losses = []
    for path in (saved, target):
        assert (b"MemOpOffload" in (path / "saved_model.pb").read_bytes()) == (path == target)
        train = tf.saved_model.load(str(path)).signatures["train"]
        losses.append([train(x=x)["loss"].numpy() for _ in range(3)])
    np.testing.assert_array_equal(losses[1], losses[0])


def test_optimize_replaces_recurrent_layers_without_a_budget(tmp_path, capsys):
    layer = keras.layers.LSTM(8, return_sequences=True)
    run = tf.function(layer, input_signature=[tf.TensorSpec((None, 5, 4))])
    module = tf.Module()
    module.run, module.layer = run, layer
    path, target = tmp_path / "model", tmp_path / "faster"
    tf.saved_model.save(module, str(path), signatures={"run": run})
    assert cli.main(["optimize", str(path), "--output", str(target), "--passes", "recurrent"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert len(tfmem.report(target).replaced) == 1
    x = tf.random.stateless_normal([3, 5, 4], [7, 7])
    before, after = (tf.saved_model.load(str(each)) for each in (path, target))
    np.testing.assert_allclose(after.run(x), before.run(x), rtol=1e-5, atol=1e-6)


def test_optimize_says_what_would_do(saved, tmp_path, capsys):
    target = tmp_path / "smaller"
    command = ["optimize", str(saved), "--memory-budget", "1MiB", "--output", str(target)]
    assert cli.main(command) == 1
    assert "give a budget of at least" in capsys.readouterr().err
    assert not target.exists()


def test_optimize_refuses_what_is_no_saved_model(tmp_path, capsys):
    assert cli.main(["optimize", str(tmp_path), "--memory-budget", "1GiB"]) == 1
    assert "is not a SavedModel" in capsys.readouterr().err
