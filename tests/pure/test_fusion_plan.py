"""Plans of random graphs: complete, disjoint, acyclic, and what they run computes what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.op_pattern import IN_KERNELS, OpPattern
from graph_passes.graph.ir import TensorId
from graph_passes.passes.fuse.partition.explore import Exploration
from graph_passes.passes.fuse.partition.partition import ON_CPU, ON_GPU, StepKind, partition_graph
from graph_passes.passes.fuse.partition.score import OF_OP, OF_RESULT, Measure
from graph_passes.refusals import Reason
from tests.fusion_graphs import UNIT, Nodes, graphs, run_graph, run_plan
from tests.tiers import examples


@settings(max_examples=examples(60))
@given(graphs(), st.sampled_from([ON_CPU, ON_GPU]))
def test_a_plan_computes_what_the_graph_computes(made, kinds):
    graph, op_patterns = made
    plan = partition_graph(graph, op_patterns, UNIT, kinds=kinds)
    members = [name for region in plan.regions for name in region.members]
    assert len(set(members)) == len(members)
    assert sorted([*members, *plan.reasons]) == sorted(graph.nodes)
    assert all(plan.reasons.values())
    for region in plan.regions:
        for step in region.steps:
            found = {op_patterns[name].pattern for name in step.members}
            assert (found <= IN_KERNELS) if step.kind is StepKind.KERNEL else len(step.members) == 1
            assert found <= kinds
    assert run_plan(graph, op_patterns, plan) == run_graph(graph, op_patterns)


@settings(max_examples=examples(60))
@given(graphs(), st.integers(0, 1000))
def test_what_is_refused_is_in_no_plan(made, seed):
    graph, op_patterns = made

    def refuse(members):  # about equal patterns it says the same
        found = crc32(repr((seed, [graph[name].op for name in members])).encode())
        return "no kernel for these" if found % (10 if len(members) == 1 else 2) == 0 else ""

    plan = partition_graph(graph, op_patterns, UNIT, refuse=refuse)
    for region in plan.regions:
        for step in region.kernels:
            assert refuse(step.members) == ""
    assert run_plan(graph, op_patterns, plan) == run_graph(graph, op_patterns)


def test_a_training_step_is_one_region_with_the_kernels_of_its_depths():
    # p = softmax(x w); w -= x^T (p - y): what lies between the products is one kernel, the update another.
    made = Nodes()
    w, x, y = made.add("Handle", name="w"), made.add("Opaque", name="x"), made.add("Opaque", name="y")
    value = made.add("Read", w, name="value")
    logits = made.add("Product", x, value, name="logits")
    largest = made.add("Rows", logits, name="largest")
    shifted = made.add("Elementwise", logits, largest, name="shifted")
    error = made.add("Elementwise", shifted, y, name="error")
    gradient = made.add("Product", x, error, name="gradient")
    made.add("Update", w, gradient, name="update", control=[value])
    graph = made.graph()
    plan = partition_graph(graph, made.op_patterns, UNIT)
    (region,) = plan.regions
    assert [(step.kind.value, step.members) for step in region.steps] == [
        ("read", ("value",)),
        ("call", ("logits",)),
        ("kernel", ("largest", "shifted", "error")),
        ("call", ("gradient",)),
        ("kernel", ("update",)),
    ]


def test_two_kinds_of_reduction_wait_for_each_other_only_where_it_pays():
    # RegionPlan, the column sums of 3000 bytes cost a barrier (10 s) and save a launch (100 s).
    made = Nodes()
    x = made.add("Opaque", size=3000)
    first = made.add("Elementwise", x, size=3000)
    sums = made.add("Columns", first, size=8)
    made.add("Elementwise", first, sums, size=3000)
    (region,) = partition_graph(made.graph(), made.op_patterns, UNIT).regions
    (kernel,) = region.kernels
    # 3000 + 3000, 3000 + 8, 3000 + 8 + 3000 by themselves, two launches; stitched: x, the result, and a barrier.
    # What no op outside reads is not written: no op reads the last result either, so that it is free.
    assert kernel.saves == (6000 + 3008 + 3008) + 2 * 100 - (3000 + 10)


def test_a_fetched_tensor_is_written():
    made = Nodes()
    x = made.add("Opaque", size=3000)
    first = made.add("Elementwise", x, size=3000)
    last = made.add("Elementwise", first, size=3000)
    made.add("Elementwise", last, size=3000)
    plans = [
        partition_graph(made.graph(), made.op_patterns, UNIT, fetched=fetched) for fetched in ([], [TensorId(first)])
    ]
    assert [plan.regions[0].kernels[0].seconds for plan in plans] == [3000.0, 6000.0]


def test_what_an_update_overwrites_is_read_first():
    # The product reads the old weights, and nothing else orders it before the update.
    made = Nodes()
    w, x = made.add("Handle", name="w"), made.add("Opaque", name="x")
    value = made.add("Read", w, name="value")
    made.add("Update", w, x, name="update", control=[value])
    shaped = made.add("View", value, name="shaped")
    made.add("Product", x, shaped, name="product")
    made.add("Elementwise", "product", name="after")
    (region,) = partition_graph(made.graph(), made.op_patterns, UNIT).regions
    steps = [step.members for step in region.steps]
    assert steps.index(("product",)) < next(i for i, step in enumerate(steps) if "update" in step)


def test_the_end_of_a_function_keeps_no_read_outside():
    # As TensorFlow writes it: a result waits for a NoOp, and that for all that reads a variable.
    made = Nodes()
    handles, x = [made.add("Handle") for _ in range(2)], made.add("Opaque")
    reads = [made.add("Read", handle) for handle in handles]
    x = made.add("Product", x, reads[0])
    x = made.add("Elementwise", x, reads[1])
    ended = made.add("NoOp", control=[made.add("NoOp", control=reads[:1]), reads[1]])
    result = made.add("View", x, control=[ended])
    plan = partition_graph(made.graph(), made.op_patterns, UNIT, kinds=ON_GPU)
    (region,) = plan.regions
    assert {*reads, x, result} <= set(region.members)
    assert run_plan(made.graph(), made.op_patterns, plan) == run_graph(made.graph(), made.op_patterns)


def test_ops_that_a_gpu_region_cannot_hold_divide_it_and_say_so():
    made = Nodes()
    x = made.add("Opaque")
    for _ in range(3):
        x = made.add("Elementwise", x)
    other = made.add("Opaque", x, name="other")
    for _ in range(3):
        other = made.add("Elementwise", other)
    plan = partition_graph(made.graph(), made.op_patterns, UNIT, kinds=ON_GPU)
    assert [len(region.members) for region in plan.regions] == [3, 3]
    assert str(plan.reasons["other"]) == "there is no kernel for this device: an opaque op"


def test_devices_divide_regions():
    made = Nodes()
    x = made.add("Opaque")
    names = [made.add("Elementwise", x, device="/job:localhost/replica:0/task:0/device:GPU:0") for _ in range(3)]
    names += [made.add("Elementwise", x, device="/gpu:0") for _ in range(3)]
    here = [made.add("Elementwise", name) for name in names[:3]]
    plan = partition_graph(made.graph(), made.op_patterns, UNIT, default="/job:localhost/replica:0/task:0/device:CPU:0")
    assert sorted(map(sorted, (region.members for region in plan.regions))) == sorted([sorted(names), sorted(here)])


def test_what_is_fed_is_in_no_region():
    made = Nodes()
    x = made.add("Opaque")
    first = made.add("Elementwise", x)
    for _ in range(4):
        first = made.add("Elementwise", first)
    plan = partition_graph(made.graph(), made.op_patterns, UNIT, fed=["elementwise_1"])
    assert plan.reasons["elementwise_1"] == Reason.FED()
    assert OpPattern.ELEMENTWISE is made.op_patterns["elementwise_1"].pattern


def test_what_is_left_of_a_large_run_is_not_looked_at():
    # Pairs of a reduction and what is computed of it; all of the latter are one run, as the updates of variables are.
    made = Nodes()
    for _ in range(40):
        sums = made.add("Columns", made.add("Elementwise", made.add("Opaque", size=3000), size=3000), size=8)
        made.add("Elementwise", made.add("Elementwise", sums, size=8), size=8)
    found = []
    for run in (20, 1000):
        asked: list[int] = []
        plan = partition_graph(
            made.graph(),
            made.op_patterns,
            UNIT,
            refuse=lambda names, asked=asked: asked.append(len(names)) or "",
            exploration=Exploration(run=run),
        )
        found.append((sum(size >= 70 for size in asked), sum(region.choice.score for region in plan.regions)))
    (few, limited), (many, unlimited) = found
    assert few < 5 < 40 <= many
    assert limited > 0.9 * unlimited


def test_large_parts_that_have_nothing_to_do_with_each_other_are_packed_in_kernels_of_one_pass():
    """One byte takes a second, a launch a hundred: sums of columns of 400 bytes take two passes, read in the kernel or
    not."""

    def normalized(made: Nodes, size: int) -> set[str]:
        x = made.add("Opaque", size=size)
        total = made.add("Columns", x, size=4)
        return {total, made.add("Elementwise", made.add("Elementwise", x, total, size=size), size=size)}

    def summed(made: Nodes, size: int) -> set[str]:
        plain = made.add("Elementwise", made.add("Opaque", size=size), size=size)
        return {plain, made.add("Columns", plain, size=4)}

    def packed(size: int, share: float, part: Callable[[Nodes, int], set[str]] = normalized) -> bool:
        made = Nodes()
        parts = [part(made, size) for _ in range(2)]
        plan = partition_graph(made.graph(), made.op_patterns, replace(UNIT, packed=share))
        return any(parts[0] & set(s.members) and parts[1] & set(s.members) for r in plan.regions for s in r.kernels)

    assert packed(400, 0.0)
    assert packed(24, 1.0)
    assert not packed(400, 1.0)
    assert packed(400, 0.0, summed)
    assert packed(24, 1.0, summed)
    assert not packed(400, 1.0, summed)


def test_parts_of_one_size_are_packed_where_parts_of_two_are_no_kernel():
    """In an order in which no two neighbours are of one size."""
    made, sizes = Nodes(), {}
    for number, size in enumerate((3000, 8, 3000, 8)):
        first = made.add("Elementwise", made.add("Opaque", size=size), size=size, name=f"first_{number}")
        sizes |= dict.fromkeys((first, made.add("Elementwise", first, size=size, name=f"last_{number}")), size)
    plan = partition_graph(
        made.graph(),
        made.op_patterns,
        UNIT,
        refuse=lambda names: "two sizes" if len({sizes[name] for name in names}) > 1 else "",
    )
    (region,) = plan.regions
    assert {frozenset(kernel.members) for kernel in region.kernels} == {
        frozenset({"first_0", "last_0", "first_2", "last_2"}),
        frozenset({"first_1", "last_1", "first_3", "last_3"}),
    }


def test_parts_that_are_too_many_for_one_kernel_are_packed_in_two():
    made = Nodes()
    for number in range(4):
        first = made.add("Elementwise", made.add("Opaque"), name=f"first_{number}")
        made.add("Elementwise", first, name=f"last_{number}")
    plan = partition_graph(
        made.graph(), made.op_patterns, UNIT, refuse=lambda names: "more than two parts" if len(names) > 4 else ""
    )
    (region,) = plan.regions
    assert {frozenset(kernel.members) for kernel in region.kernels} == {
        frozenset({"first_0", "last_0", "first_1", "last_1"}),
        frozenset({"first_2", "last_2", "first_3", "last_3"}),
    }


@pytest.mark.parametrize("shared", [False, True])
def test_parts_of_a_long_source_are_packed_in_several_kernels(shared: bool):
    """Also where all of them read one number that is computed first; one part alone stays whole."""
    made = Nodes()
    number = made.add("Elementwise", made.add("Opaque", size=4), size=4, name="number")
    for part in range(6):
        x = made.add("Opaque", size=400)
        for place in range(5):
            x = made.add("Elementwise", x, *([number] if shared else []), size=400, name=f"part_{part}_{place}")

    def longest(source: int) -> int:
        plan = partition_graph(made.graph(), made.op_patterns, replace(UNIT, source=source))
        return max(len(kernel.members) for region in plan.regions for kernel in region.kernels)

    long = 15 * OF_OP + 3 * OF_RESULT + 1  # three parts
    assert longest(0) >= 30
    assert 5 <= longest(long) < 30
    assert longest(1) == 5


def test_what_only_says_a_shape_divides_no_region():
    # No region can hold the op that says the shape, and that waits for an op before the view.
    made = Nodes()
    before = made.add("Elementwise", made.add("Elementwise", made.add("Opaque")), name="before")
    view = made.add("View", before, made.add("Opaque", before), name="view")
    made.add("Elementwise", view, name="behind")
    (region,) = partition_graph(made.graph(), made.op_patterns, UNIT).regions
    assert {"before", "view", "behind"} <= set(region.members)


def test_what_exploration_finds_across_a_product_is_chosen_where_it_saves_more():
    # 3000 bytes are read before and behind a product. Substitution fuses what comes before it, so that they are written
    # and read again. Exploration leaves the product's operand alone, and computes both of their readers with them:
    # alone the three move 8 + 3000, 3000 and 3000 + 8, in three launches, for 8 + 8 of them together, in one.
    made = Nodes()
    x = made.add("Opaque")
    large = made.add("Elementwise", x, size=3000, name="large")
    made.add("Elementwise", large, name="before")
    product = made.add("Product", made.add("Elementwise", x, name="operand"), name="product")
    made.add("Elementwise", large, product, name="behind")
    plan = partition_graph(made.graph(), made.op_patterns, UNIT)
    (region,) = plan.regions
    assert [(step.members, step.explored) for step in region.steps] == [
        (("operand",), False),
        (("product",), False),
        (("large", "behind", "before"), True),
    ]
    assert region.choice.score == 3008 + 3000 + 3008 - 16 + 2 * 100
    assert run_plan(made.graph(), made.op_patterns, plan) == run_graph(made.graph(), made.op_patterns)


def test_what_substitution_asks_to_be_measured_is_measured_at_once():
    made = Nodes()
    x = made.add("Opaque", size=800)
    for _ in range(3):  # a row's sums, and columns' sums of what they scale
        scaled = made.add("Elementwise", x, made.add("Rows", x, size=80), size=800)
        x = made.add("Opaque", scaled, made.add("Columns", scaled, size=80), size=800)
    prepared, asked = [], []

    def seconds(members):
        asked.append(frozenset(members))
        return 10.0 * len(members)

    def prepare(patterns):
        prepared.append({frozenset(members) for members in patterns})

    measure = Measure(seconds, lambda name: None, prepare)
    partition_graph(made.graph(), made.op_patterns, UNIT, measure=measure)
    assert any(len(members) > 1 for members in asked)
    assert set(asked) <= prepared[0]
