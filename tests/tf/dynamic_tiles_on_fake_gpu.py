"""Products of dynamic nets by tensor cores, and how near a kernel is to float64, on the fake driver.

Run by test_dynamic_gpu.py in a separate process: see `fake_gpu`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.dynamic import distances, ours, phases
from benchmarks.dynamic.processes import numbered
from benchmarks.dynamic.timing import words_of
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.dynamic.op import forward, forward_backward
from custom_ops.load import load
from examples import trees as example_trees
from examples.tree_lstm import TreeLSTM as ExampleNet
from tests.tf.dynamic_gpu_nets import as_arrays, assert_like, program_of
from tests.tf.dynamic_gpu_plugin import FakePrograms
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tf.fake_gpu import FakeGpu, fixture_gpu, fixture_no_kernel_fails  # noqa: F401
from tfmem import dynamic
from tfmem.dynamic import handle as handles


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
    """The gradients of a net that has learnt are small differences of large numbers."""
    monkeypatch.setattr(handles, "Programs", lambda options, dtype: FakePrograms(gpu, {}))
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
    monkeypatch.setattr(handles, "Programs", lambda options, dtype: FakePrograms(gpu, {}))
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
