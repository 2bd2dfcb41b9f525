"""Budgets and what while loops keep for their gradient."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import load
from graph_passes.report import RECOMPUTED
from tests.tf.loop_nets import STEPS, TwoLoops
from tests.tf.memory_in_use import in_use

MIB = 1 << 20


class Net:
    """`STEPS` steps of tanh(h @ w) under a tape: each keeps one h of 512 KiB."""

    def __init__(self) -> None:
        self.w = tf.Variable(0.2 * tf.random.stateless_normal([64, 64], [1, 2]))

    def step(self, x: Any, steps: Any = STEPS) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for _ in tf.range(steps):
                h = tf.tanh(h @ self.w)
            loss = tf.reduce_mean(h * h)
        self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
        return loss

    def waves(self, x: Any) -> Any:
        """No op that is a gradient's alone."""
        with tf.GradientTape() as tape:
            h = x
            for _ in tf.range(STEPS):
                h = tf.sin(h * self.w[0])
            loss = tf.reduce_sum(h)
        self.w.assign_sub(1e-6 * tf.convert_to_tensor(tape.gradient(loss, self.w)))
        return loss


@pytest.fixture(name="x")
def fixture_x() -> Any:
    return tf.random.stateless_normal([2048, 64], [3, 4])


def within(function: Any, budget: int, **options: Any) -> Any:
    return tfmem.optimize(tf.function(function), memory_budget=budget, passes=("offload",), **options)


def test_a_loops_lists_count(x: Any, flow: Any) -> None:
    function = within(Net().step, 2 * MIB + in_use())
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        function(x)
    assert caught.value.smallest_budget > 2 * MIB + in_use()
    room = STEPS * MIB // 2 + 4 * MIB  # for the lists as wholes: nothing has to move
    function, plain = within(Net().step, room + in_use()), tf.function(Net().step)
    for _ in range(5):
        assert function(x).numpy() == plain(x).numpy()
    report = tfmem.report(function)
    assert "OVER BUDGET" not in str(report)
    assert STEPS * MIB // 2 < report.peak_measured <= report.budget
    assert report.peak_before == pytest.approx(report.peak_measured, rel=0.1)
    assert not report.not_enforced


def test_so_do_they_where_nothing_is_observed(x: Any, flow: Any) -> None:
    with pytest.raises(tfmem.InfeasibleBudgetError):
        within(Net().step, 2 * MIB + in_use(), observe=False)(x)
    before = in_use()
    function = within(Net().step, 100 * MIB + before, observe=False)
    function(x)
    assert STEPS * MIB // 2 < tfmem.report(function).peak_predicted - before < (STEPS // 2 + 10) * MIB


def test_elements_that_the_allocator_does_not_count(flow: Any) -> None:
    """Elements of 128 KiB: the observed steps take them from the estimate."""
    before = in_use()
    function = within(Net().step, 100 * MIB + before)
    x = tf.random.stateless_normal([512, 64], [3, 4])
    for _ in range(5):
        function(x)
    report = tfmem.report(function)
    assert STEPS * MIB // 8 < report.peak_measured - before < 2 * STEPS * MIB // 8


def test_what_cannot_be_counted_is_told(x: Any, flow: Any) -> None:
    function, plain = within(Net().step, 64 * MIB + in_use()), tf.function(Net().step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            assert function(x, tf.constant(STEPS)).numpy() == plain(x, tf.constant(STEPS)).numpy()
    messages = [str(each.message) for each in caught if each.category is tfmem.TfmemWarning]
    assert len(messages) == 1
    assert "the budget is not enforced for the list 'while" in messages[0]
    report = tfmem.report(function)
    assert len(report.not_enforced) == 1
    assert "the budget is not enforced for" in str(report)
    assert tfmem.Report.from_json(report.to_json()) == report


def test_a_gradient_in_a_loop_is_one(x: Any, flow: Any) -> None:
    """That the step is over its budget says nothing of a missing gradient."""
    with pytest.raises(tfmem.InfeasibleBudgetError):
        within(Net().waves, MIB // 4 + in_use())(x)


def test_graphs_of_sessions(flow: Any) -> None:
    """Their loops are counted as functions' are, and told of."""
    v1 = tf.compat.v1

    def graph_of(steps: Any) -> Any:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [2048, 64], name="x")
            w = v1.get_variable("w", [64, 64], use_resource=True)
            count = v1.placeholder(tf.int32, [], name="count") if steps is None else steps
            loop = tf.while_loop(lambda i, h: i < count, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))
            v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(loop[1])), name="train")
        return graph

    budget = 5 * MIB + in_use()
    with pytest.raises(tfmem.InfeasibleBudgetError):
        tfmem.optimize(graph_of(STEPS), memory_budget=budget, fetches=["train"], passes=("offload",))
    graph = graph_of(None)
    with pytest.warns(tfmem.TfmemWarning, match="the budget is not enforced for"):
        tfmem.optimize(graph, memory_budget=budget, fetches=["train"], passes=("offload",))
    assert tfmem.report(graph).not_enforced
    with pytest.warns(tfmem.TfmemWarning, match="the budget is not enforced for"):
        tfmem.optimize(graph_of(None).as_graph_def(), memory_budget=budget, fetches=["train"], passes=("offload",))


def test_stacked_recurrent_layers(flow: Any) -> None:
    """The gradient of what the second one reads is a list that grows by sums."""
    layers = [keras.layers.SimpleRNN(256, return_sequences=True), keras.layers.SimpleRNN(256), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((50, 64)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    tfmem.optimize(model, memory_budget="1GiB", passes=("offload",))
    model.fit(tf.zeros([256, 50, 64]), tf.zeros([256, 1]), batch_size=256, epochs=4, verbose=0)
    report = tfmem.report(model)
    assert not report.not_enforced
    # each layer keeps what it makes in each step, twice, and the first one's results are a tensor as well
    assert report.peak_before > 4 * 50 * 256 * 256 * 4
    assert 0.6 < report.peak_before / report.peak_measured < 1.2


@pytest.mark.parametrize("policy", ["optimal", "autovm"])
def test_what_a_loop_keeps_waits_elsewhere_or_is_made_again(x: Any, flow: Any, policy: str) -> None:
    """A second run of the loop makes its lists; a copy moves tensors that two of its lists share once."""
    plain, library = tf.function(TwoLoops().step), load()
    function = within(TwoLoops().step, 28 * MIB + in_use(), policy=policy)
    for _ in range(6):
        assert function(x).numpy() == plain(x).numpy()
    before = library.counters()
    function(x)
    after = library.counters()
    report = tfmem.report(function)
    again = [each for each in report.transfers if each.offload_after == RECOMPUTED]
    copied = sum(each.bytes for each in report.transfers if each not in again)
    assert report.transfers
    assert "OVER BUDGET" not in str(report)
    assert report.peak_before - report.peak_measured >= 12 * MIB
    assert report.peak_predicted == pytest.approx(report.peak_measured, rel=0.15 if again else 0.02)
    assert policy == "optimal" or not again
    # A piece's last tensor stays while the next piece holds it, too: it moves where the next piece runs again.
    assert copied <= after.bytes_out - before.bytes_out <= copied + len(again) * MIB // 2
    assert after.bytes_in - before.bytes_in == after.bytes_out - before.bytes_out


def test_lists_come_back_as_they_were(flow: Any) -> None:
    """Elements of several shapes; those that something else holds, too, stay where they are."""
    library, raw = load(), tf.raw_ops

    @tf.function
    def trip(x: Any) -> Any:
        empty = raw.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32)
        first = raw.TensorListPushBack(input_handle=empty, tensor=x)
        second = first
        made = [x * 2.0, tf.reshape(x, [-1]) + 1.0, tf.zeros([0])]
        for each in made:
            first = raw.TensorListPushBack(input_handle=first, tensor=each)
        second = raw.TensorListPushBack(input_handle=second, tensor=made[0])
        handle = library.ops.mem_op_offload_lists(lists=[first, second], label="lists")
        released = library.ops.mem_op_release_lists(lists=[first, second], handle=handle)
        with tf.control_dependencies([released]):
            coming = library.ops.mem_op_prefetch_lists(handle=handle, N=2)
        there = library.ops.mem_op_await_lists(lists=coming, handle=handle)
        found = []
        for whole, count in zip(there, (4, 2), strict=True):
            rest = whole
            for _ in range(count):
                rest, item = raw.TensorListPopBack(input_handle=rest, element_shape=-1, element_dtype=tf.float32)
                found.append(item)
        return found

    x = tf.random.stateless_normal([64, 80], [1, 2])
    empty, flat, double, same, double_again, same_again = trip(x)
    assert bool(tf.reduce_all(double_again == double))
    assert bool(tf.reduce_all(same_again == x))
    assert empty.shape == [0]
    assert bool(tf.reduce_all(flat == tf.reshape(x, [-1]) + 1.0))
    assert bool(tf.reduce_all(double == 2.0 * x))
    assert bool(tf.reduce_all(same == x))


def test_lists_are_asked_for_lists() -> None:
    ops = load().ops
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a list"):
        ops.mem_op_offload_lists(lists=[tf.raw_ops.OptionalNone()], label="none")
    empty = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32)
    handle = ops.mem_op_offload_lists(lists=[empty], label="one")
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 lists were offloaded, but 2"):
        ops.mem_op_prefetch_lists(handle=handle, N=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="as its handle"):
        ops.mem_op_release_lists(lists=[empty], handle=empty)
