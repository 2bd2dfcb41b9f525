"""The examples, small: networks have the papers' sizes, training with and without tfmem agrees."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from graph_passes.report import Report
from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)
pytest.importorskip("sklearn")

from examples import images, models, train_cnn, train_distributed  # noqa: E402


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("vgg19", 143_667_240), ("resnet152", 60_344_232), ("alexnet", 62_378_344)],
)
def test_networks_have_the_papers_sizes(name, parameters):
    assert models.build(name).count_params() == parameters


def test_the_graph_is_the_same_network_as_the_keras_model():
    step = models.build_vgg19_graph(batch=2)
    with step.graph.as_default():
        import tensorflow as tf

        shapes = [variable.shape.as_list() for variable in tf.compat.v1.trainable_variables()]
    keras_shapes = [list(variable.shape) for variable in models.build("vgg19").trainable_variables]
    assert shapes == keras_shapes


def test_weights_come_from_the_seed():
    one, two, other = (models.build("alexnet", 64, 10, 0.05, seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(one.get_weights(), two.get_weights(), other.get_weights(), strict=True):
        assert np.array_equal(a, b)
        assert not a.any() or not np.array_equal(a, c)  # biases are all zero


def test_the_bar_says_no_peak_of_steps_that_tfmem_observes():
    observed = [44 << 20] * train_cnn.WARM_UP
    assert train_cnn.shown_of(3.2, observed) == {"loss": "3.2000", "peak": "not yet measured"}
    assert train_cnn.shown_of(0.5, [*observed, 296 << 20]) == {"loss": "0.5000", "peak": "296.0 MiB"}


def test_bad_networks_are_refused():
    with pytest.raises(ValueError, match="unknown model 'vgg'; expected one of alexnet"):
        models.build("vgg")
    with pytest.raises(ValueError, match="at least 63 pixels, not 32"):
        models.build("alexnet", image_size=32)


@pytest.mark.parametrize("source", sorted(images.SOURCES))
def test_batches_are_real_images_and_repeat(source):
    (pictures, labels), (others, _) = images.batches(source, 8, 48, steps=2, seed=3)
    again, labels_again = next(images.batches(source, 8, 48, steps=1, seed=3))
    assert pictures.shape == (8, 48, 48, 3)
    assert pictures.dtype == np.float32
    assert labels.dtype == np.int32
    assert -1 <= pictures.min() < pictures.max() <= 1
    assert np.array_equal(pictures, again)
    assert np.array_equal(labels, labels_again)
    assert not np.array_equal(pictures, others)


def test_enlarged_digits_keep_their_grey_levels():
    small, labels = images.digits(20, 8)
    large, _ = images.digits(20, 80)
    assert np.abs(large.mean(axis=(1, 2)) - small.mean(axis=(1, 2))).max() < 0.02
    assert len(images.digits(2000, 8)[1]) == 2000  # more than the set holds
    assert set(labels) <= set(range(10))


def test_bad_images_are_refused():
    with pytest.raises(ValueError, match="unknown images 'cats'"):
        next(images.batches("cats", 1, 8, 1))
    with pytest.raises(ValueError, match="320 pixels at most, not 400"):
        images.photographs(1, 400)


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--batch", "0"], ["--preset", "huge"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_cnn.parse(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_presets_give_way_to_arguments():
    options = train_cnn.parse(["--preset", "thesis", "--batch", "8", "--deterministic"])
    settings = train_cnn.settings_of(options)
    assert (settings.batch, settings.classes, settings.deterministic) == (8, 1000, True)


@pytest.mark.long
def test_training_with_tfmem_is_the_same_training_in_less_memory(tmp_path):
    arguments = ["--image-size=64", "--batch=64", "--width=0.125", "--steps=12"]
    finished = run_python(
        ["-m", "examples.train_cnn", *arguments, "--output", str(tmp_path)],
        environment={**os.environ, "TFMEM_CACHE_DIR": ""},
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "bit for bit the same" in finished.stdout
    plain, tfmem = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("plain", "tfmem"))
    assert plain["losses"] == tfmem["losses"]
    assert len(plain["losses"]) == 12
    report = Report.from_json((tmp_path / "report.json").read_text())
    assert report.transfers
    assert report.budget < max(plain["peaks"])
    assert max(tfmem["peaks"][train_cnn.WARM_UP :]) < max(plain["peaks"][train_cnn.WARM_UP :])
    assert (tmp_path / "train_cnn.png").stat().st_size > 10_000


@pytest.mark.long
def test_replicas_train_alike_under_a_budget_for_each_device():
    finished = run_python(
        ["-m", "examples.train_distributed", "--steps=5"], environment={**os.environ, "TFMEM_CACHE_DIR": ""}, cwd=ROOT
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-2000:]
    assert "the losses of 5 steps are bit for bit the same" in finished.stdout
    assert re.search(r"on +CPU:0 \(2 devices\): budget .* measured", finished.stdout)


def test_bad_arguments_of_distributed_training_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_distributed.parse(["--steps", "0"])
    assert stopped.value.code == 2
    assert "--steps must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("is_installed", [True, False])
def test_examples_take_what_is_installed_or_else_the_checkout(is_installed: bool, tmp_path: Path) -> None:
    """`python examples NAME` from a folder elsewhere; links to the packages stand for an installation."""
    probe = tmp_path / "sitecustomize.py"  # Python imports it first
    probe.write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print(sys.modules['tfmem'].__file__) if 'tfmem' in sys.modules else None)\n"
    )
    for package in ("tfmem", "graph_passes", "custom_ops") if is_installed else ():
        (tmp_path / package).symlink_to(ROOT / package)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples"), "train_cnn", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    home = tmp_path if is_installed else ROOT
    assert done.stdout.splitlines()[-1] == str(home / "tfmem" / "__init__.py")


def test_an_unknown_example_is_refused_with_those_that_exist() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples"), "nothing"], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 1
    assert (
        "there are: biaffine_parser, bilstm_tagger, graph_net, rvnn, serve_lstm, td_lstm, td_rnn, tour, train_cnn"
        in done.stderr
    )
