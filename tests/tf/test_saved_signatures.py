"""Budgets of SavedModels that hold a training step beside inference of which the batch is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.two_layers import TwoLayers

OPEN = tf.TensorSpec([None, 4], name="x")


class Net(TwoLayers):
    """Two layers."""

    def infer(self, x: Any) -> Any:
        h = tf.tanh(x @ self.w)
        return tf.tanh(h @ self.w) + h


@pytest.fixture(name="x")
def fixture_x() -> Any:
    return tf.random.stateless_normal([64, 4], [3, 4])


def saved(net: Net, path: Path, *, rows: int | None = 64) -> str:
    spec = tf.TensorSpec([rows, 4], name="x")
    train = tf.function(lambda x: {"loss": net.train(x)}).get_concrete_function(spec)
    infer = tf.function(lambda x: {"y": net.infer(x)}).get_concrete_function(OPEN)
    tf.saved_model.save(net, str(path), signatures={"train": train, "serving_default": infer})
    return str(path)


def test_a_saved_model_with_an_inference_signature(tmp_path: Path, x: Any, flow: Any) -> None:
    path = saved(Net(), tmp_path / "model")
    with pytest.warns(tfmem.TfmemWarning, match="stays unchanged: there is no gradient in the graph"):
        after = tfmem.optimize(path, memory_budget="1GiB", output=tmp_path / "after")
    model, net = tf.saved_model.load(after), Net()
    np.testing.assert_array_equal(model.signatures["serving_default"](x=x[:7])["y"], tf.function(net.infer)(x[:7]))
    assert model.signatures["train"](x=x)["loss"].numpy() == tf.function(net.train)(x).numpy()
    report = tfmem.report(after)
    assert report.decision == "unchanged: fits"
    assert any(note.startswith("unchanged: ") for note in report.notes)


def test_a_saved_model_that_only_infers(tmp_path: Path, flow: Any) -> None:
    """There is nothing that the budget could be for."""
    net = Net()
    infer = tf.function(lambda x: {"y": net.infer(x)}).get_concrete_function(OPEN)
    tf.saved_model.save(net, str(tmp_path / "model"), signatures=infer)
    with pytest.raises(tfmem.NoGradientError, match="no gradient in the graph"):
        tfmem.optimize(str(tmp_path / "model"), memory_budget="1GiB", output=tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_a_saved_model_whose_training_step_is_open(tmp_path: Path, flow: Any) -> None:
    with pytest.raises(tfmem.UnknownShapeError, match="input_shapes"):
        tfmem.optimize(saved(Net(), tmp_path / "model", rows=None), memory_budget="1GiB", output=tmp_path / "after")
