"""`tfmem.verify` says whether two functions compute the same, and leaves the variables as they were."""

import numpy as np
import pytest
import tensorflow as tf

import tfmem

KIB = 1 << 10


def test_an_optimised_step_is_equal(new_net, batch, flow, smallest):
    net = new_net()
    step = tf.function(net.step)
    least = smallest(lambda size: tfmem.optimize(step, memory_budget=size)(*batch))
    start = [variable.numpy() for variable in net.variables]
    optimized = tfmem.optimize(step, memory_budget=least + 256 * KIB)
    found = tfmem.verify(step, optimized, batch, steps=6, variables=net.variables)
    assert found == tfmem.Verification(outputs=1, variables=11, steps=6, bit_equal=True, largest_difference=0.0)
    assert flow.moved > 0
    for variable, value in zip(net.variables, start, strict=True):
        assert np.array_equal(variable, value)


def test_differences_are_told():
    variable = tf.Variable([1.0, 2.0], name="weights")

    def add(amount):
        def step(x):
            variable.assign_add(amount * x)
            return {"sum": tf.reduce_sum(x), "x": x}

        return step

    x = tf.ones([2])
    with pytest.raises(tfmem.VerificationError, match=r"step 0: variable 'weights:0' differs by .*allowed is 0"):
        tfmem.verify(add(1.0), add(1.001), [x], variables=[variable])
    assert variable.numpy().tolist() == [1.0, 2.0]
    found = tfmem.verify(add(1.0), add(1.001), [x], variables=[variable], tolerance=0.01)
    assert not found.bit_equal
    assert 0 < found.largest_difference < 0.01
    assert found.outputs == 2


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([1.0], [2.0], "output 0 differs by 1"),
        ([1.0], [np.nan], "output 0 differs by inf"),
        ([np.inf], [1.0], "output 0 differs by inf"),
        ([1.0, 2.0], [1.0], r"output 0 is float64\(1,\), the original's is float64\(2,\)"),
        ([1.0], [1], "output 0 is int64"),
        (["a"], ["b"], "output 0 differs by inf"),
        (np.array(["a"], object), np.array(["b"], object), "output 0 differs by inf"),
        (tf.constant([1.0], tf.bfloat16), tf.constant([1.5], tf.bfloat16), "output 0 differs by 0.5"),
        ([True], [False], "output 0 differs by 1"),
        (np.array([2**53 + 1]), np.array([2**53]), "output 0 differs by"),
    ],
)
def test_what_counts_as_different(one, other, message):
    with pytest.raises(tfmem.VerificationError, match=message):
        tfmem.verify(lambda: np.asarray(one), lambda: np.asarray(other), [])


def test_outputs_that_are_missing():
    with pytest.raises(tfmem.VerificationError, match="returns 1 outputs, the original 2"):
        tfmem.verify(lambda: (1.0, 2.0), lambda: 1.0, [])


@pytest.mark.parametrize("value", [np.nan, np.inf, b"text", "text", 1 + 2j, True, 7])
def test_what_counts_as_equal(value):
    found = tfmem.verify(lambda: np.array([value, value]), lambda: np.array([value, value]), [])
    assert found.bit_equal


def test_variables_come_back_after_an_error():
    variable = tf.Variable(1.0)

    def fail():
        variable.assign(5.0)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        tfmem.verify(lambda: variable.assign_add(1.0), fail, [], variables=[variable])
    assert float(variable) == 1.0
