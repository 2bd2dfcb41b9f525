"""Products within patterns: what is around them, what is left of other patterns, and plans of random graphs."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.cost.kernel_costs import Small
from graph_passes.analysis.op_pattern import IN_KERNELS, OpPattern, patterns_of
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import topological
from graph_passes.passes.fuse.partition.candidate import candidate_of
from graph_passes.passes.fuse.partition.mixed import mixed_patterns
from graph_passes.passes.fuse.partition.partition import PRODUCTS, Partition, StepKind, partition_graph, small_products
from graph_passes.passes.fuse.partition.patterns import substitution
from graph_passes.passes.fuse.partition.score import Measure, Refuse, Scorer
from tests.fusion_graphs import UNIT, Nodes, graphs, run_graph, run_plan
from tests.tiers import examples

WITH_PRODUCTS = replace(UNIT, product=20.0)
SMALL = ("product", "query", "key")  # products that can be in a kernel


def planned(
    made: Nodes, measure: Measure | None = None, small: tuple[str, ...] | None = None, long_rows: bool = False
) -> Partition:
    def generated(name: str) -> bool:
        return made.op_patterns[name].pattern in PRODUCTS and (small is None or name in small)

    def refuse(members):
        kinds = {made.op_patterns[name].pattern for name in members}
        return "no tile has a row" if long_rows and OpPattern.ROW_REDUCTION in kinds and kinds & PRODUCTS else ""

    return partition_graph(
        made.graph(), made.op_patterns, WITH_PRODUCTS, generated=generated, refuse=refuse, measure=measure
    )


def kernels(plan: Partition) -> list[set[str]]:
    return [set(step.members) for region in plan.regions for step in region.kernels]


@settings(max_examples=examples(60))
@given(graphs(), st.integers(0, 1000))
def test_a_plan_computes_what_the_graph_computes(made, seed):
    graph, known = made

    def chance(members, one_in):
        return crc32(repr((seed, [graph[name].op for name in members])).encode()) % one_in == 0

    def refuse(members):
        return "no kernel for these" if len(members) > 1 and chance(members, 4) else ""

    def seconds(members):  # of equal patterns the same
        return None if chance(members, 5) else float(crc32(repr([graph[n].op for n in members]).encode()) % 997)

    plan = partition_graph(
        graph,
        known,
        WITH_PRODUCTS,
        generated=lambda name: known[name].pattern in PRODUCTS and not chance([name], 3),
        refuse=refuse,
        measure=Measure(seconds, lambda name: seconds([name])) if seed % 2 else None,
    )
    members = [name for region in plan.regions for name in region.members]
    assert len(set(members)) == len(members)
    assert sorted([*members, *plan.reasons]) == sorted(graph.nodes)
    for region in plan.regions:
        for step in region.steps:
            found = {known[name].pattern for name in step.members}
            assert (found <= IN_KERNELS | PRODUCTS) if step.kind is StepKind.KERNEL else len(step.members) == 1
            assert step.kind is not StepKind.KERNEL or refuse(step.members) == ""
    assert run_plan(graph, known, plan) == run_graph(graph, known)


def layer(made: Nodes) -> None:
    """A scaled input, a product, a bias, and an activation."""
    x, w, bias = made.add("Opaque", name="x"), made.add("Opaque", name="w"), made.add("Opaque", name="bias")
    scaled = made.add("Elementwise", x, name="scaled")
    product = made.add("Product", scaled, w, name="product")
    added = made.add("Elementwise", product, bias, name="added")
    made.add("Elementwise", added, name="activated")


def test_a_product_takes_its_prologue_and_its_epilogue() -> None:
    made = Nodes()
    layer(made)
    assert kernels(planned(made)) == [{"scaled", "product", "added", "activated"}]


def test_what_a_product_takes_is_missing_elsewhere() -> None:
    """A reduction waits for the whole product: it is a separate kernel, with what the product leaves."""
    made = Nodes()
    layer(made)
    made.add("Rows", "activated", name="mean")
    made.add("Elementwise", "activated", "mean", name="centred")
    first, second = kernels(planned(made, long_rows=True))
    assert {"scaled", "product"} <= first <= {"scaled", "product", "added", "activated"}
    assert second == {"added", "activated", "mean", "centred"} - first
    assert kernels(planned(made)) == [first | second]


def mixed(made: Nodes, *results: str, refuse: Refuse | None = None) -> set[frozenset[str]]:
    """The names in all patterns with products, and in what they leave."""
    graph, known = made.graph(), made.op_patterns
    inside = [name for name in topological(graph) if known[name].pattern is not OpPattern.OPAQUE]
    outputs = {TensorId(name) for name in results}
    given = candidate_of(
        graph, known, inside, outputs, lambda name: known[name].pattern in IN_KERNELS, lambda name: name in SMALL
    )
    scorer = Scorer(given, WITH_PRODUCTS, refuse)
    found = mixed_patterns(scorer, substitution(scorer))
    return {frozenset(given.names[number] for number in each.members) for each in found}


def test_what_the_largest_pattern_of_a_product_leaves_is_a_pattern() -> None:
    """The largest that is not refused: without what waits for the reduction."""
    made = Nodes()
    layer(made)
    made.add("Rows", "activated", name="mean")
    made.add("Elementwise", "activated", "mean", name="centred")
    found = mixed(made, "centred", refuse=lambda names: "no rows" if {"product", "mean"} <= {*names} else "")
    assert frozenset({"scaled", "product", "added", "activated"}) in found
    assert frozenset({"mean", "centred"}) in found


@pytest.mark.parametrize("between", [(), ("Elementwise",)])
def test_no_pattern_holds_two_products_of_which_one_waits_for_the_other(between: tuple[str, ...]) -> None:
    made = Nodes()
    x = made.add("Opaque")
    last = made.add("Product", x, made.add("Opaque"), name="query")
    for op in between:
        last = made.add(op, last)
    made.add("Product", x, last, name="key")
    assert not any({"query", "key"} <= members for members in mixed(made, "key"))


def test_no_path_leaves_a_pattern_and_comes_back() -> None:
    """What is behind one product reads what a large one makes of what is behind another of the same operand."""
    made = Nodes()
    x, w = made.add("Opaque"), made.add("Opaque")
    first = made.add("Elementwise", made.add("Product", x, w, name="query"), name="first")
    large = made.add("Product", first, w, name="large")
    made.add("Elementwise", made.add("Product", x, w, name="key"), large, name="last")
    found = mixed(made, "last")
    assert {frozenset({"query", "first"}), frozenset({"key", "last"}), frozenset({"query", "key"})} <= found
    assert not any({"first", "last"} <= members for members in found)


def test_a_large_product_stays_a_call() -> None:
    made = Nodes()
    layer(made)
    plan = planned(made, small=())
    assert kernels(plan) == [{"scaled"}, {"added", "activated"}]
    assert [step.members for step in plan.regions[0].steps if step.kind is StepKind.CALL] == [("product",)]


def test_products_of_one_operand_are_one_kernel() -> None:
    made = Nodes()
    x = made.add("Opaque", name="x")
    for name in ("query", "key", "value"):
        made.add("Product", x, made.add("Opaque"), name=name)
        made.add("Layout", name, name=f"{name} heads")
    made.add("Batched", "query heads", "key heads", name="scores")
    found = kernels(planned(made, small=("query", "key", "value")))
    assert {"query", "key", "value"} <= found[0]


def test_a_variable_is_updated_behind_a_product() -> None:
    made = Nodes()
    w, x = made.add("Handle", name="w"), made.add("Opaque", name="x")
    value = made.add("Read", w, name="value")
    made.add("Product", x, x, name="gradient")
    scaled = made.add("Elementwise", "gradient", value, name="scaled")
    made.add("Update", w, scaled, name="update", control=[value])
    assert kernels(planned(made)) == [{"gradient", "scaled", "update"}]


def test_what_waits_for_another_product_is_no_epilogue() -> None:
    """A residual that comes from behind the product."""
    made = Nodes()
    x, w = made.add("Opaque", name="x"), made.add("Opaque", name="w")
    first = made.add("Product", x, w, name="first")
    made.add("Elementwise", first, name="activated")
    made.add("Product", "activated", w, name="second")
    made.add("Elementwise", "second", first, name="sum")
    for members in kernels(planned(made)):
        assert not {"first", "sum"} <= members or "second" in members
        assert not {"first", "second"} <= members


@pytest.mark.parametrize(("own", "expected"), [(50.0, 4), (500.0, 1)])
def test_what_is_slower_than_the_library_stays_a_call(own: float, expected: int) -> None:
    """By execution: the product, its prologue and the rest of it take 10 s each."""
    made = Nodes()
    layer(made)
    asked: list[tuple[str, ...]] = []

    def seconds(members):
        asked.append(tuple(members))
        return own if "product" in members else 10.0

    plan = planned(made, Measure(seconds, lambda name: 60.0))
    steps = {name: len(step.members) for region in plan.regions for step in region.steps for name in step.members}
    assert steps["product"] == expected
    assert ("scaled", "product", "added", "activated") in asked
    assert ("added", "activated") in asked


def test_what_cannot_be_measured_is_planned_by_model() -> None:
    made = Nodes()
    layer(made)
    by_model = kernels(planned(made))
    assert kernels(planned(made, Measure(lambda members: None, lambda name: None))) == by_model


def test_small_is_what_the_device_says() -> None:
    def small(rows: int | None, columns: int, depth: int, bound: Small) -> bool:
        nodes = [Node(name, "Placeholder", [], [], "", {}, 1) for name in "xw"]
        nodes.append(Node("y", "MatMul", [TensorId("x"), TensorId("w")], [], "", {}, 1))
        shapes = {"x": (rows, depth), "w": (depth, columns), "y": (rows, columns)}
        graph = Graph(nodes, {TensorId(name): TensorSpec("float32", 4, shape) for name, shape in shapes.items()})
        return small_products(graph, patterns_of(graph), replace(UNIT, most=bound))("y")

    assert small(32, 16, 64, Small(2 * 32 * 16 * 64, 1 << 20))
    assert not small(32, 16, 64, Small(2 * 32 * 16 * 64 - 1, 1 << 20))
    assert not small(32, 16, 64, Small(1 << 20, 4 * (32 * 64 + 64 * 16 + 32 * 16) - 1))
    assert not small(None, 16, 64, Small(1 << 20, 1 << 20))
