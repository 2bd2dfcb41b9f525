"""Results that wait for nothing but what they are computed from, and assignments that are made all the same."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic
from tfmem.capture.early_results import call_unrecorded, with_early_results


def counted() -> tuple[tf.Variable, tf.types.experimental.ConcreteFunction]:
    count = tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def function(x):
        count.assign_add(1)
        return {"twice": 2 * x, "same": x}

    return count, function.get_concrete_function()


def test_results_wait_for_no_assignment():
    count, cf = counted()
    x = tf.constant([1.0, 2.0])
    assert all(output.op.control_inputs for output in cf.outputs)
    early = with_early_results(cf)
    assert not any(output.op.control_inputs for output in early.outputs)
    assert "NoOp" not in [op.type for op in early.graph.get_operations()]  # it would be placed, and be waited for
    for number in (1, 2, 3):
        found = call_unrecorded(early, [x])
        assert count.numpy() == number
        assert found["twice"].numpy().tolist() == [2, 4]
        assert found["same"].numpy().tolist() == [1, 2]


def test_no_tape_knows_of_a_call():
    _, cf = counted()
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = call_unrecorded(with_early_results(cf), [x])
    assert tape.gradient(found["twice"], x) is None


def test_a_step_under_a_tape_trains_as_without():
    """Nor does it warn that something runs unmodified."""
    losses = []
    for taped in (False, True):
        net = TreeLSTM(hidden=6, width=4)
        handle = net.specialize(optimizer=dynamic.Adam(0.05))
        batch = handle.batch([nodes(handle, tree) for tree in random_trees(3, most=5)])
        for _ in range(3):
            with tf.GradientTape() if taped else contextlib.nullcontext():
                losses.append(handle.step(batch).losses.numpy().tolist())
    assert losses[:3] == losses[3:]
    assert losses[0] != losses[1]
