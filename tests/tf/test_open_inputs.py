"""Budgets and inputs of which a dimension is open: what depends on data is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.two_layers import TwoLayers

OPEN = tf.TensorSpec([None, 4], name="x")
PLACE = tf.TensorSpec([], tf.int32)


class Net(TwoLayers):
    """Two layers; the step's input is a part of what it is given."""

    def slice(self, x: Any, begin: Any, end: Any) -> Any:
        return self.train(x[begin:end])


@pytest.fixture(name="x")
def fixture_x() -> Any:
    return tf.random.stateless_normal([64, 4], [3, 4])


@pytest.mark.parametrize("rows", [None, 64])
def test_a_slice_is_left_alone(rows: int | None, x: Any, flow: Any) -> None:
    signature = [tf.TensorSpec([rows, 4], name="x"), PLACE, PLACE]
    function = tfmem.optimize(tf.function(Net().slice, input_signature=signature), memory_budget="1GiB")
    plain = tf.function(Net().slice)
    for begin in range(5):
        place = tf.constant(begin), tf.constant(begin + 9)
        assert function(x, *place).numpy() == plain(x, *place).numpy()
    assert "its size is not known before it runs" in dict(tfmem.report(function).not_moved).values()


def test_a_row_of_a_ragged_tensor(x: Any, flow: Any) -> None:
    ragged = tf.RaggedTensor.from_row_lengths(x, [3, 20, 41])

    def step(net: Net) -> Any:
        return tf.function(lambda rows, place: net.train(rows[place]))

    function, plain = tfmem.optimize(step(Net()), memory_budget="1GiB"), step(Net())
    for place in (0, 1, 2, 1):
        assert function(ragged, tf.constant(place)).numpy() == plain(ragged, tf.constant(place)).numpy()


def test_what_the_caller_left_open_is_still_told(x: Any, flow: Any) -> None:
    """A part of a known size may be read from an open input, but the whole of it waits for its gradient."""

    def step(net: Net) -> Any:
        def run(x: Any, begin: Any, end: Any) -> Any:
            net.slice(x, begin, end)
            return net.train(x)

        return tf.function(run, input_signature=[OPEN, PLACE, PLACE])

    place = tf.constant(1), tf.constant(7)
    with pytest.raises(tfmem.UnknownShapeError, match=r"input_shapes=\{'x'"):
        tfmem.optimize(step(Net()), memory_budget="1GiB")(x, *place)
    function = tfmem.optimize(step(Net()), memory_budget="1GiB", input_shapes={"x": (64, 4)})
    assert function(x, *place).numpy() == step(Net())(x, *place).numpy()


def test_slices_of_graphs(flow: Any) -> None:
    v1 = tf.compat.v1

    def made() -> Any:
        with tf.Graph().as_default() as graph:
            x, begin = v1.placeholder(tf.float32, [None, 4], name="x"), v1.placeholder(tf.int32, [], name="begin")
            w = v1.get_variable("w", [4, 4], use_resource=True)
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x[begin : begin + 9] @ w) @ w)))
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        return graph

    graph = made()
    tfmem.optimize(graph, memory_budget="1GiB", fetches=["train"])
    assert tfmem.report(graph).decision == "unchanged: fits"
    after = tfmem.optimize(made().as_graph_def(), memory_budget="1GiB", fetches=["train"])
    assert tfmem.report(after).decision == "unchanged: fits"
