"""Optimised functions may be called from several threads."""

import threading
import time

import numpy as np
import tensorflow as tf

import tfmem
from tests.tf.memop_trips import settled
from tfmem.api import make_engine
from tfmem.runtime import measuring_lock
from tfmem.runtime.measured_call import Meter

SPARE = 1 << 20  # a step that has settled runs beside one that is measured, and is counted with it
STEPS = 12


def together(*tasks):
    """Run the tasks at once; the first error of any is raised."""
    errors, start = [], threading.Barrier(len(tasks))

    def run(task):
        try:
            start.wait()
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[task]) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_functions_at_once(new_net, batch, flow, smallest):
    plain = tf.function(new_net().step)
    expected = [float(plain(*batch)) for _ in range(STEPS)]
    least = smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    functions = [tfmem.optimize(tf.function(new_net().step), memory_budget=least + SPARE) for _ in range(2)]
    found = [[], []]

    def train(which):
        for _ in range(STEPS):
            found[which].append(float(functions[which](*batch)))

    together(lambda: train(0), lambda: train(1))
    assert found == [expected, expected]
    assert flow.moved > 0
    assert settled(flow.library).live_tickets == 0


def test_one_function_from_two_threads(new_net, batch, flow, smallest):
    """Weights stay, so that the order of calls does not matter."""
    net = new_net()

    def make():
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = net.loss(x, y)
            return loss, *tape.gradient(loss, net.variables)

        return tf.function(step)

    batches = [batch, (batch[0] * 0.5, batch[1])]
    plain = make()
    expected = [[each.numpy().tobytes() for each in plain(*given)] for given in batches]
    least = smallest(lambda size: tfmem.optimize(make(), memory_budget=size)(*batch))
    function = tfmem.optimize(make(), memory_budget=least + SPARE)

    def check(which):
        for _ in range(STEPS):
            assert [each.numpy().tobytes() for each in function(*batches[which])] == expected[which]

    together(lambda: check(0), lambda: check(1))
    assert flow.moved > 0
    assert tfmem.report(function).decision == "moved"


def test_one_model_of_weights_updated_from_two_threads(new_net, batch, flow, smallest):
    """As without tfmem: each step computes all from the weights that it read, and each of its updates is made, once.

    Weights and updates are multiples of 2**-12, so that their sums are exact, in any order.
    """
    net = new_net()
    for variable in net.variables:
        variable.assign(tf.round(variable * 4096.0) / 4096.0)
    start = [variable.numpy() for variable in net.variables]

    def gradients(x, y, *values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss = net.loss(x, y, values)
        return loss, *tape.gradient(loss, values)

    def make():
        def step(x, y):
            values = [variable.read_value() for variable in net.variables]
            loss, *found = gradients(x, y, *values)
            updates = [tf.round(gradient * 409.6) / 4096.0 for gradient in found]
            for variable, update in zip(net.variables, updates, strict=True):
                variable.assign_sub(update)
            return values, [loss, *found], updates

        return tf.function(step)

    least = smallest(lambda size: tfmem.optimize(make(), memory_budget=size)(*batch))
    function = tfmem.optimize(make(), memory_budget=least + SPARE)
    steps = [[], []]

    def train(which):
        for _ in range(STEPS):
            steps[which].append(tf.nest.map_structure(lambda tensor: tensor.numpy(), function(*batch)))

    together(lambda: train(0), lambda: train(1))
    assert flow.moved > 0
    assert settled(flow.library).live_tickets == 0
    plain = tf.function(gradients)
    for values, found, _ in (*steps[0], *steps[1]):
        assert [each.numpy().tobytes() for each in plain(*batch, *values)] == [each.tobytes() for each in found]
    for place, (variable, first) in enumerate(zip(net.variables, start, strict=True)):
        left, right = ([first * 0, *(updates[place] for _, _, updates in own)] for own in steps)
        left, right = np.cumsum(left, 0), np.cumsum(right, 0)
        assert np.any(left[-1])
        np.testing.assert_array_equal(variable.numpy(), first - left[-1] - right[-1])
        for own, done, others in ((steps[0], left, right), (steps[1], right, left)):
            # A step has read what the thread's steps before it did, and part of what the other's did.
            for number, (values, _, _) in enumerate(own):
                read = first - done[number] - others
                assert (values[place] == read).reshape(STEPS + 1, -1).all(1).any()


def test_observed_steps_of_one_trace_run_one_at_a_time(new_net, batch, flow, smallest, monkeypatch):
    """What a step's probes tell is of the plan that the next stage goes on from."""
    running, most, sampled = [], [], Meter.sampled

    def counted(*given):
        running.append(None)
        most.append(len(running))
        time.sleep(0.02)
        try:
            return sampled(*given)
        finally:
            running.pop()

    monkeypatch.setattr(Meter, "sampled", counted)
    least = smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    function = tfmem.optimize(tf.function(new_net().step), memory_budget=least + SPARE)
    together(*[lambda: [function(*batch) for _ in range(4)]] * 3)
    assert set(most) == {1}


def test_measured_calls_run_one_at_a_time():
    engine = make_engine(tfmem.Options(memory_budget="1GiB"))
    running, most = [], []

    def call():
        running.append(None)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    together(*[lambda: [engine.meter.watched(call) for _ in range(4)]] * 3)
    assert most == [1] * 12


def test_a_measured_call_within_another_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.01)
    engine = make_engine(tfmem.Options(memory_budget="1GiB"))
    inner = engine.meter.watched(lambda: engine.meter.watched(lambda: 7))[0]
    assert inner[0] == 7
    assert engine.meter.watched(lambda: 8)[0] == 8
