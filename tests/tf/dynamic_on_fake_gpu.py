"""Dynamic nets by the GPU's kernel, scripts and ops, on the fake driver, against TensorFlow and the CPU's definition.

Run by test_dynamic_gpu.py in a process of its own: see `fake_gpu`."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.dynamic import distances, ours, phases
from benchmarks.dynamic.processes import numbered
from benchmarks.dynamic.timing import words_of
from custom_ops.dynamic.choice import FIRST_STEPS, ROUNDS, TIMED_STEPS, Choice
from custom_ops.dynamic.codegen.plan import Chip
from custom_ops.dynamic.codegen.program import DynamicProgram, build
from custom_ops.dynamic.op import forward, forward_backward, step
from custom_ops.errors import TfmemWarning
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.load import load
from examples import trees as example_trees
from examples.tree_lstm import TreeLSTM as ExampleNet
from tests.tf.dynamic_gpu_plugin import FakePrograms
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tf.fake_gpu import ARCH, FakeGpu, fixture_gpu, fixture_no_kernel_fails  # noqa: F401
from tfmem import dynamic
from tfmem.dynamic import handle as handles

CHIP = Chip(processors=3)
WIDTH = 5


def program_of(gpu: FakeGpu, handle: dynamic.Handle, chip: Chip = CHIP, **options) -> DynamicProgram:
    return build(handle.spec, ARCH, chip, compile_source=gpu.compile_source, **options)


def as_arrays(gradients):
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def assert_like(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


def check_net(gpu: FakeGpu, net: TreeLSTM, trees, chip: Chip = CHIP, **options) -> DynamicProgram:
    handle = net.specialize()
    program = program_of(gpu, handle, chip, **options)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    found, _, gradients = forward_backward(load().ops, handle.spec, handle.parameters, batch, 0, None, program)
    losses, expected = net.gradients(trees)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_like(as_arrays(gradients), expected)
    return program


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


def as_tiles(program: DynamicProgram, tiles: bool) -> DynamicProgram:
    """The program with costs by which every product that may be is computed in tiles, or none is."""
    facts = dict(program.more)
    for number in range(int(facts["segments"])):
        words = facts[f"segment{number}"].split()
        facts[f"segment{number}"] = " ".join([*words[:5], "1000000", *words[6:]] if tiles else [*words[:6], "0", "0"])
    return replace(program, more=tuple(facts.items()))


@pytest.mark.parametrize(("hidden", "width", "count"), [(16, 12, 9), (19, 9, 9), (37, 50, 40)])
def test_products_in_tiles_are_those_of_single_nodes(gpu: FakeGpu, hidden: int, width: int, count: int) -> None:
    """Tensor cores, for nodes of half a tile, of a whole one, and of more, whose vectors have odd sizes."""
    net = TreeLSTM(hidden=hidden, width=width)
    handle = net.specialize()
    trees = random_trees(count, most=7)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    program = program_of(gpu, handle)
    found = []
    for tiles in (True, False):
        given = as_tiles(program, tiles)
        losses, _, gradients = forward_backward(load().ops, handle.spec, net.parameters, batch, 0, None, given)
        found.append([losses.numpy(), *as_arrays(gradients)])
    assert any(np.any(a != b) for a, b in zip(*found, strict=True))  # other sums than those of single nodes
    losses, expected = net.gradients(trees)
    for of_both in found:
        np.testing.assert_allclose(of_both[0], losses, rtol=1e-5)
        assert_like(of_both[1:], expected)


def test_a_timed_kernel_says_what_its_phases_take(gpu: FakeGpu) -> None:
    net = TreeLSTM(hidden=20, width=12)
    handle = net.specialize()
    trees = random_trees(5, most=7, seed=1)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    program = program_of(gpu, handle, timed=True)

    def run() -> None:
        forward_backward(load().ops, handle.spec, net.parameters, batch, 0, None, program)

    timed = phases.middle(phases.launches(run, lambda: None))
    assert len(timed.phases) > 6
    found = phases.groups(timed, phases.names_of(handle.spec))
    assert {"level: product", "back, level: all else", "gradients and updates"} <= set(found)
    assert sum(count for count, _ in found.values()) == 1 + len(timed.phases)
    assert sum(time for _, time in found.values()) == pytest.approx(timed.nanoseconds / 1000)


def example(count: int, hidden: int = 12, width: int = 8) -> tuple[ExampleNet, list]:
    """The example's net, and trees in which words occur many times."""
    given = numbered(example_trees.made(count))
    return ExampleNet(1 + max(max(words_of(tree)) for tree in given), width, hidden), given


def test_gradients_are_compared_before_the_net_learns(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a net that has learnt are small differences of large numbers."""
    monkeypatch.setattr(handles, "Programs", lambda: FakePrograms(gpu, {}))
    net, given = example(4)
    other = as_tiles(program_of(gpu, net.handle), True)
    roots = [net.node(tree, {word: word for word in words_of(tree)}) for tree in given]
    expected = [ours.difference(net, net.handle.batch(roots[:size]), other) for size in (1, 3)]
    timed = {"tiles": program_of(gpu, net.handle, timed=True)}
    rows = list(phases.rows_of(net, given, [1, 3], 0, timed, lambda: None, other))
    assert [row["difference"] for row in rows] == expected
    assert 0 < max(expected) < 1e-5
    assert [row["batch"] for row in rows] == [1, 3]


def learn_by_definition(net: ExampleNet, batches: list, steps: int, _: DynamicProgram) -> None:
    """By Adam."""
    values = [parameter.numpy().astype(np.float64) for parameter in net.handle.parameters]
    means, squares = ([np.zeros_like(value) for value in values] for _ in range(2))
    for number in range(1, steps + 1):
        found = distances.definition(net, batches[number % len(batches)])
        for place, name in enumerate(distances.names_of(net)):
            gradient = found[f"gradient of {name}"]
            means[place] = 0.9 * means[place] + 0.1 * gradient
            squares[place] = 0.999 * squares[place] + 0.001 * gradient**2
            rate = 2e-3 * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
            values[place] -= rate * means[place] / (np.sqrt(squares[place]) + 1e-7)
            net.handle.parameters[place].assign(values[place].astype(np.float32))


def test_kernels_are_as_near_to_float64_as_float32_is(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where words occur many times, and when the net has learnt; then by what its numbers were before.

    It learns in float64: what it has learnt, and so how well conditioned it is, does not hang on a kernel's last bits.
    """
    monkeypatch.setattr(handles, "Programs", lambda: FakePrograms(gpu, {}))
    monkeypatch.setattr(distances, "learn", learn_by_definition)
    net, given = example(24)
    program = program_of(gpu, net.handle)
    programs = {"tiles": as_tiles(program, True), "rows": as_tiles(program, False)}
    rows = list(distances.rows_of(net, given, [1, 24], 100, programs, program_of(gpu, net.handle, Chip(processors=2))))
    about = [(weights, size, kernel) for weights in ("first", "learnt") for size in (1, 24) for kernel in programs]
    assert [(row["weights"], row["batch"], row["kernel"]) for row in rows] == about
    for first, learnt in zip(rows[:4], rows[4:], strict=True):
        assert learnt["distances"][0].largest < 0.8 * first["distances"][0].largest  # losses
        for before, after in zip(first["distances"], learnt["distances"], strict=True):
            assert before.gpu < 2e-6
            assert after.gpu * after.largest < 2e-6 * max(before.largest, after.largest)
            assert not before.far
            assert not after.far


def test_nan_goes_through_tiles(gpu: FakeGpu) -> None:
    net = TreeLSTM(hidden=20, width=12)
    handle = net.specialize()
    trees = [(1, (0, 1), (2, 2)), (1, (0, 3), (2, 4))]
    row = net.embedding.numpy()
    row[3] = np.nan
    net.embedding.assign(row)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    program = as_tiles(program_of(gpu, handle), True)
    losses, _, gradients = forward_backward(load().ops, handle.spec, net.parameters, batch, 0, None, program)
    np.testing.assert_array_equal(np.isnan(losses), [False, True])
    assert all(np.isnan(gradient).any() for gradient in as_arrays(gradients)[1:])


@pytest.mark.parametrize("transposed", [False, True])
def test_infinity_goes_through_tiles(gpu: FakeGpu, transposed: bool) -> None:
    """As through a sum of products: times numbers of few bits, which have no low part, too. Small integers stay
    exact."""
    random = np.random.default_rng(0)
    rows = random.normal(size=[44, 24]).astype(np.float32)
    weights = random.normal(size=[24, 20]).astype(np.float32)
    weights[:, :9] = random.integers(-3, 4, [24, 9])
    rows[40:] = random.integers(-9, 10, [4, 24])
    rows[3, 2], rows[7, 5], rows[9, [1, 4]], rows[11, 8] = np.inf, -np.inf, [np.inf, -np.inf], np.nan
    rows[13, 6], weights[6, 19] = np.inf, -np.inf
    weights[2, 0] = weights[5, 1] = 0  # times infinity
    table, matrix = tf.Variable(rows), tf.Variable(weights.T if transposed else weights)

    def product(x: dynamic.Expression) -> dynamic.Expression:
        return dynamic.matvec(matrix, x) if transposed else dynamic.matmul(x, matrix)

    def node(children, row):
        return dynamic.Result(outputs=[product(dynamic.embedding_lookup(table, row))])

    handle = dynamic.specialize([table, matrix], {"node": dynamic.node(node)})
    batch = handle.batch([handle.node("node", row) for row in range(len(rows))])
    program = as_tiles(program_of(gpu, handle), True)
    _, (found,), _ = forward(
        load().ops, handle.spec, [table, matrix], batch, 0, state_of=-1, training=False, program=program
    )
    with np.errstate(invalid="ignore"):
        expected = rows.astype(np.float64) @ weights.astype(np.float64)
    assert np.isinf(expected).any()
    assert np.isnan(expected).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[40:, :9], expected[40:, :9])


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
        for name in FLOAT_OPS:
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
    held = net.kernel.read_value()  # so that the variable's memory is somebody else's, too
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
    monkeypatch.setattr(handles, "Programs", lambda: FakePrograms(gpu, {}))
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


def test_kernels_that_take_turns_compute_the_same_to_the_bit(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    values, choices = [], []
    for several in (False, True):
        net = TreeLSTM(hidden=9, width=3)
        spec = net.specialize(optimizer=dynamic.Adam()).spec
        programs = [build(spec, ARCH, CHIP, rows, compile_source=gpu.compile_source) for rows in (1, 2, 4)]
        choices.append(Choice(programs))
        monkeypatch.setattr(
            handles, "Programs", lambda given=choices[-1] if several else None: FakePrograms(gpu, {}, given)
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
    monkeypatch.setattr(handles, "Programs", lambda: FakePrograms(gpu, {}))
    table = tf.Variable(tf.ones([4, 3]))
    handle = dynamic.specialize([table])

    def loss(op) -> dynamic.Expression:
        return dynamic.reduce_sum(op(dynamic.embedding_lookup(table, 1)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", TfmemWarning)
        handle.forward_backward([loss(dynamic.tanh)])  # the first kernel is no news
        handle.forward_backward([loss(dynamic.tanh)])
    with pytest.warns(TfmemWarning, match="1 kinds of ops that none before had, so the GPU's kernel is compiled anew"):
        handle.forward_backward([loss(dynamic.sigmoid)])


def net_losses(values, net: TreeLSTM, trees):
    """Of the net with these parameters."""
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
    for count in (1, 2, 300, 1, 300, 3, 2):
        trees = [(1, (0, 1), (2, word % 30)) for word in range(count)]
        found = run(*handle.batch([nodes(handle, tree) for tree in trees]))
        expected = {word: net.loss(trees[word]) for word in range(min(count, 30))}
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

    def call(given: DynamicProgram | None, to: dynamic.Handle) -> object:
        return forward_backward(load().ops, to.spec, to.parameters, batch, 0, None, given)

    with pytest.raises(tf.errors.InvalidArgumentError, match="of other kinds of nodes"):
        call(program, of_other)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 0 programs for a GPU"):
        call(None, handle)
    for key, value in {"table": "3", "segment0": "0 0 0 0 9 1", "spilled0": "0", "words": "x"}.items():
        broken = replace(program, more=tuple({**dict(program.more), key: value}.items()))
        with pytest.raises(tf.errors.InvalidArgumentError, match="attr programs"):
            call(broken, handle)
