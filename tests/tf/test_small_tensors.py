"""Steps whose tensors TensorFlow's CPU allocator does not count: what is measured has them all the same."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.memory.timeline import COUNTED
from tests.tf.optimized_runs import in_a_process

keras = tf.keras
LAYERS = 12


def dense() -> keras.Model:
    """Activations of 64 * 256 * 4 bytes, 64 KiB each: the smallest that move; and weights of 256 KiB, which count."""
    return keras.Sequential([keras.Input((256,)), *(keras.layers.Dense(256, activation="tanh") for _ in range(LAYERS))])


def recurrent() -> keras.Model:
    return keras.Sequential([keras.Input((10, 8)), keras.layers.LSTM(16), keras.layers.Dense(4)])


def report_of(build):
    """After twelve steps in twice what the tensors need by estimate."""
    model = build()
    model.compile(optimizer="sgd", loss="mse")
    images = np.random.RandomState(0).rand(64, *model.input_shape[1:]).astype("float32")
    labels = np.zeros((64, model.output_shape[-1]), "float32")
    estimated = 0
    try:
        tfmem.optimize(model, memory_budget=1000).train_on_batch(images, labels)
    except tfmem.InfeasibleBudgetError as error:
        estimated = int(error.least)
    gc.collect()  # the error held the model
    model = build()
    model.compile(optimizer="sgd", loss="mse")
    model = tfmem.optimize(model, memory_budget=2 * estimated)
    for _ in range(12):
        model.train_on_batch(images, labels)
    return tfmem.report(model)


@pytest.mark.parametrize("build", [dense, recurrent])
def test_small_tensors_are_part_of_the_measured_peak(build):
    report = in_a_process(report_of, build)  # where small tensors are a part of the peak that is told
    assert report.peak_uncounted > 0
    assert report.peak_measured is not None
    # what has been estimated is there, and the allocator has told less
    assert report.peak_measured >= max(report.peak_uncounted, report.peak_predicted // 2)
    assert "in small tensors, which the allocator does not count" in str(report)
    assert COUNTED == 256 << 10
