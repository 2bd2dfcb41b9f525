"""Graphs before regions are planned: which products are one, and what is computed again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graph_passes.analysis.equal_numbers import equal_numbers
from graph_passes.analysis.op_pattern import patterns_of
from graph_passes.graph.flatten import FlatProduct, flat_product_rewrites, flat_products
from graph_passes.graph.ir import Graph, TensorId, TensorSpec
from graph_passes.graph.order import topological
from graph_passes.graph.rewrite import Names, apply_rewrites
from graph_passes.passes.prepare.apply import equal_rewrites, recompute_rewrites
from graph_passes.passes.prepare.copies import recomputed
from graph_passes.passes.prepare.plan import Needs, plan_prepare
from tests.float_graphs import Build, Given


def weights_gradient(
    keep_dims: bool = False, axes: Sequence[int] = (0, 1), right: Sequence[int] = (4, 3, 7, 6)
) -> Build:
    """Products of [7, 5]^T and [7, 6], added up over a batch of 4 times 3."""
    b = Build()
    b("x", "Placeholder", (4, 3, 7, 5))
    b("y", "Placeholder", right)
    b("product", "BatchMatMulV2", (4, 3, 5, 6), "x", "y", adj_x=True, adj_y=False)
    b("total", "Sum", (5, 6), "product", b.axes("axes", *axes), keep_dims=keep_dims)
    b("out", "Relu", (5, 6), "total")
    return b


def projection(left: Sequence[int | None], right: Sequence[int], adj_y: bool = False) -> Build:
    b = Build()
    b("x", "Placeholder", left)
    b("w", "Placeholder", right)
    columns = right[-2] if adj_y else right[-1]
    b("product", "BatchMatMulV2", (*left[:-1], columns), "x", "w", adj_x=False, adj_y=adj_y)
    b("out", "Relu", (*left[:-1], columns), "product")
    return b


def test_products_that_are_added_up_are_one_with_a_longer_depth():
    graph = weights_gradient().graph()
    (found,) = plan = flat_products(graph, {"out"})
    assert found == FlatProduct("product", "total", (-1, 5), (-1, 6), (5, 6))
    apply_rewrites(flat_product_rewrites(plan, graph, Names(graph)), graph)
    (product,) = (node for node in graph if node.op == "MatMul")
    assert product.attrs["transpose_a"]
    assert not product.attrs["transpose_b"]
    assert graph["out"].inputs == [TensorId(product.name)]
    assert "product" not in graph.nodes
    assert "total" not in graph.nodes
    topological(graph)


@pytest.mark.parametrize(
    ("build", "keep"),
    [
        (weights_gradient(keep_dims=True), {"out"}),
        (weights_gradient(axes=(0,)), {"out"}),
        (weights_gradient(axes=(2, 3)), {"out"}),
        (weights_gradient(right=(1, 1, 7, 6)), {"out"}),
        (weights_gradient(), {"total"}),
        (weights_gradient(), {"product", "out"}),
    ],
    ids=["keeps sizes", "part of the batch", "not the batch", "broadcast", "fetched", "product fetched"],
)
def test_other_sums_of_products_stay(build: Build, keep: set[str]):
    assert flat_products(build.graph(), keep) == ()


def test_halves_are_rounded_before_they_are_added_up():
    b = weights_gradient()
    b.specs = {name: TensorSpec("half", 2, spec.shape) for name, spec in b.specs.items() if spec.dtype == "float32"}
    assert flat_products(b.graph(), {"out"}) == ()


def test_a_product_with_another_reader_stays():
    b = weights_gradient()
    b("other", "Relu", (4, 3, 5, 6), "product")
    assert flat_products(b.graph(), {"out"}) == ()


@pytest.mark.parametrize(
    ("left", "right", "adj_y", "shapes"),
    [
        ((4, 7, 5), (5, 6), False, ((-1, 5), (5, 6), (-1, 7, 6))),
        ((None, 7, 5), (6, 5), True, ((-1, 5), (6, 5), (-1, 7, 6))),
        ((2, 3, 7, 5), (1, 1, 5, 6), False, ((-1, 5), (5, 6), (-1, 3, 7, 6))),
    ],
)
def test_all_rows_of_a_batch_times_one_matrix(left, right, adj_y, shapes):
    graph = projection(left, right, adj_y).graph()
    (found,) = plan = flat_products(graph, {"out"})
    assert (found.left, found.right, found.result) == shapes
    apply_rewrites(flat_product_rewrites(plan, graph, Names(graph)), graph)
    (product,) = (node for node in graph if node.op == "MatMul")
    assert product.attrs["transpose_b"] == adj_y
    assert graph[graph["out"].inputs[0].node].op == "Reshape"


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, None, 5), (5, 6)), ((4, 7, 5), (4, 5, 6)), ((1, 7, 5), (5, 6)), ((0, 7, 5), (5, 6)), ((4, 7, None), (5, 6))],
    ids=["rows unknown", "one each", "a batch of one", "empty", "depth unknown"],
)
def test_other_products_stay(left, right):
    assert flat_products(projection(left, right).graph(), {"out"}) == ()


def trained(size: int = 1 << 19) -> Build:
    """x is read at once, and by the gradient behind two convolutions; `centered` only feeds the gradient."""
    b = Build()
    b("image", "Placeholder", (size, 4))
    b("bias", "Placeholder", (4,))
    b("conv", "Conv2D", (size, 4), "image")
    b("x", "BiasAdd", (size, 4), "conv", "bias")
    b("y", "Relu", (size, 4), "x")
    b("next", "Conv2D", (size, 4), "y")
    b("back", "Conv2DBackpropInput", (size, 4), "next")
    b("centered", "Sub", (size, 4), "x", "bias")
    b("late", "Mul", (size, 4), "back", "x")
    b("gradient", "Mul", (size, 4), "back", "centered")
    b("out", "Add", (size, 4), "late", "gradient")
    return b


def test_late_readers_have_a_value_computed_again():
    graph = trained().graph()
    (found,) = plan = recomputed(graph, patterns_of(graph), {"out"})
    assert (found.name, found.after) == ("x", "back")
    assert {use.node for use in found.late} == {"late", "centered"}
    apply_rewrites(recompute_rewrites(plan, graph, Names(graph)), graph)
    (again,) = (node for node in graph if node.op == "BiasAdd" and node.name != "x")
    assert (again.inputs, again.control) == ([TensorId("conv"), TensorId("bias")], ["back"])
    assert graph["y"].inputs == [TensorId("x")]
    assert graph["late"].inputs == [TensorId("back"), TensorId(again.name)]
    assert graph["centered"].inputs == [TensorId(again.name), TensorId("bias")]
    topological(graph)


@pytest.mark.parametrize(("whole", "count"), [(True, 1), (False, 0)])
def test_nothing_is_computed_again_where_a_part_of_the_graph_may_run_alone(whole, count):
    plan, _ = plan_prepare(Given(trained().graph()), Needs(whole))
    assert len(plan.recomputed) == count


def test_small_values_and_those_of_values_are_stored():
    graph = trained(size=16).graph()
    assert recomputed(graph, patterns_of(graph), {"out"}) == ()
    b = trained()
    b.nodes = [node for node in b.nodes if node.name != "conv"]
    b("conv", "Relu", (1 << 19, 4), "image")  # would be stored for no other op
    graph = b.graph()
    assert recomputed(graph, patterns_of(graph), {"out"}) == ()


def test_what_is_read_at_once_is_not_computed_again():
    b = trained()
    b.nodes = [node for node in b.nodes if node.name not in ("late", "gradient", "out", "centered")]
    graph = b.graph()
    assert recomputed(graph, patterns_of(graph), {"back"}) == ()


def decays(*controls: Sequence[str]) -> Build:
    """A number that is read and raised to a power once for each variable; reads wait for what is given."""
    b = Build()
    b("step", "Placeholder", ())
    b.specs[TensorId("step")] = TensorSpec("resource", 0, (), TensorSpec("float32", 4, ()))
    b("before", "Placeholder", ())
    for place, control in enumerate(controls):
        b(f"read_{place}", "ReadVariableOp", (), "step")
        b.nodes[-1].control = list(control)
        b(f"power_{place}", "Square", (), f"read_{place}")
        b(f"x_{place}", "Placeholder", (4 + place,))
        b(f"out_{place}", "Mul", (4 + place,), f"x_{place}", f"power_{place}")
    return b


def alike(build: Build, *keep: str) -> set[frozenset[str]]:
    """Which nodes are equal."""
    graph = build.graph()
    found = equal_numbers(graph, patterns_of(graph), keep)
    return {frozenset((each.name, *each.others)) for each in found}


def shared(build: Build, *keep: str) -> Graph:
    """The graph in which they are one."""
    graph = build.graph()
    apply_rewrites(equal_rewrites(equal_numbers(graph, patterns_of(graph), keep)), graph)
    return graph


def test_numbers_that_are_equal_are_computed_once():
    build, outs = decays((), (), ()), ("out_0", "out_1", "out_2")
    reads, powers = ({f"{name}_{place}" for place in range(3)} for name in ("read", "power"))
    assert alike(build, *outs) == {frozenset(reads), frozenset(powers)}
    graph = shared(build, *outs)
    assert len({graph[name].inputs[1] for name in outs}) == 1
    assert len(reads & set(graph.nodes)) == len(powers & set(graph.nodes)) == 1


def test_reads_that_wait_for_other_nodes_stay():
    build = decays((), ("before",), ("before",))
    assert alike(build, "out_0", "out_1", "out_2") == {
        frozenset({"read_1", "read_2"}),
        frozenset({"power_1", "power_2"}),
    }


def test_numbers_that_are_fetched_stay():
    assert alike(decays((), ()), "power_1", "read_1", "out_0", "out_1") == set()


def test_what_waits_for_a_number_that_goes_waits_for_the_one_that_stays():
    build = decays((), ())
    build("after", "Relu", (4,), "x_0")
    build.nodes[-1].control = ["read_0", "read_1"]
    graph = shared(build, "out_0", "out_1", "after")
    (waits,) = set(graph["after"].control)
    assert waits in graph.nodes
