"""What no op reads of conditions and loops is not computed, as in TensorFlow; values, draws and effects stay."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.control_flow import Maker
from tests.tf.grappler_nets import computing, ops_of
from tests.tf.memory_in_use import in_use
from tfmem.capture import unread_results
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.unread_results import without_unread
from tfmem.frontends.graph_def import capture_graph_def

SPEC = tf.TensorSpec([3, 3])
UNREAD = {"Sinh", "Cosh", "Tan", "Asin", "Acos", "Atan", "Erf", "Digamma", "Expm1"}  # of results that no op reads
INPUTS = [tf.random.stateless_normal([3, 3], [seed, 2]) + shift for seed, shift in ((1, 3.0), (2, -3.0))]


def restored(function):
    concrete = function.get_concrete_function(SPEC)
    captured = run_grappler(capture_concrete(concrete))
    return concrete, restore_concrete(concrete, captured, captured.graph_def)


def values(call, x):
    return [np.array(each) for each in tf.nest.flatten(call(x))]


def check(function):
    """Require plain values, and no op that TensorFlow does not run; returns the ops that ran. Reads are not counted:
    TensorFlow's Grappler merges those of several bodies."""
    plain, pruned = restored(function)
    ops = Counter()
    for x in INPUTS:
        ours, theirs = (ops_of(lambda x=x, call=call: call(x)) for call in (pruned, plain))
        more = {op for op, count in computing(ours).items() if count > theirs[op]}
        assert not more - {"ReadVariableOp"}
        for wanted, found in zip(values(plain, x), values(pruned, x), strict=True):
            np.testing.assert_array_equal(found, wanted)
        ops |= ours
    return ops


def test_a_condition():
    weights = tf.Variable(tf.ones([3, 3]))

    @tf.function
    def function(x):
        wide = tf.sinh(x)
        yes = lambda: (tf.cosh(wide), x @ weights, tf.tan(x))  # noqa: E731
        return tf.cond(tf.reduce_sum(x) > 0, yes, lambda: (x, tf.math.lgamma(x), wide))[1]

    ops = check(function)
    assert ops["Lgamma"] == 1
    assert not UNREAD & ops.keys()


def test_a_loop_whose_variables_feed_each_other():
    """`a` is read, `b` is what it is computed from, and `c` and `d` only feed each other."""

    @tf.function
    def function(x):
        def step(i, a, b, c, d):
            return i + 1, a + b, tf.sin(b), tf.asin(d), tf.acos(c)

        return tf.while_loop(lambda i, *_: i < 4, step, [0, x, x, tf.sinh(x), x])[1]

    ops = check(function)
    assert ops["Sin"] == 1
    assert not UNREAD & ops.keys()


def test_inside_of_each_other():
    @tf.function
    def function(x):
        def step(i, a, b):
            yes = lambda: (tf.math.lgamma(a), tf.math.erf(b), a)  # noqa: E731
            kept, gone, swapped = tf.cond(i % 2 == 0, yes, lambda: (swap(a)[0], tf.atan(b), a))
            return i + 1, kept + swapped, gone

        def swap(a):
            return tf.switch_case(tf.constant(1), [lambda: (a, a), lambda: (a * 2, tf.math.digamma(a))])

        return tf.while_loop(lambda i, *_: i < 3, step, [0, x, x])[1]

    ops = check(function)
    assert ops["Lgamma"] == 1
    assert not UNREAD & ops.keys()


def bodies_read(depth, monkeypatch):
    """How often a graph or body is pruned, of loops within each other."""

    def loops(x, left):
        wide = tf.sinh(x)
        if left == 0:
            return x * 0.5, wide
        body = lambda step, y, z: (step + 1, *loops(y + z, left - 1))  # noqa: E731
        return tf.while_loop(lambda step, *_: step < 2, body, [0, x, wide])[1:]

    captured = capture_concrete(tf.function(lambda x: loops(x, depth)[0]).get_concrete_function(SPEC))
    calls, pruned = [], unread_results._Pruning.pruned

    def counted(*given, **named):
        calls.append(given)
        return pruned(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(unread_results._Pruning, "pruned", counted)
        without_unread(captured)
    return len(calls)


def test_loops_within_loops_are_read_a_few_times_each(monkeypatch):
    """A solver of TensorFlow Probability showed inner loops that were read more often for each loop around them."""
    few, more = (bodies_read(depth, monkeypatch) for depth in (3, 6))
    assert 0 < more <= 2.5 * few


def test_gradients():
    """The gradient of a loop that keeps a list of everything for each gradient that might be asked for."""
    used, unused = tf.Variable(tf.ones([3, 3])), tf.Variable(tf.ones([3, 3]))

    @tf.function
    def function(x):
        with tf.GradientTape() as tape:

            def step(i, a, b):
                return i + 1, tf.tanh(a @ used), tf.math.expm1(b * unused)

            a, _ = tf.while_loop(lambda i, *_: i < 3, step, [0, x, x])[1:]
            yes = lambda: (a * used, tf.sinh(unused))  # noqa: E731
            kept, _ = tf.cond(tf.reduce_sum(x) > 0, yes, lambda: (a, unused + 0.0))
            loss = tf.reduce_sum(kept)
        return loss, tape.gradient(loss, used)

    ops = check(function)
    assert ops["TanhGrad"] == 1
    assert "Sinh" not in ops


def test_effects_stay_and_so_does_what_they_read():
    seen, count = tf.Variable(tf.zeros([3, 3])), tf.Variable(0)

    @tf.function
    def function(x):
        def effect():
            seen.assign(tf.exp(x))
            return tf.tan(x), x

        def step(i, a, b):
            count.assign_add(tf.cast(tf.reduce_sum(a) > 0, tf.int32) + 1)
            return i + 1, -a, tf.asin(b)

        tf.while_loop(lambda i, *_: i < 3, step, [0, x, x])
        return tf.cond(tf.reduce_sum(x) > 0, effect, lambda: (x, x + 1))[1]

    _, pruned = restored(function)
    for place, x in enumerate(INPUTS):
        ops = ops_of(lambda x=x: pruned(x))
        assert not UNREAD & ops.keys()
        assert int(count) == 3 + (2, 1)[place] + (0, 5)[place]
    np.testing.assert_allclose(seen, tf.exp(INPUTS[0]))


def test_seeded_draws_beside_some_that_nobody_reads():
    def make():
        @tf.function
        def function(x):
            yes = lambda: (tf.random.normal([3, 3], seed=1), tf.random.uniform([3, 3], seed=2))  # noqa: E731
            return tf.cond(tf.reduce_sum(x) > 0, yes, lambda: (x, tf.random.uniform([3, 3], seed=4)))[1]

        tf.random.set_seed(5)
        return function.get_concrete_function(SPEC)

    plain = make()
    wanted = [values(plain, x)[0] for x in (*INPUTS, *INPUTS)]
    again = make()
    captured = run_grappler(capture_concrete(again))
    pruned = restore_concrete(again, captured, captured.graph_def)
    tf.random.set_seed(5)
    found = [values(pruned, x)[0] for x in (*INPUTS, *INPUTS)]
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(wanted[0], wanted[2])


def results(call, variables):
    for place, variable in enumerate(variables):
        variable.assign(tf.fill([2, 2], (place + 1) / 3))
    made = [each for _ in range(3) for each in values(call, tf.constant([[0.3, -0.7], [1.1, 0.2]]))]
    return [*made, *(variable.numpy() for variable in variables)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_functions(first):
    pruned = 0
    for seed in range(first, first + 10):
        maker = Maker(seed)
        concrete = tf.function(maker, autograph=False).get_concrete_function(tf.TensorSpec([2, 2]))
        captured = capture_concrete(concrete)
        pruned += without_unread(captured) is not captured
        captured = run_grappler(captured)
        found = results(restore_concrete(concrete, captured, captured.graph_def), maker.variables)
        for one, other in zip(results(concrete, maker.variables), found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=f"seed {seed}")
    assert pruned > 2


def test_a_step_under_a_budget():
    @tf.function
    def function(x):
        wide = tf.tile(x, [400, 100])
        kept = tf.cond(tf.reduce_sum(x) > 0, lambda: (wide * 2, tf.sinh(wide)), lambda: (wide, wide + 1))[0]
        with tf.GradientTape() as tape:
            tape.watch(kept)
            loss = tf.reduce_sum(tf.tanh(kept) * tf.exp(-tf.abs(kept)))
        return loss, tf.reduce_sum(tape.gradient(loss, kept))

    wanted = values(function, INPUTS[0])
    optimized = tfmem.optimize(function, memory_budget=(1 << 30) + in_use(), passes=("offload",))
    for _ in range(4):
        np.testing.assert_allclose(values(optimized, INPUTS[0]), wanted, rtol=1e-6)


def test_what_is_all_read_stays_as_it_is():
    @tf.function
    def function(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: (x, x + 1), lambda: (x * 2, x))

    captured = capture_concrete(function.get_concrete_function(SPEC))
    assert without_unread(captured) is captured


def test_an_op_that_is_fetched_itself_keeps_its_results():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [3, 3], "x")
        loop = tf.while_loop(lambda i, *_: i < 3, lambda i, a, b: (i + 1, a * 2, tf.tan(b)), [0, x, x])
        tf.identity(loop[1], name="y")
    source = graph.as_graph_def()
    (name,) = [node.name for node in source.node if node.op in ("While", "StatelessWhile")]
    (place,) = {
        node.input[0] for node in source.node if node.name == graph.get_operation_by_name("y").inputs[0].op.name
    }
    outputs = {"y": 1, place: 5}
    for fetch, count in outputs.items():
        captured = without_unread(capture_graph_def(source, ["x"], [fetch]))
        (node,) = [node for node in captured.graph_def.node if node.name == name]
        assert (len(node.attr["T"].list.type) < 5) == (count == 1), (fetch, node.attr["T"])


@pytest.mark.parametrize("broken", ["result", "function", "argument"])
def test_what_cannot_be_read_stays(broken):
    @tf.function
    def function(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: (x, tf.tan(x)), lambda: (x * 2, x))[0]

    captured = capture_concrete(function.get_concrete_function(SPEC))
    (node,) = [node for node in captured.graph_def.node if node.op in ("If", "StatelessIf")]
    (branch,) = [
        f for f in captured.graph_def.library.function if f.signature.name == node.attr["then_branch"].func.name
    ]
    if broken == "result":
        branch.ret.clear()
    elif broken == "function":
        node.attr["then_branch"].func.name = "no_such_function"
    else:
        del branch.signature.input_arg[0]
    assert without_unread(captured) is captured
