"""What a CPU's allocator does not count, and what it counts beyond the tensors: chunks that they do not fill."""

from dataclasses import replace
from typing import Any

import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.cpu import workspace
from graph_passes.analysis.cost.model import held
from graph_passes.analysis.memory.observe import Sample, least_taken, observe
from graph_passes.analysis.memory.simulate import Link, Move, Padding, uncounted, uncounted_under
from graph_passes.analysis.memory.timeline import COUNTED, Buffer, ScheduledOp, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, plan_offload, tighter
from graph_passes.passes.offload.selection import CHUNKS
from graph_passes.report import Report

MIB = 1 << 20
KIB = 1 << 10


def timeline() -> Timeline:
    """A large tensor is alive at 0 and 1, small ones of 100 and 60 KiB at 1 and 2; 10 KiB of variables are small."""
    buffers = (
        Buffer(TensorId("large"), MIB, 0, (1,)),
        Buffer(TensorId("small"), 100 * KIB, 1, (2,)),
        Buffer(TensorId("smaller"), 60 * KIB, 2, ()),
    )
    steps = tuple(ScheduledOp(name, 1.0) for name in "abc")
    return Timeline(steps, buffers, 1, base=20 * KIB, counted=COUNTED, small_base=10 * KIB)


def test_what_is_not_counted_of_a_peak():
    # the peak is at b: 1 MiB + 100 KiB + 20 KiB; of that the allocator counts 1 MiB + 10 KiB
    assert timeline().uncounted.tolist() == [10 * KIB, 110 * KIB, 170 * KIB]
    assert uncounted(timeline(), ()) == 110 * KIB
    assert uncounted(replace(timeline(), counted=0, small_base=0), ()) == 0
    # small tensors alone: all of the peak at c, 100 + 60 + 20 KiB, but the 10 KiB that count
    alone = replace(timeline(), buffers=timeline().buffers[1:])
    assert uncounted(alone, ()) == 170 * KIB
    assert uncounted(alone, (), (Padding(2, MIB),)) == 170 * KIB


def test_an_observed_step_has_the_small_tensors_too():
    # what the allocator would say: 10 KiB before and after, 1 MiB more at a and b
    read = [(0, MIB), (1, MIB), (2, 0)]
    samples = [
        Sample(2 * position + 1, float(position), (10 * KIB if position else 10 * KIB + MIB), most + 10 * KIB)
        for position, most in read
    ]
    seen = observe(timeline(), (), samples)
    assert seen.base == 20 * KIB
    assert seen.workspace == {"a": 0, "b": 0, "c": 0}
    assert seen.peak == MIB + 120 * KIB
    assert dict(seen.curve) == {"a": MIB + 20 * KIB, "b": MIB + 120 * KIB, "c": 180 * KIB}


def test_the_least_that_a_step_may_take_has_no_unused_parts_of_chunks():
    # a tensor of the base lies in a chunk 500 KiB too large after most ops; f's own chunk is 300 KiB too large as well
    steps = tuple(ScheduledOp(name, 1.0) for name in "abcdefghijkl")
    step = Timeline(steps, (Buffer(TensorId("large"), MIB, 5, ()),), 5, base=MIB)
    unused = dict.fromkeys(range(12), 500 * KIB) | {0: 0, 1: 0}
    samples = [Sample(2 * place + 1, float(place), MIB + more, MIB + more) for place, more in unused.items()]
    samples[5] = replace(samples[5], peak_bytes=2 * MIB + 800 * KIB)
    seen = observe(step, (), samples)
    assert (seen.base, seen.least_base) == (MIB + 500 * KIB, MIB)
    assert seen.workspace["f"] == 300 * KIB
    taken = tuple(replace(each, workspace=seen.workspace[each.node]) for each in steps)
    planned = replace(step, base=seen.base, steps=taken)
    assert least_taken(planned, seen).usage.tolist() == [2 * MIB if name == "f" else MIB for name in "abcdefghijkl"]
    # a buffer that is shared with another one counts once
    shared = replace(planned, steps=(replace(steps[0], workspace=-501 * KIB), *planned.steps[1:]))
    assert least_taken(shared, seen).usage[0] == MIB - KIB
    assert least_taken(planned, replace(seen, least_base=0)).base == planned.base


def waiting() -> Timeline:
    """Small alone: 200 KiB wait from 0 to 3, and 150 and 100 KiB are alive in between."""
    buffers = (
        Buffer(TensorId("waits"), 200 * KIB, 0, (3,)),
        Buffer(TensorId("b"), 150 * KIB, 1, (2,)),
        Buffer(TensorId("c"), 100 * KIB, 2, (3,)),
    )
    return Timeline(tuple(ScheduledOp(name, 1.0) for name in "abcd"), buffers, 1, base=20 * KIB, counted=COUNTED)


def test_a_small_tensor_that_moves_is_not_there():
    moves = [Move(0, 0, 0, 1, 3, 3)]
    # 200; 150; 150 + 100; 100 and what came back
    assert uncounted_under(waiting(), moves).tolist() == [200 * KIB, 150 * KIB, 250 * KIB, 300 * KIB]
    assert uncounted(waiting(), moves) == 300 * KIB  # all of the peak but what is in use before the step
    # an observed step, of which the allocator saw nothing but the base: no op has workspace
    samples = [Sample(2 * position + 1, float(position), 20 * KIB, 20 * KIB) for position in range(4)]
    seen = observe(waiting(), moves, samples)
    assert seen.base == 20 * KIB
    assert set(seen.workspace.values()) == {0}
    assert seen.peak == 320 * KIB


def test_chunks_of_large_tensors_count_where_small_ones_moved():
    large = Buffer(TensorId("large"), 300 * KIB, 1, (2,))
    timeline = replace(waiting(), buffers=(*waiting().buffers, large))
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_offload(timeline, Link(1.0, 1.0), 1, OffloadOptions(reuse_distance=1))
    # at c: 20 + 150 + 100 + 300; the small one that waits is away, so all of the large one's chunk is beyond
    assert caught.value.least == 570 * KIB
    assert caught.value.smallest_budget == 570 * KIB + int(CHUNKS * 300 * KIB)


def test_a_report_says_what_nobody_measured():
    report = Report("step", "CPU", "autovm", "moved", 3000, 2000, 2100, peak_uncounted=1500, budget=2200)
    assert "1.5 KiB of it in small tensors, which the allocator does not count" in str(report)
    assert "small tensors" not in str(replace(report, peak_uncounted=20))
    assert "small tensors" not in str(replace(report, peak_measured=None))
    assert Report.from_json(report.to_json()) == report


def test_the_smallest_budget_counts_chunks_that_tensors_do_not_fill():
    plain = replace(timeline(), counted=0, small_base=0)
    options = OffloadOptions(reuse_distance=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_offload(plain, Link(1.0, 1.0), 1, options)
    # 1 MiB + 100 KiB + 20 KiB at b
    assert caught.value.smallest_budget == caught.value.least == MIB + 120 * KIB
    assert "20,480 of these are in use before the step" in str(caught.value)
    assert "Unchanged" not in str(caught.value)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_offload(timeline(), Link(1.0, 1.0), 1, options)
    assert caught.value.least == MIB + 120 * KIB
    # the chunk of the one large tensor may be so much larger
    assert caught.value.smallest_budget == MIB + 120 * KIB + int(CHUNKS * MIB)
    assert "between 1,171,456 and 1,695,744 bytes" in str(caught.value)
    assert "Unchanged, the step is estimated to take 1,171,456" in str(caught.value)
    # what lies between the two is tried
    assert plan_offload(timeline(), Link(1.0, 1.0), caught.value.least, options).after.peak == caught.value.least


def test_the_tightest_plan_comes_last():
    steps = tuple(ScheduledOp(f"n{i}", 1.0) for i in range(8))
    # a waits from 0 to 7; at 3 and 4 there are 10 bytes beside it
    buffers = (Buffer(TensorId("a"), 10, 0, (7,)), Buffer(TensorId("b"), 10, 3, (4,)))
    step = Timeline(steps, buffers, 3)

    def plan(budget: int, **how: Any):
        options = OffloadOptions(reuse_distance=1, policy="autovm")
        return plan_offload(step, Link(1.0, 1.0), budget, options, How(timed=True, **how))

    loose = plan(20)
    tight = tighter(plan, loose, 5)  # nothing takes 15: the tightest takes 10
    assert tight is not None
    assert tight.after.peak == 10
    assert tighter(plan, tight, 1) is None


def test_workspace_of_cpu_kernels():
    nodes = [
        Node("x", "Placeholder", [], outputs=1),
        Node("pooled", "MaxPool", [TensorId("x")], outputs=1),
        Node("g", "MaxPoolGrad", [TensorId("x"), TensorId("pooled"), TensorId("pooled")], outputs=1),
        Node("e", "Einsum", [TensorId("x"), TensorId("pooled")], outputs=1),
        Node("r", "Relu", [TensorId("x")], outputs=1),
    ]
    sizes = {"x": 400, "pooled": 100, "g": 400, "e": 40, "r": 400}
    specs = {TensorId(name): TensorSpec("float32", 4, (size,)) for name, size in sizes.items()}
    graph = Graph(nodes, specs)
    # an index of 8 bytes for each of 100 pooled numbers, and these again
    assert workspace(graph, graph["g"]) == 800 + 400
    assert workspace(graph, graph["pooled"]) == 100
    assert workspace(graph, graph["e"]) == 1600 + 400  # both transposed
    assert workspace(graph, graph["r"]) == 0
    assert held(graph) == 1600
    assert held(graph, 1600) == 0
    assert pipeline.Step.read(graph, counted=1601).timeline(_Free()).small_base == 1600


class _Free:
    """Costs nothing."""

    def seconds(self, graph, node):
        return 0.0

    def workspace(self, graph, node):
        return 0

    def base(self, graph):
        return 0
