"""Batches that `tf.data` makes: those of `Handle.batch`, and a net trains on them to the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.dynamic_inputs_net import ROWS, WANTED, batch, expected, given
from tests.tf.dynamic_inputs_net import Net as InputsNet
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic


def same(a: dynamic.Batch, b: dynamic.Batch) -> bool:
    return all(x.to_list() == y.to_list() for x, y in zip(a, b, strict=True))


def test_batches_are_those_of_the_handle() -> None:
    handle = TreeLSTM().specialize()
    roots = [nodes(handle, tree) for tree in random_trees(10)]
    found = list(dynamic.dataset(handle.batch(roots), 4))
    assert all(same(a, handle.batch(roots[at : at + 4])) for a, at in zip(found, (0, 4, 8), strict=True))
    assert len(list(dynamic.dataset(handle.batch(roots), 4, drop_remainder=True))) == 2


def test_every_epoch_has_each_example_once_in_another_order() -> None:
    handle = TreeLSTM().specialize()
    whole = handle.batch([nodes(handle, tree) for tree in random_trees(12)])
    data = dynamic.dataset(whole, 5, beside=[tf.range(12)], shuffle=True, seed=3)
    orders = [[int(number) for _, numbers in data for number in numbers] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    for part, numbers in data:
        assert same(part, dynamic.Batch(*(tf.gather(ragged, numbers) for ragged in whole)))


@pytest.mark.parametrize("in_function", [False, True])
def test_a_net_trains_to_the_same_numbers(in_function: bool) -> None:
    nets = TreeLSTM(), TreeLSTM()
    plain, piped = (net.specialize(optimizer=dynamic.Adam()) for net in nets)
    roots = [nodes(plain, tree) for tree in random_trees(9)]
    for at in range(0, 9, 4):
        plain.step(roots[at : at + 4])
    data = dynamic.dataset(plain.batch(roots), 4)

    def train() -> None:
        for part in data:
            piped.step(part)

    (tf.function(train) if in_function else train)()
    for a, b in zip(plain.parameters, piped.parameters, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_of_inputs_travel_beside_the_graphs() -> None:
    net = InputsNet()
    handle = net.specialize()
    losses, _ = expected(net, *given(), [net.encode])
    beside = [tf.ragged.constant([rows.tolist() for rows in ROWS], ragged_rank=1), tf.constant(np.stack(WANTED))]
    found = []
    for part, features, targets in dynamic.dataset(batch(handle, whole=False), 2, beside=beside):
        found += handle.forward(part, inputs=[features, targets]).losses.numpy().tolist()
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    handle = TreeLSTM().specialize()
    whole = handle.batch([nodes(handle, tree) for tree in random_trees(3)])
    with pytest.raises(dynamic.DynamicError, match=r"beside\[1\] has shape \(2,\); expected 3 rows"):
        dynamic.dataset(whole, 2, beside=[tf.range(3), tf.range(2)])
    with pytest.raises(dynamic.DynamicError, match="expected kinds, children and arguments"):
        dynamic.dataset(3, 2)
