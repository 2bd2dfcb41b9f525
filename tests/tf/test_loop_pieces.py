"""Loops that run in pieces: which can, and that they compute the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.lists import list_sizes, steps_of
from graph_passes.analysis.memory.liveness import build_timeline
from graph_passes.analysis.memory.pieces import Split, splits
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph, TensorId, parse_input
from graph_passes.graph.ops import LOOPS
from graph_passes.graph.order import schedule
from graph_passes.report import RECOMPUTED
from tests.tf.loop_nets import STEPS, Between, Branching, Drawing, Mapped, Scan, TwoLoops
from tests.tf.memory_in_use import in_use
from tests.tf.split_steps import read as steps
from tests.tf.test_loop_memory import MIB, Net, within
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.split_loops import with_pieces
from tfmem.steps import trace as traces
from tfmem.steps.after_grappler import grappled


def read(captured: Captured) -> Graph:
    return serde.from_graph_def(captured.graph_def, inferred=shaped_graph(captured), functions=True)


def captured_of(net: Any, x: Any) -> tuple[Any, Captured]:
    concrete = tf.function(net.step).get_concrete_function(tf.TensorSpec(x.shape))
    return concrete, run_grappler(capture_concrete(concrete), device="CPU")


def found(captured: Captured) -> tuple[Split, ...]:
    return splits(read(captured), 1, [parse_input(name)[0] for name in captured.fetches])


@pytest.fixture(name="x", scope="module")
def fixture_x() -> Any:
    return tf.random.stateless_normal([256, 64], [3, 4])


@pytest.mark.parametrize(("kind", "loops", "pieces"), [(TwoLoops, 2, 7), (Scan, 1, 4), (Mapped, 1, 4)])
def test_pieces_compute_the_same(kind: Any, loops: int, pieces: int, x: Any) -> None:
    plain, net = kind(), kind()
    concrete, captured = captured_of(net, x)
    chosen = found(captured)
    assert [len(split.ends) for split in chosen] == [pieces] * loops
    cut = with_pieces(captured, chosen)
    assert set(captured.creation_order) < set(cut.creation_order)
    graph = read(cut)
    for split in chosen:
        names = [name for name in graph.nodes if name.startswith(f"{split.forward.node}/piece_")]
        parts = [graph[name] for name in [*names, split.forward.node] if graph[name].op in ("While", "StatelessWhile")]
        assert [steps_of(graph, part) for part in parts] == [
            end - begin for begin, end in zip((0, *split.ends), split.ends, strict=False)
        ]
        assert steps_of(graph, graph[split.backward.node]) == split.ends[0]  # the last lists first
    function = restore_concrete(concrete, cut, cut.graph_def, {})
    whole = tf.function(plain.step)
    for _ in range(3):
        assert function(x).numpy() == whole(x).numpy()
    for ours, theirs in zip(net.variables, plain.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()


@pytest.mark.parametrize("kind", [Branching, Drawing])
def test_what_cannot_run_in_pieces(kind: Any, x: Any) -> None:
    """A loop that draws random numbers would begin its streams again; what branches keep is not known before."""
    assert found(captured_of(kind(), x)[1]) == ()


def test_a_number_of_steps_that_is_an_input(x: Any) -> None:
    concrete = tf.function(Net().step).get_concrete_function(tf.TensorSpec(x.shape), tf.TensorSpec([], tf.int32))
    assert found(run_grappler(capture_concrete(concrete), device="CPU")) == ()


def test_a_list_that_loops_pass_on_counts_once(x: Any) -> None:
    captured = captured_of(Scan(), x)[1]
    whole, cut = read(captured), read(with_pieces(captured, found(captured)))

    def held(graph: Graph) -> int:
        position = {name: place for place, name in enumerate(graph.nodes)}
        return sum(size.nbytes for size in list_sizes(graph, position).values() if size)

    assert held(whole) > 0
    assert TensorId("scan/while", 8) in list_sizes(whole)
    assert abs(held(cut) - held(whole)) <= held(whole) // 4


@pytest.mark.parametrize("policy", ["optimal", "autovm"])
def test_a_loop_larger_than_its_budget(flow: Any, policy: str) -> None:
    x = tf.random.stateless_normal([2048, 64], [3, 4])
    plain = tf.function(Net().step)
    function = within(Net().step, 10 * MIB + in_use(), policy=policy)
    for _ in range(8):
        assert function(x).numpy() == plain(x).numpy()
    report = tfmem.report(function)
    assert "OVER BUDGET" not in str(report)
    assert report.peak_before - report.peak_measured > STEPS * MIB // 4
    assert report.peak_predicted == pytest.approx(report.peak_measured, rel=0.05)
    assert any(each.offload_after == RECOMPUTED for each in report.transfers) or policy == "autovm"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "budget"), [(TwoLoops, 22), (Between, 36)])
def test_what_is_planned_for_pieces_is_what_they_take(kind: Any, budget: int, flow: Any) -> None:
    """Within much less than an element of the lists, whether a plan copies them or runs pieces again."""
    x = tf.random.stateless_normal([2048, 64], [3, 4])
    net, plain = kind(), kind()
    function, whole = within(net.step, budget * MIB + in_use()), tf.function(plain.step)
    for _ in range(6):
        assert function(x).numpy() == whole(x).numpy()
    for ours, theirs in zip(net.variables, plain.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()
    report = tfmem.report(function)
    assert report.peak_measured <= report.budget
    assert abs(report.peak_predicted - report.peak_measured) < MIB // 8


@pytest.mark.parametrize(("kind", "pieces"), [(TwoLoops, 14), (Between, 7)])
def test_each_piece_can_run_again(kind: Any, pieces: int, x: Any) -> None:
    """From the state before it, which lists hold until then."""
    captured = captured_of(kind(), x)[1]
    cut = with_pieces(captured, found(captured))
    graph = read(cut)
    fetched = [parse_input(name)[0] for name in cut.fetches]
    timeline = build_timeline(graph, schedule(graph), Roofline(load("unit")), fetched)
    lists = [buffer for buffer in timeline.buffers if buffer.element and graph[buffer.tensor.node].op in LOOPS]
    assert [chain.ops for buffer in lists for chain in buffer.chains] == [(buffer.start,) for buffer in lists]
    assert len(lists) == pieces


def test_a_loop_in_pieces_is_stitched_in_pieces(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is stitched has another layout, as on a GPU."""
    monkeypatch.setattr(traces, "grappled_to_stitch", grappled)
    trace = steps(tf.function(Scan().step), [x])
    whole = trace.to_stitch()
    assert trace.split_loops(least=1)
    cut = trace.to_stitch()

    def loops(captured: Captured) -> int:
        return sum(node.op in ("While", "StatelessWhile") for node in captured.graph_def.node)

    assert loops(cut) == loops(trace.optimized()) > loops(whole)
