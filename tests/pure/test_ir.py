"""The graph, its edits, its order."""

import pytest

from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec, Use, parse_input
from graph_passes.graph.order import schedule, topological
from graph_passes.graph.verify import verify_graph


def diamond() -> Graph:
    """a -> b, c -> d"""
    return Graph(
        [
            Node("a", "Const", outputs=1),
            Node("b", "Neg", [TensorId("a")], outputs=1),
            Node("c", "Exp", [TensorId("a")], outputs=1),
            Node("d", "Add", [TensorId("b"), TensorId("c")], outputs=1),
        ]
    )


def test_uses_follow_rewires():
    graph = diamond()
    assert sorted(graph.uses(TensorId("a"))) == [Use("b", 0), Use("c", 0)]
    graph.rewire("c", 0, TensorId("b"))
    assert graph.uses(TensorId("a")) == [Use("b", 0)]
    assert sorted(graph.uses(TensorId("b"))) == [Use("c", 0), Use("d", 0)]
    assert topological(graph) == ["a", "b", "c", "d"]


def test_insert_makes_names_unique():
    graph = diamond()
    assert graph.insert("b", "Identity", [TensorId("a")], {}) == "b_1"
    release = graph.insert("r", "MemOpRelease", [TensorId("a"), TensorId("b")], {}, control=["d"], outputs=0)
    assert graph[release].outputs == 0
    assert "r" in set(graph.successors(graph["d"]))


def test_copies_are_independent():
    graph = diamond()
    copy = graph.copy()
    copy.rewire("c", 0, TensorId("b"))
    copy.add_control("d", "a")
    assert graph["c"].inputs == [TensorId("a")]
    assert graph["d"].control == []


def test_a_cycle_names_a_node_on_it():
    graph = diamond()
    graph.add_control("b", "d")
    with pytest.raises(GraphError, match=r"cycle through or before '[bd]'"):
        verify_graph(graph)


def test_unknown_names_and_ports_are_refused():
    graph = diamond()
    with pytest.raises(GraphError, match="no node 'x'"):
        graph.rewire("x", 0, TensorId("a"))
    with pytest.raises(GraphError, match="reads 'x'"):
        graph.rewire("d", 0, TensorId("x"))
    with pytest.raises(GraphError, match="two nodes are called 'a'"):
        Graph([Node("a", "Const"), Node("a", "Const")])
    graph.rewire("d", 0, TensorId("a", 3))
    with pytest.raises(GraphError, match="has 1 outputs"):
        verify_graph(graph)


def test_schedule_follows_creation_and_puts_new_nodes_before_their_reader():
    # Grappler made `t`; the program made c before b
    graph = diamond()
    graph.insert("t", "Transpose", [TensorId("a")], {})
    graph.rewire("b", 0, TensorId("t"))
    assert schedule(graph, ["a", "c", "b", "d"]) == ["a", "c", "t", "b", "d"]


def test_schedule_reads_shapes_early_and_frees_early():
    big, small = TensorSpec("float32", 4, (1000,)), TensorSpec("float32", 4, (1,))
    nodes = [
        Node("x", "Relu", [], outputs=1),
        Node("y", "Relu", [TensorId("x")], outputs=1),
        Node("z", "Relu", [TensorId("y")], outputs=1),
        Node("shape", "Shape", [TensorId("x")], outputs=1),
        Node("other", "Exp", [TensorId("z")], outputs=1),
        Node("sum", "Sum", [TensorId("y")], outputs=1),
    ]
    specs = {TensorId(n.name): big for n in nodes} | {TensorId("shape"): small, TensorId("sum"): small}
    order = schedule(Graph(nodes, specs), [n.name for n in nodes])
    # `shape` goes to its tensor; `sum`, the last to read y's 4,000 bytes, goes right behind z, the other reader
    assert order.index("shape") == order.index("x") + 1
    assert order.index("sum") < order.index("other")


def test_schedule_puts_views_before_their_first_reader():
    """Two in a row keep their order; one that no node reads stays."""
    nodes = [
        Node("x", "Relu", [], outputs=1),
        Node("one", "Identity", [TensorId("x")], outputs=1),
        Node("two", "Reshape", [TensorId("one")], outputs=1),
        Node("unread", "Identity", [TensorId("x")], outputs=1),
        Node("y", "Relu", [], outputs=1),
        Node("z", "Relu", [TensorId("two")], outputs=1),
    ]
    order = schedule(Graph(nodes, {TensorId(node.name): TensorSpec("float32", 4, (8,)) for node in nodes}))
    assert order == ["x", "unread", "y", "one", "two", "z"]


def test_schedule_frees_early_through_views_and_beside_constants():
    """A weight's gradient reads two large tensors, one reshaped by a constant that the program made late."""
    big, small = TensorSpec("float32", 4, (100_000,)), TensorSpec("float32", 4, (2,))
    nodes = [
        Node("x", "Relu", [], outputs=1),
        Node("dy", "ReluGrad", [TensorId("x")], outputs=1),
        Node("dx", "Conv2DBackpropInput", [TensorId("dy")], outputs=1),
        Node("more", "ReluGrad", [TensorId("dx")], outputs=1),
        Node("shape", "Const", [], outputs=1),
        Node("flat", "Reshape", [TensorId("dy"), TensorId("shape")], outputs=1),
        Node("dw", "MatMul", [TensorId("flat"), TensorId("x")], outputs=1),
    ]
    specs = {TensorId(n.name): big for n in nodes} | {TensorId("shape"): small, TensorId("dw"): small}
    order = schedule(Graph(nodes, specs), [node.name for node in nodes])
    assert order.index("dw") < order.index("dx")


def test_inputs_as_graph_defs_write_them():
    assert parse_input("a") == (TensorId("a", 0), False)
    assert parse_input("a:2") == (TensorId("a", 2), False)
    assert parse_input("^a") == (TensorId("a", 0), True)
    assert TensorSpec("float32", 4, (2, None)).nbytes is None
    assert TensorSpec("float32", 4, (2, 3)).nbytes == 24
