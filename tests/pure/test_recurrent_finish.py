"""What is done to a match at last: initial zeros that no op fills, biases that products add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from custom_ops.recurrent import cells
from graph_passes.graph.ir import DataType, Graph, Literal, Node, TensorId, TensorSpec
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.passes.recurrent.cleanup import FUSED, with_fused_biases, without_zeros
from graph_passes.passes.recurrent.lower.bidirectional import paired
from graph_passes.passes.recurrent.match import Direction, Joinable, Match, RecurrentNode

UNITS = 4


def tensor(name: str) -> TensorId:
    return TensorId(name)


def graph(fill: float = 0.0) -> Graph:
    """A graph with a state that is filled with a number, and one that is given."""
    nodes = [Node(name, "Placeholder", outputs=1) for name in ("rows", "given", "gates", "weights")]
    nodes += [Node("number", "Const", outputs=1), Node("filled", "Fill", [tensor("rows"), tensor("number")], outputs=1)]
    specs = {tensor(node.name): TensorSpec("float32", 4, (2, UNITS)) for node in nodes}
    return Graph(nodes, specs, constants={"number": np.float32(fill)})


def launch(name: str = "launch", states: tuple[str, str] = ("filled", "given"), reverse: bool = False) -> RecurrentNode:
    read = tuple(map(tensor, states))
    direction = Direction((tensor("gates"),), (), (), (tensor("weights"),), read, reverse)
    return RecurrentNode(name, cells.lstm(), UNITS, "float32", (direction,), device="/device:GPU:0")


def match_of(*nodes: NewNode | RecurrentNode, **changes: Any) -> Match:
    return replace(Match("layer", "While", tuple(nodes), (), ()), **changes)


def test_a_state_of_zeros_is_not_filled() -> None:
    found = without_zeros(graph(), match_of(launch()), Names(graph()))
    none, changed = found.nodes
    assert isinstance(none, NewNode)
    assert isinstance(changed, RecurrentNode)
    assert (none.op, none.device) == ("Const", "/device:GPU:0")
    assert none.attrs["value"] == Literal("float32", (0, UNITS), ())
    assert changed.directions[0].states == (tensor(none.name), tensor("given"))


def test_both_directions_read_the_same_nothing() -> None:
    both = replace(launch(states=("filled", "filled")), directions=launch(states=("filled", "filled")).directions * 2)
    none, changed = without_zeros(graph(), match_of(both), Names(graph())).nodes
    assert isinstance(changed, RecurrentNode)
    assert {state for direction in changed.directions for state in direction.states} == {tensor(none.name)}


@pytest.mark.parametrize("states", [("filled", "filled"), ("given", "given"), ("new", "given")])
def test_other_states_stay(states: tuple[str, str]) -> None:
    match = match_of(NewNode("new", "Reshape", (tensor("filled"), tensor("rows"))), launch(states=states))
    assert without_zeros(graph(fill=0.5), match, Names(graph())) == match


def test_directions_whose_sequences_lie_otherwise_are_not_joined() -> None:
    def launches(batch_major: bool) -> int:
        ahead, back = launch("ahead"), replace(launch("back", reverse=True), batch_major=batch_major)
        candidates = [Joinable(match_of(each, name=each.name), 5, frozenset({2})) for each in (ahead, back)]
        return len(paired(graph(), candidates, Names(graph()), []))

    assert launches(batch_major=False) == 1
    assert launches(batch_major=True) == 2


def product(dtype: str = "float32") -> tuple[NewNode, NewNode]:
    attrs = {"T": DataType(dtype), "transpose_a": False, "transpose_b": True}
    made = NewNode("product", "MatMul", (tensor("x"), tensor("weights")), attrs)
    return made, NewNode("sum", "BiasAdd", (tensor("product"), tensor("bias")), {"T": DataType(dtype)}, "/device:GPU:0")


def test_a_product_adds_its_bias() -> None:
    between = NewNode("bias", "Reshape", (tensor("given"), tensor("rows")))
    made, added = product()
    found = with_fused_biases(match_of(made, between, added, rewired=((tensor("old"), tensor("sum")),)))
    assert [node.name for node in found.nodes] == ["bias", "sum"]
    fused = found.nodes[1]
    assert isinstance(fused, NewNode)
    assert (fused.op, fused.device) == (FUSED, "/device:GPU:0")
    assert fused.inputs == (tensor("x"), tensor("weights"), tensor("bias"))
    assert (fused.attrs["transpose_a"], fused.attrs["transpose_b"]) == (False, True)
    assert (fused.attrs["fused_ops"], fused.attrs["num_args"]) == (("BiasAdd",), 1)


def test_a_product_that_others_read_stays() -> None:
    made, added = product()
    reader = NewNode("reader", "Neg", (tensor("product"),))
    for match in (
        match_of(made, added, reader),
        match_of(made, added, rewired=((tensor("old"), tensor("product")),)),
        match_of(*product("float64")),
        match_of(*product("bfloat16")),
        match_of(replace(made, control=("gates",)), added),
        match_of(added),
    ):
        assert with_fused_biases(match) == match
