"""Seeded random ops of a GPU draw what they draw in TensorFlow, through dry runs, trials and the final plan.

Each run is a separate process, because TensorFlow sets how a device's memory grows once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import sys
import numpy as np
import tensorflow as tf

gpu = tf.config.list_physical_devices("GPU")[0]
tf.config.experimental.set_memory_growth(gpu, True)

import tfmem

RAW, STEPS, KIND = tf.raw_ops, 10, sys.argv[1]
images, labels = tf.random.stateless_normal([64, 64, 64, 3], [1, 2]), tf.range(64) % 10
sequences = tf.random.stateless_normal([5, 4, 8], [3, 4])
CELL = {"rnn_mode": "lstm", "input_mode": "linear_input", "direction": "unidirectional", "dropout": 0.5}
if KIND == "cudnn":
    sizes = {"num_layers": 2, "num_units": 8, "input_size": 8}
    count = RAW.CudnnRNNParamsSize(T=tf.float32, S=tf.int32, **sizes, **CELL)
    parameters = tf.random.stateless_normal(count, [5, 6])


def seeds(place):
    first, second = tf.compat.v1.get_seed(place)
    return {"seed": first, "seed2": second}


def draws():
    normal = {"dtype": tf.float32}
    drawn = [
        RAW.RandomUniform(shape=[3], dtype=tf.float32, **seeds(None)),
        RAW.RandomUniform(shape=[3], dtype=tf.float16, **seeds(1)),
        RAW.RandomUniformInt(shape=[3], minval=0, maxval=1000, **seeds(2)),
        RAW.RandomStandardNormal(shape=tf.constant([3], tf.int64), **normal, **seeds(3)),
        RAW.TruncatedNormal(shape=[3], **normal, **seeds(None)),
        RAW.ParameterizedTruncatedNormal(shape=[3], means=0.0, stdevs=1.0, minvals=-1.0, maxvals=2.0, **seeds(4)),
        RAW.Multinomial(logits=tf.zeros([1, 30]), num_samples=4, **seeds(5)),
        RAW.RandomGamma(shape=[3], alpha=[0.5, 2.0], **seeds(6)),  # has no kernel for GPUs
        RAW.RandomShuffle(value=tf.range(20), **seeds(7)),  # nor has this
    ]
    if KIND == "cudnn":
        state = tf.zeros([2, 4, 8])
        given = {"input": sequences, "input_h": state, "input_c": state, "params": parameters}
        lengths = tf.fill([4], 5)
        drawn += [RAW.CudnnRNNV3(sequence_lengths=lengths, is_training=True, **given, **CELL, **seeds(8)).output]
    return drawn


def make_step():
    filters = [
        tf.Variable(tf.random.stateless_normal([3, 3, channels, 32], [place, 1], stddev=0.08))
        for place, channels in enumerate([3] + [32] * 7)
    ]
    last = tf.Variable(tf.random.stateless_normal([32, 10], [9, 9]))

    @tf.function
    def train(x, y):
        drawn = draws()
        if KIND == "noticed":
            tf.print("a step that gets no dry run", output_stream=sys.stderr)
        with tf.GradientTape() as tape:
            for weights in filters:
                x = tf.nn.relu(tf.nn.conv2d(tf.nn.dropout(x, 0.1), weights, 1, "SAME"))
            logits = tf.reduce_mean(x, [1, 2]) @ last
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        variables = [*filters, last]
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.05 * gradient)
        late = tf.random.normal([2])
        with tf.control_dependencies([late]):
            loss = tf.identity(loss)
        return loss, [*drawn, late]

    return train


def run(function):
    tf.random.set_seed(5)
    return [[np.asarray(value) for value in function(images, labels)[1]] for _ in range(STEPS)]


expected = run(make_step())
assert len({step[0].tobytes() for step in expected}) == STEPS
try:
    tfmem.optimize(make_step(), memory_budget=1)(images, labels)
except tfmem.InfeasibleBudgetError as error:
    least = error.smallest_budget
function = tfmem.optimize(make_step(), memory_budget=int(1.3 * least), passes=("recurrent", "offload"))
found = run(function)
report = tfmem.report(function)
print(report)
assert report.decision == "moved"
for step, (ours, theirs) in enumerate(zip(found, expected)):
    for place, (new, old) in enumerate(zip(ours, theirs)):
        same = np.allclose(new, old, atol=1e-3) if new.size > 100 else new.tobytes() == old.tobytes()
        assert same, (step, place, new, old)
print("equal")
"""


@pytest.mark.parametrize("kind", ["dry-run", "noticed", "cudnn"])
def test_random_ops_go_on_where_they_stopped(kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TFMEM_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "equal" in done.stdout
