"""Which part of a session's graph is the training step."""

import pytest

from graph_passes.analysis.memory.roles import has_gradient
from graph_passes.analysis.memory.session_step import (
    find_fetches,
    reads_before_updates,
    step_region,
    waits_in_place,
    with_waits,
)
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, Node, TensorId


def node(name, op, inputs=(), control=()):
    outputs = 0 if op in ("NoOp", "AssignVariableOp", "AssignSubVariableOp") else 1
    return Node(name, op, [TensorId(each) for each in inputs], list(control), outputs=outputs)


def net(name):
    """One layer with its initializer, its update and a moving average of its output."""
    return [
        node(f"{name}/w", "VarHandleOp"),
        node(f"{name}/zeros", "Const"),
        node(f"{name}/init", "AssignVariableOp", [f"{name}/w", f"{name}/zeros"]),
        node(f"{name}/read", "ReadVariableOp", [f"{name}/w"]),
        node(f"{name}/layer", "MatMul", ["x", f"{name}/read"]),
        node(f"{name}/gradient", "MatMul", ["x", f"{name}/layer"]),
        node(f"{name}/update", "AssignSubVariableOp", [f"{name}/w", f"{name}/gradient"]),
        node(f"{name}/average", "VarHandleOp"),
        node(f"{name}/follow", "AssignSubVariableOp", [f"{name}/average", f"{name}/layer"]),
        node(f"{name}/again", "ReadVariableOp", [f"{name}/w"], [f"{name}/update"]),
    ]


def graph(*nodes):
    return Graph([node("x", "Placeholder"), *nodes])


def test_only_what_trains_is_in_the_step():
    whole = graph(*net("a"), node("train", "NoOp", control=["a/update"]), node("init", "NoOp", control=["a/init"]))
    assert find_fetches(whole) == ["a/update"]
    region = step_region(whole)
    assert {each.name for each in region} == {"x", "a/w", "a/read", "a/layer", "a/gradient", "a/update"}
    assert len(whole) == 13
    assert {each.name for each in step_region(whole, ["init"])} == {"init", "a/init", "a/w", "a/zeros"}
    with pytest.raises(GraphError, match="no node 'nothing'"):
        step_region(whole, ["nothing"])


def test_updates_that_one_op_waits_for_are_one_step():
    both = [*net("a"), *net("b")]
    assert find_fetches(graph(*both, node("train", "NoOp", control=["a/update", "b/update"]))) == [
        "a/update",
        "b/update",
    ]
    assert find_fetches(graph(*both)) == ["a/update", "b/update"]  # they are in no group: each weight is alone


def test_several_steps_are_told_apart():
    four = [each for name in "abcd" for each in net(name)]
    steps = [
        node("one", "NoOp", control=["a/update", "b/update"]),
        node("two", "NoOp", control=["c/update", "d/update"]),
    ]
    with pytest.raises(GraphError, match=r"several training steps, 'one', 'two'.*fetches=\['one'\]"):
        find_fetches(graph(*four, *steps))


def test_without_updates_the_results_of_layers_count():
    assert find_fetches(graph(node("w", "VarHandleOp"), node("read", "ReadVariableOp", ["w"]))) == ["x", "read"]
    bare = [each for each in net("a") if "update" not in each.name and "again" not in each.name]
    assert find_fetches(graph(*bare)) == ["a/gradient"]


def test_reference_variables_are_read_before_they_are_updated():
    nodes = [
        node("w", "VariableV2"),
        node("w/read", "Identity", ["w"]),
        node("layer", "MatMul", ["x", "w/read"]),
        node("backward", "MatMul", ["layer", "w/read"]),
        node("update", "ApplyGradientDescent", ["w", "layer"]),
        node("after", "Square", ["w/read"], ["update"]),
    ]
    assert sorted(reads_before_updates(graph(*nodes))) == [("update", "backward"), ("update", "layer")]
    assert not reads_before_updates(graph(*net("a")))


def test_gradients_are_recognised():
    assert has_gradient(graph(*net("a")))
    forward = [each for each in net("a") if each.name in ("a/w", "a/read", "a/layer")]
    assert not has_gradient(graph(*forward))
    assert has_gradient(graph(*forward, node("relu", "ReluGrad", ["a/layer", "x"])))


def test_an_update_waits_for_who_reads_the_value_before_it():
    step = graph(
        *net("a")[:5],
        node("a/gradient", "MatMul", ["x", "a/layer"]),
        node("a/back", "MatMul", ["a/layer", "a/read"]),
        node("a/update", "AssignSubVariableOp", ["a/w", "a/gradient"], ["a/read"]),
        node("a/again", "ReadVariableOp", ["a/w"], ["a/update"]),
        node("a/after", "Neg", ["a/again"]),
        node("a/late", "AddV2", ["a/after", "a/read"]),
    )
    step = with_waits(step, waits_in_place(step))
    assert set(step["a/update"].control) == {"a/read", "a/layer", "a/back"}  # a/late waits for the update itself


def test_a_variable_that_gets_a_new_tensor_does_not_wait():
    step = graph(*net("a"))
    assert "a/init" not in {update for update, _ in waits_in_place(step)}
