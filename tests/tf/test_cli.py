"""Commands that need TensorFlow: `devices`, and `optimize` from one SavedModel to another."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.python_server import run_python
from tfmem.cli import main as cli

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
    assert any(line.split()[:2] == ["CPU:0", "CPU"] for line in capsys.readouterr().out.splitlines())
    assert cli.main(["devices", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["name"], first["profile"]) == ("CPU:0", "cpu")
    assert first["bytes_out_per_second"] > 0


def test_devices_that_are_measured_on_one_thread():
    done = run_python(["-m", "tfmem", "devices", "--measure"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["regions"]["dispatch"] > 0
    program = "from tfmem.quiet import start_tensorflow; start_tensorflow(1); import tensorflow as tf; "
    done = run_python(["-c", program + "print(tf.config.threading.get_intra_op_parallelism_threads())"])
    assert done.stdout == "1\n"


def test_optimize_writes_a_saved_model_that_trains_as_the_original(saved, tmp_path):
    target = tmp_path / "smaller"
    copies = ["--policy", "autovm"]  # the default may recompute all, where copies are measured to be slow
    command = ["optimize", str(saved), "--memory-budget", "20MiB", *copies, "--output", str(target)]
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
    printed = capsys.readouterr()
    assert printed.out == f"{target}\n"
    assert "1 recurrent layer replaced" in printed.err
    assert len(tfmem.report(target).replaced) == 1
    x = tf.random.stateless_normal([3, 5, 4], [7, 7])
    before, after = (tf.saved_model.load(str(each)) for each in (path, target))
    np.testing.assert_allclose(after.run(x), before.run(x), rtol=1e-5, atol=1e-6)


def test_optimize_says_what_would_do(saved, tmp_path, capsys):
    target = tmp_path / "smaller"
    command = ["optimize", str(saved), "--memory-budget", "1MiB", "--output", str(target)]
    assert cli.main(command) == 3
    assert "give a budget of at least" in capsys.readouterr().err
    assert not target.exists()


def test_optimize_refuses_what_is_no_saved_model(tmp_path, capsys):
    assert cli.main(["optimize", str(tmp_path), "--memory-budget", "1GiB"]) == 1
    assert "is not a SavedModel" in capsys.readouterr().err


def test_plan_a_saved_model_and_carry_it_out(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFMEM_POLICY", "autovm")  # the default may recompute all, where copies are measured to be slow
    plan, target = tmp_path / "plan.json", tmp_path / "planned"
    command = ["plan", str(saved), "--memory-budget", "20MiB", "--no-curve", "--output", str(plan)]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("`model.train`: fits 20.0 MiB: peak ")
    assert f"wrote {plan}" in printed.err
    assert cli.main(["optimize", str(saved), "--plan", str(plan), "--output", str(target)]) == 0
    assert "`model.train`: fits 20.0 MiB" in capsys.readouterr().err
    assert b"MemOpOffload" in (target / "saved_model.pb").read_bytes()
    assert cli.main(["plan", str(saved), "--memory-budget", "1MiB", "--no-curve", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["feasible"] is False


@pytest.mark.long
def test_plan_and_profile_a_model_of_a_program(tmp_path, monkeypatch, capsys):
    (tmp_path / "program_of_cli_test.py").write_text(
        "import keras\n"
        "def model():\n"
        "    layers = [keras.layers.Dense(64, activation='relu') for _ in range(6)]\n"
        "    found = keras.Sequential([keras.Input((64,)), *layers], name='mlp')\n"
        "    found.compile('sgd', 'mse')\n"
        "    return found\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    command = ["plan", "program_of_cli_test:model", "--batch", "4096", "--memory-budget", "6MiB", "--max-batch"]
    assert cli.main([*command, "--device", "h100", "--plot", "curve.png"]) == 0
    text = capsys.readouterr().out
    assert "max batch   " in text
    assert "h100 (profile)" in text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["profile", "program_of_cli_test:model", "--batch", "256", "--steps", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == 1
    assert found["step"] == "mlp.fit"
    written = {path.name for path in tmp_path.iterdir()}
    assert written - {"__pycache__"} == {"program_of_cli_test.py", "curve.png"}  # nothing else
    assert cli.main(["plan", "program_of_cli_test:network"]) == 1
    assert "has no 'network'; there are: keras, model" in capsys.readouterr().err
    for source, found in (
        ("nothing", "'nothing' does not exist"),
        ("nothing.at_all:model", "no module 'nothing.at_all'"),
    ):
        assert cli.main(["plan", source]) == 1
        told = capsys.readouterr().err
        assert found in told
        assert "expected a SavedModel, a .keras file, or module:name" in told
    (tmp_path / "lacks_of_cli_test.py").write_text("import not_there_of_cli_test\n")
    assert cli.main(["plan", "lacks_of_cli_test:model"]) == 1
    assert "No module named 'not_there_of_cli_test'" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_planning(monkeypatch, capsys):
    assert cli.main(["plan", "nothing", "--no-curve", "--plot", "curve.png"]) == 2
    assert "--plot draws the curve that --no-curve leaves out" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plan", "nothing", "--plot", "curve.png"]) == 1
    assert "pip install 'tfmem[plot]'" in capsys.readouterr().err


def test_doctor_says_what_works(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    states = {each["what"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states["TensorFlow"] == states["op library"] == states["link"] == "works"
    assert cli.main(["doctor"]) == 0
    assert "tfmem works here" in capsys.readouterr().out
