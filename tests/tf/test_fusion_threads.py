"""TfmemFusion in several threads and sessions at once: no update is lost, and none is seen by halves."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Assign, Read, Region
from tests.fusion_regions import softmax_step
from tests.tf.fusion_calls import product, run_region
from tests.tf.fusion_variables import ADD, FOUR, INCREMENT, kernel, ones


def test_two_threads_lose_no_update() -> None:
    v, w = tf.Variable(tf.zeros([4])), tf.Variable(tf.zeros([4]))
    steps = (
        Read(0, 1),
        Read(1, 2),
        kernel(ADD, (1, 0), (3,)),
        kernel(ADD, (2, 3), (4,)),
        Assign(0, 3),
        Assign(1, 4),
    )
    both = Region(1, (FOUR, FOUR), (FOUR,) * 5, steps, ())
    count = 300

    def run(first: Any, second: Any) -> None:
        step = tf.function(lambda x: run_region(both, [x], [first.handle, second.handle]))
        for _ in range(count):
            step(ones())

    def read() -> None:
        for _ in range(count):
            found = v.read_value().numpy()
            assert (found == found[0]).all()

    threads = [threading.Thread(target=run, args=pair) for pair in ((v, w), (w, v), (v, w))]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    # Each step adds one to v and then v to w, or the other way around: all of them, in some order.
    values = v.numpy(), w.numpy()
    assert all((value == value[0]).all() and value[0] >= count for value in values), values


def test_threads_count_together() -> None:
    v = tf.Variable(tf.zeros([4]))
    step = tf.function(lambda x: run_region(INCREMENT, [x], [v.handle]))
    step(ones())
    threads = [threading.Thread(target=lambda: [step(ones()) for _ in range(200)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    np.testing.assert_array_equal(v, [601] * 4)


def test_threads_train_together() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((16, 20), np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 16)]
    w, b = tf.Variable(tf.zeros([20, 10])), tf.Variable(tf.zeros([10]))
    step = tf.function(lambda x, y: run_region(softmax_step(product, None, 20), [x, y], [w.handle, b.handle])[0])
    first = float(step(x, y))
    losses: list[float] = []
    threads = [threading.Thread(target=lambda: losses.extend(float(step(x, y)) for _ in range(50))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    # One after the other, in any order: each loss is smaller than the one before, and none is there twice.
    assert len(set(losses)) == 150
    assert max(losses) < first


def test_sessions_of_a_graph() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4])
        v = tf.compat.v1.get_variable("v", initializer=tf.zeros([4]), use_resource=True)
        region = Region(1, (FOUR,), INCREMENT.values, INCREMENT.steps, (2,))
        (out,) = run_region(region, [x], [v.handle])
        for _ in range(2):
            with tf.compat.v1.Session() as session:
                with pytest.raises(tf.errors.FailedPreconditionError):
                    session.run(out, {x: np.ones(4)})
                session.run(v.initializer)
                for count in (1, 2, 3):
                    np.testing.assert_array_equal(session.run(out, {x: np.ones(4)}), [count] * 4)
