"""What planning knows of a region: which of its nodes wait for which, and which are separate kernels."""

from __future__ import annotations

from graph_passes.analysis.op_pattern import IN_KERNELS
from graph_passes.graph.ir import TensorId
from graph_passes.passes.fuse.partition.candidate import RegionCandidate, candidate_of
from tests.fusion_graphs import Nodes


def body_of(made: Nodes, members: list[str]) -> RegionCandidate:
    fetched = [TensorId(members[-1])]
    return candidate_of(
        made.graph(), made.op_patterns, members, fetched, lambda name: made.op_patterns[name].pattern in IN_KERNELS
    )


def test_a_read_waits_for_the_update_before_it_by_an_edge_of_its_own():
    """The control edges lead by way of another node, with which both could be in one kernel."""
    made = Nodes()
    w, x = made.add("Handle", name="w"), made.add("Opaque", name="x")
    made.add("Update", w, x, name="update")
    made.add("Elementwise", x, name="between", control=["update"])
    made.add("Read", w, name="read", control=["between"])
    found = body_of(made, ["update", "between", "read"])
    assert found.names == ("update", "between", "read")
    assert found.incompatible == {(0, 2)}
    assert found.net.before == ((), (0,), (0, 1))


def test_views_constants_and_what_no_kernel_holds_are_no_kernels():
    made = Nodes()
    x = made.add("Opaque", name="x")
    product = made.add("Product", x, x, name="product")
    view = made.add("View", product, name="view")
    zeros = made.add("Zeros", view, name="zeros")
    made.add("Elementwise", view, zeros, name="sum")
    found = body_of(made, ["product", "view", "zeros", "sum"])
    assert [found.works(number) for number in range(4)] == [False, False, False, True]
