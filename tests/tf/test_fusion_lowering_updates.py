"""Every op that updates variables, lowered: the variables hold what TensorFlow gives them, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.fusion_lowering import Lowered

raw = tf.raw_ops


def values(*shapes, seed=0):
    draws = np.random.default_rng(seed)
    return [draws.normal(size=shape).astype("float32") for shape in shapes]


def updated(update, *held, arguments=()):
    """What the variables hold after `update(handles, *arguments)`, by the program and by TensorFlow."""
    variables = [tf.Variable(value) for value in held]
    gradient, *_ = values((6, 8), seed=9)

    def function(gradient, *arguments):
        update([variable.handle for variable in variables], gradient, *arguments)

    lowered = Lowered(function, gradient, *map(np.float32, arguments), variables=variables)
    return lowered.run(), lowered.expected()


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("op", ["AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"])
def test_assignments(op):
    (var,) = values((6, 8))
    same(*updated(lambda handles, gradient: getattr(raw, op)(resource=handles[0], value=gradient * 2.0), var))


def test_gradient_descent():
    (var,) = values((6, 8))
    update = lambda handles, gradient, rate: raw.ResourceApplyGradientDescent(  # noqa: E731
        var=handles[0], alpha=rate, delta=gradient
    )
    same(*updated(update, var, arguments=[0.1]))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("op", ["ResourceApplyMomentum", "ResourceApplyKerasMomentum"])
def test_momentum(op, nesterov):
    def update(handles, gradient, rate, momentum):
        getattr(raw, op)(
            var=handles[0], accum=handles[1], lr=rate, grad=gradient, momentum=momentum, use_nesterov=nesterov
        )

    same(*updated(update, *values((6, 8), (6, 8)), arguments=[0.1, 0.9]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam(nesterov):
    def update(handles, gradient, power1, power2, rate):
        raw.ResourceApplyAdam(
            var=handles[0], m=handles[1], v=handles[2], beta1_power=power1, beta2_power=power2, lr=rate, beta1=0.9,
            beta2=0.999, epsilon=1e-7, grad=gradient, use_nesterov=nesterov,
        )  # fmt: skip

    var, first, second = values((6, 8), (6, 8), (6, 8))
    same(*updated(update, var, first, np.abs(second), arguments=[0.9**3, 0.999**3, 0.001]))


def test_rms_prop():
    def update(handles, gradient, rate):
        raw.ResourceApplyRMSProp(
            var=handles[0], ms=handles[1], mom=handles[2], lr=rate, rho=0.9, momentum=0.3, epsilon=1e-7, grad=gradient
        )

    var, squares, moment = values((6, 8), (6, 8), (6, 8))
    same(*updated(update, var, np.abs(squares), moment, arguments=[0.001]))


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("epsilon", [None, 1e-7])
def test_adagrad(epsilon, slots):
    def update(handles, gradient, rate):
        if epsilon is None:
            raw.ResourceApplyAdagrad(var=handles[0], accum=handles[1], lr=rate, grad=gradient, update_slots=slots)
        else:
            raw.ResourceApplyAdagradV2(
                var=handles[0], accum=handles[1], lr=rate, epsilon=epsilon, grad=gradient, update_slots=slots
            )

    var, squares = values((6, 8), (6, 8))
    found, expected = updated(update, var, np.abs(squares), arguments=[0.1])
    for ours, theirs in zip(found, expected, strict=True):
        # Of one over a square root TensorFlow has an estimate, another one for each kind of processor.
        np.testing.assert_allclose(ours, theirs, rtol=5e-7, atol=1e-7)
