"""What a Keras 3 model tells its user on a GPU, where Keras compiles training with XLA unless told otherwise.

Each run is a separate process, because how a device's memory grows is set once. Histories are compared within what
XLA's and cuDNN's orders of summation differ by over a few steps.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import sys
import time
import warnings
import keras
import numpy as np
import tensorflow as tf

tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
tf.config.experimental.enable_tensor_float_32_execution(False)

import tfmem

KIND, ROWS = sys.argv[1], 100
random = np.random.default_rng(0)


def convolutions():
    x = image = keras.Input((64, 64, 3))
    for width in [32] * 8:
        x = keras.layers.Activation("relu")(keras.layers.Conv2D(width, 3, padding="same")(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = {"a": keras.layers.Dense(1, name="a")(x), "b": keras.layers.Dense(10, name="b")(x)}
    return keras.Model(image, outputs), random.normal(size=(ROWS, 64, 64, 3))


def recurrent():
    x = words = keras.Input((20, 16))
    x = keras.layers.LSTM(64)(keras.layers.LSTM(64, return_sequences=True)(x))
    outputs = {"a": keras.layers.Dense(1, name="a")(x), "b": keras.layers.Dense(10, name="b")(x)}
    return keras.Model(words, outputs), random.normal(size=(ROWS, 20, 16))


build = {"convolutions": convolutions, "recurrent": recurrent}[KIND]
data = build()[1].astype("float32")
labels = {"a": random.normal(size=(ROWS, 1)).astype("float32"), "b": np.arange(ROWS) % 10}
losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def history(optimize, jit_compile="auto"):
    keras.utils.set_random_seed(3)
    model = build()[0]
    model.compile("sgd", loss=losses, metrics={"a": ["mae"], "b": ["accuracy"]}, jit_compile=jit_compile)
    model = optimize(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.fit(data, labels, batch_size=48, epochs=5, verbose=0, validation_split=0.1).history
    return found, model, [str(one.message) for one in caught if issubclass(one.category, tfmem.TfmemWarning)]


def check(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


xla, _, _ = history(lambda model: model)
plain, _, _ = history(lambda model: model, jit_compile=False)
check(plain, xla, 1e-2)

found, model, _ = history(tfmem.optimize)
end = time.monotonic() + 150
while "not decided yet" in str(tfmem.report(model)) and time.monotonic() < end:  # kernels are made meanwhile
    model.fit(data, labels, batch_size=48, verbose=0, validation_split=0.1)
report = tfmem.report(model)
print(report)
if KIND == "convolutions":
    assert report.decision.startswith("unchanged: fits")  # on a GPU its memory is the budget
    check(found, xla, 1e-2)
else:
    assert not report.decision.startswith("unchanged")
    check(found, plain, 1e-2)
    same = build()[0]
    same.set_weights(model.get_weights())
    same.compile(loss=losses, jit_compile=False)
    options = {"batch_size": 48, "verbose": 0, "return_dict": True}
    losses = [each.evaluate(data, labels, **options)["loss"] for each in (model, same)]
    np.testing.assert_allclose(*losses, rtol=1e-2)

if KIND == "convolutions":
    try:
        history(lambda model: tfmem.optimize(model, memory_budget=1))
    except tfmem.InfeasibleBudgetError as error:
        least = error.smallest_budget
    found, model, told = history(lambda model: tfmem.optimize(model, memory_budget=int(1.3 * least)))
    print(tfmem.report(model), told)
    assert tfmem.report(model).decision == "moved"
    assert any("XLA" in text for text in told)
    check(found, plain, 1e-2)
print("equal")
"""


@pytest.mark.timeout(330)
@pytest.mark.parametrize("kind", ["convolutions", "recurrent"])
def test_a_keras_3_model_with_xla_as_by_default(kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TFMEM_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    assert "equal" in done.stdout
