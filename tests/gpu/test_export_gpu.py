"""SavedModels with kernels for named GPUs, served by this one: cubins for it, or PTX of an older one."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.mark.parametrize("architectures", [("sm_90",), ("sm_80",), ("sm_80", "sm_90")], ids=", ".join)
@pytest.mark.parametrize("passes", [("recurrent",), ("recurrent", "fusion")], ids=", ".join)
def test_served_outputs_are_the_models(passes: tuple[str, ...], architectures: tuple[str, ...], tmp_path: Path) -> None:
    """Where sm_80 alone was named, the driver compiles its PTX."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inside = [layers.LSTM(48, return_sequences=True), layers.LayerNormalization(), layers.Dense(7, activation="gelu")]
    model = keras.Sequential([keras.Input((9, 16), batch_size=5), *inside])
    x = np.random.default_rng(1).normal(size=(5, 9, 16)).astype(np.float32)
    model.export(tmp_path / "model", verbose=False)
    path = tfmem.optimize(tmp_path / "model", passes=passes, architectures=architectures, output=tmp_path / "served")
    report = tfmem.report(path)
    assert report.replaced
    assert bool(report.regions) == ("fusion" in passes)
    served = tf.saved_model.load(path).signatures["serving_default"]
    (found,) = served(tf.constant(x)).values()
    np.testing.assert_allclose(found, model(x, training=False), rtol=1e-4, atol=1e-5)
