"""What XLA would leave out of a step: errors, NaN and the order of equals; such a step is not XLA's."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tfmem.capture.xla_errors import left_out

WHOLE = tf.constant([7, 8, 9])
REAL = tf.constant(np.eye(3, dtype=np.float32))

ERRORS = {  # with a call at which TensorFlow raises
    "divided": (lambda n: WHOLE // n, tf.constant([2, 0, 4]), "divided by zero"),
    "rest": (lambda n: WHOLE % n, tf.constant([2, 0, 4]), "divided by zero"),
    "truncated": (lambda n: tf.truncatediv(WHOLE, n), tf.constant([2, 0, 4]), "divided by zero"),
    "by a constant zero": (lambda n: n // tf.constant([1, 0, 1]), WHOLE, "divided by zero"),
    "by a fraction cut off": (lambda n: n // tf.cast(tf.constant([2.0, 0.5, 1.0]), tf.int32), WHOLE, "divided by zero"),
    "power": (lambda n: WHOLE**n, tf.constant([1, -1, 2]), "negative exponent"),
    "inverse": (tf.linalg.inv, tf.zeros([2, 2]), "no inverse"),
    "solved": (lambda a: tf.linalg.solve(a, tf.ones([2, 1])), tf.zeros([2, 2]), "no inverse"),
    "reversed": (lambda n: tf.reverse_sequence(REAL, n, seq_axis=1), tf.constant([1, -2, 3]), "no sequence"),
    "in a loop": (
        lambda n: tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + WHOLE // n), (0, WHOLE))[1],
        tf.constant([2, 0, 4]),
        "divided by zero",
    ),
}
ON_A_CPU = {
    "largest": tf.reduce_max,
    "segments": lambda x: tf.math.unsorted_segment_max(x, [0, 0, 1], 2),
    "sorted": tf.sort,
    "ranked": lambda x: tf.math.top_k(x, 2).indices,
}


def gradients(x):
    """The gradient of a mean and a sum over sizes that are not known while it is traced."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_mean(x**2, 1, keepdims=True) * tf.reduce_sum(x, 0, keepdims=True)
        loss = tf.reduce_mean(y)
    return tape.gradient(loss, x)


NOTHING = {
    "gradients of means": (gradients, tf.TensorSpec([None, None])),
    "by a constant": (lambda n: n // 2 + n % -3, WHOLE),
    "square": (lambda n: n**2, WHOLE),
    "floats": (lambda x: x // 0.5 + x**-1.0, REAL),
    "largest of whole numbers": (
        lambda n: tf.reduce_max(n) + tf.maximum(n, 3) - tf.math.segment_max(n, [0, 0, 1]),
        WHOLE,
    ),
    "products": (lambda x: tf.nn.softmax(x @ x), REAL),
}


def graph_of(function, given):
    return tf.function(function).get_concrete_function(given).graph.as_graph_def()


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_tensorflow_raises(name):
    function, given, what = ERRORS[name]
    with pytest.raises(tf.errors.OpError):
        tf.function(function)(given)
    for on_a_cpu in (True, False):
        assert what in left_out(graph_of(function, given), on_a_cpu)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_nan_and_the_order_of_equals_on_a_cpu(name):
    graph = graph_of(ON_A_CPU[name], REAL)
    assert "on a CPU" in left_out(graph, True)
    assert not left_out(graph, False)


@pytest.mark.parametrize("name", NOTHING)
def test_what_xla_computes_alike(name):
    function, given = NOTHING[name]
    assert not left_out(graph_of(function, given), True)


def test_a_step_keeps_its_error_and_says_why():
    def step(x, n):
        for _ in range(12):
            x = tf.sin(x) * 1.01 + tf.cos(x) * 0.5
        return x, WHOLE // n

    made = tfmem.optimize(
        tf.function(step),
        passes=("fusion",),
        fusion=tfmem.FusionOptions(tune="full"),
        cache_directory="",
        progress=False,
    )
    for _ in range(3):
        made(REAL, tf.constant([2, 3, 4]))
    report = tfmem.report(made)
    assert report.decided
    assert any("would not raise an error for an integer that is divided by zero" in note for note in report.notes)
    with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
        made(REAL, tf.constant([2, 0, 4]))
