"""Nets that are recorded op by op: what recorded ops share, and what they must not."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfmem import dynamic


def test_constants_keep_signs_of_zeros_and_nan() -> None:
    variable = tf.Variable([2.0])
    handle = dynamic.specialize([variable])
    x = dynamic.vector(variable)
    losses = [x / dynamic.constant(value) for value in (0.0, -0.0, float("nan"), float("inf"))]
    np.testing.assert_array_equal(handle.forward_backward(losses).losses, [np.inf, -np.inf, np.nan, 0.0])


def test_so_do_those_of_a_kind() -> None:
    variable = tf.Variable([2.0])

    def parts(children) -> dynamic.Result:
        x = dynamic.vector(variable)
        return dynamic.Result((x,), x, dynamic.concat([x / 0.0, x / -0.0, x * 0.0, x * -0.0]))

    handle = dynamic.specialize([variable], {"node": dynamic.node(parts)}, state=(1,))
    (output,) = handle.forward_backward([handle.node("node")]).outputs
    expected = np.array([[np.inf, -np.inf, 0.0, -0.0]], np.float32)
    np.testing.assert_array_equal(output.numpy().view(np.int32), expected.view(np.int32))


def test_ops_of_one_name_and_other_sizes_settings_or_variables_are_other_kinds() -> None:
    """In one net and batch, in an order in which each could be taken for the one before."""
    rng = np.random.default_rng(0)
    square, other = (tf.Variable(rng.normal(size=(4, 4)).astype(np.float32)) for _ in range(2))
    vector = tf.Variable(rng.normal(size=4).astype(np.float32))
    handle = dynamic.specialize([square, other, vector])
    x = dynamic.vector(vector)
    given = [
        dynamic.matvec(square, x),
        dynamic.matvec(other, x),
        dynamic.matmul(x, square),
        dynamic.concat(dynamic.split(x, 2)[::-1]),
        dynamic.concat(dynamic.split(x, [1, 3])[::-1]),
        dynamic.dropout(x, 0.0),
    ]
    weights = np.arange(1, 5, dtype=np.float32)
    losses = [
        dynamic.add_n([w * part for w, part in zip(weights, dynamic.split(value, 4), strict=True)]) for value in given
    ]
    a, b, v = square.numpy(), other.numpy(), vector.numpy()
    expected = [a @ v, b @ v, v @ a, v[[2, 3, 0, 1]], v[[1, 2, 3, 0]], v]
    np.testing.assert_allclose(handle.forward_backward(losses).losses, [weights @ each for each in expected], rtol=1e-5)


def test_a_variable_is_forgotten_and_one_in_its_place_is_another() -> None:
    gone = []
    for width in (3, 5, 3, 2):  # Python gives them the same place in memory, mostly
        variable = tf.Variable(tf.ones([width]))
        assert dynamic.vector(variable).width == width
        gone.append(weakref.ref(variable))
        del variable
        gc.collect()
    assert not any(reference() for reference in gone)


@pytest.mark.parametrize("ids", [np.int64(1), tf.constant(1), 1])
def test_an_integer_may_come_from_anywhere(ids) -> None:
    table = tf.Variable([[1.0], [5.0]])
    handle = dynamic.specialize([table])
    loss = dynamic.reduce_sum(dynamic.embedding_lookup(table, ids))
    assert handle.forward_backward([loss]).losses.numpy() == [5.0]


def test_an_integer_out_of_range_is_refused_when_it_is_recorded() -> None:
    table = tf.Variable([[1.0], [5.0]])
    with pytest.raises(dynamic.DynamicError, match="lookup: 2 is out of range; expected 0 to 1"):
        dynamic.embedding_lookup(table, 2)
