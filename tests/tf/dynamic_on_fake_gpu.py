"""Dynamic nets by the GPU's kernel, scripts and ops, on the fake driver, against TensorFlow and the CPU's definition.

Run by test_dynamic_gpu.py in a separate process: see `fake_gpu`."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.dynamic.choice import FIRST_STEPS, ROUNDS, TIMED_STEPS, Choice
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.dynamic.op import forward, forward_backward, step
from custom_ops.errors import TfmemWarning
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.load import load
from tests.tf.dynamic_gpu_nets import CHIP, as_arrays, assert_like, check_net, program_of
from tests.tf.dynamic_gpu_plugin import FakePrograms
from tests.tf.dynamic_inputs_net import Net, expected, given
from tests.tf.dynamic_inputs_net import batch as batch_of_inputs
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tf.fake_gpu import ARCH, FakeGpu, fixture_gpu, fixture_no_kernel_fails  # noqa: F401
from tests.tf.user_nets import NETS
from tfmem import dynamic
from tfmem.dynamic import handle as handles

WIDTH = 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("hidden", "width"), [(16, 12), (7, 5), (70, 33), (1, 1)])
def test_losses_and_gradients_are_tensorflows(gpu: FakeGpu, hidden: int, width: int) -> None:
    check_net(gpu, TreeLSTM(hidden=hidden, width=width), random_trees(9, most=7))


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        (Chip(processors=2, registers=0), {}),
        (Chip(processors=2, registers=0, shared=10 << 10), {}),
        (Chip(processors=5), {"rows": 3}),
        (CHIP, {"script_words": 8}),
    ],
    ids=["in shared memory", "streamed", "rows of a warp", "scripts in pieces"],
)
def test_every_home_of_weights(gpu: FakeGpu, chip: Chip, options: dict[str, int], request) -> None:
    program = check_net(gpu, TreeLSTM(hidden=24, width=12), random_trees(5, most=9), chip, **options)
    homes = {residence.home for residence in program.plan.residences}
    expected = {"in shared memory": {"shared"}, "streamed": {"L2"}}
    assert homes == expected.get(request.node.callspec.id, {"registers"})


def test_inputs_of_a_batch(gpu: FakeGpu) -> None:
    """Features, targets and any number of children; rows that there are not are refused."""
    net = Net()
    handle = net.specialize()
    features, targets = given()
    program, nodes_of = program_of(gpu, handle), batch_of_inputs(handle, whole=True)
    parameters = [*net.weights, features, targets]
    losses, _, gradients = forward_backward(load().ops, handle.spec, parameters, nodes_of, 0, None, program)
    wanted, of_parameters = expected(net, features, targets, parameters)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    for found, gradient in zip(gradients, of_parameters, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(found), tf.convert_to_tensor(gradient), rtol=1e-3, atol=1e-3)
    parameters[-1] = targets[:5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 5 of input 4, which has 5 rows in this batch"):
        forward_backward(load().ops, handle.spec, parameters, nodes_of, 0, None, program)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_a_parameter_of_rank_three(gpu: FakeGpu, dtype: tf.DType) -> None:
    """The kernel sees it as a matrix; numbers of bfloat16 are float32 within."""
    net = NETS["neural_tensor_net"](dtype)
    handle = net.specialize()
    program, batch = program_of(gpu, handle), net.batch(handle)
    losses, _, gradients = forward_backward(load().ops, handle.spec, handle.parameters, batch, 0, None, program)
    wanted, expected = net.eager()
    tolerance = 1e-4 if dtype == tf.float32 else 0.05
    np.testing.assert_allclose(tf.cast(losses, tf.float32), tf.cast(wanted, tf.float32), rtol=tolerance)
    for found, gradient in zip(gradients, expected, strict=True):
        assert found.dtype == dtype
        assert_like(
            *([tf.cast(tf.convert_to_tensor(each), tf.float32).numpy()] for each in (found, gradient)), tolerance
        )


def test_every_elementwise_op(gpu: FakeGpu) -> None:
    """One kind of node for each op, in one kernel."""
    rows = np.random.default_rng(0).uniform(0.3, 0.9, [4, 3 * WIDTH]).astype(np.float32)
    table = tf.Variable(rows)

    def kind(name: str):
        op = FLOAT_OPS[name]

        def node(children, row):
            parts = dynamic.split(dynamic.embedding_lookup(table, row), 3)[: op.arity]
            return dynamic.Result(loss=dynamic.reduce_sum(getattr(dynamic, name)(*parts)))

        return dynamic.node(node)

    handle = dynamic.specialize([table], {name: kind(name) for name in FLOAT_OPS})
    names = [name for name in FLOAT_OPS for _ in range(len(rows))]
    batch = handle.batch([handle.node(name, place % len(rows)) for place, name in enumerate(names)])
    program = program_of(gpu, handle)
    losses, _, (gradient,) = forward_backward(load().ops, handle.spec, [table], batch, 0, None, program)
    given = np.split(rows.astype(np.float64), 3, axis=-1)
    expected = [
        np.asarray(FLOAT_OPS[name].numpy(*given[: FLOAT_OPS[name].arity]), np.float64).sum(-1) for name in FLOAT_OPS
    ]
    np.testing.assert_allclose(losses, np.concatenate(expected), rtol=1e-5)
    with tf.device("/CPU:0"):
        total = np.zeros_like(rows, np.float64)
        for name in FLOAT_OPS.keys() - {"stop_gradient"}:
            step, arity = 1e-6, FLOAT_OPS[name].arity
            for column in range(arity * WIDTH):
                moved = np.eye(3 * WIDTH)[column] * step

                def value(shift, name=name, arity=arity):
                    parts = np.split(rows.astype(np.float64) + shift, 3, axis=-1)[:arity]
                    return np.asarray(FLOAT_OPS[name].numpy(*parts), np.float64).sum(-1)

                total[:, column] += (value(moved) - value(-moved)) / (2 * step)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), total, rtol=5e-4, atol=1e-3)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_updates_are_the_formulas(gpu: FakeGpu, rule: str) -> None:
    net = TreeLSTM(hidden=9, width=6)
    optimizer = {"sgd": dynamic.SGD(0.1), "momentum": dynamic.SGD(0.1, 0.9), "adam": dynamic.Adam(0.1)}[rule]
    handle = net.specialize(optimizer=optimizer)
    trees = random_trees(4, most=5)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    before = [parameter.numpy() for parameter in net.parameters]
    _, gradients = net.gradients(trees)
    counts = {"sgd": 0, "momentum": 1, "adam": 2}
    slots = [tf.Variable(tf.zeros_like(p)) for _ in range(counts[rule]) for p in net.parameters]
    held = net.kernel.read_value()  # so that the variable's memory has another owner, too
    rates = optimizer.rates(tf.constant(1, tf.int64))
    losses, _, done = step(
        load().ops, handle.spec, [*net.parameters, *slots], batch, 0, None, rule, rates, 7, program_of(gpu, handle)
    )
    assert done == 7
    np.testing.assert_allclose(losses, [float(loss) for loss in net_losses(before, net, trees)], rtol=1e-4)
    np.testing.assert_array_equal(held, before[3])
    for parameter, old, gradient in zip(net.parameters, before, gradients, strict=True):
        first = gradient / (np.abs(gradient) + 1e-7 / np.sqrt(1e-3)) if rule == "adam" else gradient
        large = np.abs(gradient) > 1e-5
        np.testing.assert_allclose((old - parameter.numpy())[large], 0.1 * first[large], rtol=2e-3, atol=1e-7)


def test_a_step_that_failed_does_not_count(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "Programs", lambda options, dtype: FakePrograms(gpu, {}))
    values = []
    for fails in (False, True):
        net = TreeLSTM(hidden=4, width=3)
        handle = net.specialize(optimizer=dynamic.Adam(0.1))
        batch = handle.batch([nodes(handle, tree) for tree in random_trees(2, most=3)])
        step_in_graph = tf.function(lambda *given, handle=handle: handle.step(dynamic.Batch(*given)).losses)
        wrong = handle.batch([([9], [], [])])
        for train in (handle.step, lambda given, run=step_in_graph: run(*given)):
            train(batch)
            if fails:
                with pytest.raises(tf.errors.InvalidArgumentError, match="kind 9"):
                    train(wrong)
            train(batch)
        values.append([parameter.numpy() for parameter in net.parameters])
    for a, b in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("call", ["step", "forward_backward"])
def test_what_an_op_takes_from_the_host_crosses_as_one(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each tensor that crosses from the CPU to a GPU wakes a thread of TensorFlow's."""
    monkeypatch.setattr(handles, "Programs", lambda options, dtype: FakePrograms(gpu, {}))
    net, other = (TreeLSTM(hidden=4, width=3) for _ in range(2))
    handle, eager = (each.specialize(optimizer=dynamic.Adam(0.1)) for each in (net, other))
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(2, most=3)])
    function = tf.function(lambda *given: getattr(handle, call)(dynamic.Batch(*given)).losses)
    graph = function.get_concrete_function(*batch).graph
    (op,) = (op for op in graph.get_operations() if op.type in ("TfmemDynamic", "TfmemDynamicStep"))
    from_host = {tensor.op for tensor in op.inputs if tensor.dtype.is_integer}
    assert [each.type for each in from_host] == ["TfmemUnbundle"]
    (unbundle,) = from_host
    (bundle,) = (tensor.op for tensor in unbundle.inputs)
    assert (bundle.type, bundle.device, unbundle.device) == ("TfmemBundle", "/device:CPU:0", net.parameters[0].device)
    np.testing.assert_array_equal(function(*batch), getattr(eager, call)(batch).losses)


@pytest.mark.long
def test_kernels_that_take_turns_compute_the_same_to_the_bit(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    values, choices = [], []
    for several in (False, True):
        net = TreeLSTM(hidden=9, width=3)
        spec = net.specialize(optimizer=dynamic.Adam()).spec
        programs = [build(spec, ARCH, CHIP, rows, compile_source=gpu.compile_source) for rows in (1, 2, 4)]
        choices.append(Choice(programs))
        monkeypatch.setattr(
            handles,
            "Programs",
            lambda options, dtype, given=choices[-1] if several else None: FakePrograms(gpu, {}, given),
        )
        handle = net.specialize(optimizer=dynamic.Adam())
        batch = handle.batch([nodes(handle, tree) for tree in random_trees(2, most=3)])
        for _ in range(ROUNDS * 3 * (FIRST_STEPS + TIMED_STEPS)):
            handle.step(batch)
        values.append([parameter.numpy() for parameter in net.parameters])
    assert choices[1].done
    for a, b in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)


def test_recorded_graphs_say_that_a_kernel_is_compiled_anew(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "Programs", lambda options, dtype: FakePrograms(gpu, {}))
    table = tf.Variable(tf.ones([4, 3]))
    handle = dynamic.specialize([table])

    def loss(op) -> dynamic.Expression:
        return dynamic.reduce_sum(op(dynamic.embedding_lookup(table, 1)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", TfmemWarning)
        handle.forward_backward([loss(dynamic.tanh)])  # the first kernel is no news
        handle.forward_backward([loss(dynamic.tanh)])
    with pytest.warns(TfmemWarning, match="1 new kinds of ops, so the GPU kernel is compiled again"):
        handle.forward_backward([loss(dynamic.sigmoid)])


def net_losses(values, net: TreeLSTM, trees):
    """The losses of the net with these parameters."""
    now = [parameter.numpy() for parameter in net.parameters]
    for parameter, value in zip(net.parameters, values, strict=True):
        parameter.assign(value)
    losses = [net.loss(tree) for tree in trees]
    for parameter, value in zip(net.parameters, now, strict=True):
        parameter.assign(value)
    return losses


def test_states_and_their_gradients(gpu: FakeGpu) -> None:
    """Forward and backward as two launches, with an upstream gradient."""
    net = TreeLSTM(hidden=8, width=5)
    handle = net.specialize()
    trees = random_trees(3, most=6)
    program = program_of(gpu, handle)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    with tf.GradientTape() as tape:
        losses, outputs, states = forward(
            load().ops, handle.spec, net.parameters, batch, 0, state_of=0, training=True, program=program
        )
        last = tf.gather(states[0], batch.kinds.row_limits() - 1)
        total = tf.reduce_sum(tf.square(last)) + 0.5 * tf.reduce_sum(losses)
    found = tape.gradient(total, net.parameters)
    assert outputs[0].shape == [batch.kinds.flat_values.shape[0], 5]
    with tf.GradientTape() as tape:
        walked = [net.walk(tree) for tree in trees]
        expected_total = sum(tf.reduce_sum(tf.square(h)) + 0.5 * loss for h, _, loss in walked)
    expected = tape.gradient(expected_total, net.parameters)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    assert_like(as_arrays(found), as_arrays(expected), 2e-5)


def test_a_chain_and_an_empty_batch(gpu: FakeGpu) -> None:
    net = TreeLSTM(hidden=4, width=3)
    chain = (0, 1)
    for _ in range(60):
        chain = (1, chain, (0, 2))
    program = check_net(gpu, net, [chain, (2, 5)])
    handle = net.specialize()
    losses, _, gradients = forward_backward(load().ops, handle.spec, net.parameters, handle.batch([]), 0, None, program)
    assert losses.shape == [0]
    assert all(not np.any(gradient) for gradient in as_arrays(gradients))


def test_batches_of_any_size_go_through_the_same_places(gpu: FakeGpu) -> None:
    """One op sends scripts of batches that grow, so that its places do, and shrink again."""
    net = TreeLSTM(hidden=3, width=2)
    handle = net.specialize()
    program = program_of(gpu, handle)
    run = tf.function(
        lambda *given: forward_backward(
            load().ops, handle.spec, net.parameters, dynamic.Batch(*given), 0, None, program
        )[0],
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)] * 3,
    )
    expected = [net.loss((1, (0, 1), (2, word))) for word in range(30)]
    for count in (1, 2, 300, 1, 300, 3, 2):
        trees = [(1, (0, 1), (2, word % 30)) for word in range(count)]
        found = run(*handle.batch([nodes(handle, tree) for tree in trees]))
        np.testing.assert_allclose(found, [expected[word % 30] for word in range(count)], rtol=1e-5)


def test_results_are_the_same_in_each_run(gpu: FakeGpu) -> None:
    net = TreeLSTM(hidden=8, width=5)
    handle = net.specialize()
    program = program_of(gpu, handle)
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(4, most=6)])
    runs = [
        as_arrays(forward_backward(load().ops, handle.spec, net.parameters, batch, 0, None, program)[2])
        for _ in range(2)
    ]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_the_op_is_given_is_checked(gpu: FakeGpu) -> None:
    net, other = TreeLSTM(hidden=6, width=2), TreeLSTM(hidden=5, width=2)
    handle, of_other = net.specialize(), other.specialize()
    program = program_of(gpu, handle)
    batch = handle.batch([nodes(handle, random_trees(1)[0])])

    def call(given: DynamicProgram, to: dynamic.Handle) -> object:
        return forward_backward(load().ops, to.spec, to.parameters, batch, 0, None, given)

    with pytest.raises(tf.errors.InvalidArgumentError, match="of other kinds of nodes"):
        call(program, of_other)
    for key, value in {"table": "3", "segment0": "0 0 0 0 9 1", "spilled0": "0", "words": "x"}.items():
        broken = replace(program, more=tuple({**dict(program.more), key: value}.items()))
        with pytest.raises(tf.errors.InvalidArgumentError, match="attr programs"):
            call(broken, handle)
