"""Which gradient of a gradient loop belongs to which variable of the forward loop."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.train.loop_pairs import gradient_loops, read_pair, without_lists
from graph_passes.refusals import Reason

FLOAT = TensorSpec("float32", 4, (2, 2))
COUNT = TensorSpec("int32", 4, ())
LIST = TensorSpec("variant", 0, ())
HANDLE = TensorSpec("resource", 0, (), FLOAT)

# A forward loop: counter, bound, state, variable, weights as a tensor, list of what the gradient needs.
FORWARD = [COUNT, COUNT, FLOAT, HANDLE, FLOAT, LIST]


def function(specs: list[TensorSpec], changed: dict[int, str], more: tuple[Node, ...] = ()) -> Function:
    """A body whose variable n becomes op `changed[n]` of itself, or stays."""
    nodes = [Node(f"a{place}", "Placeholder", outputs=1) for place in range(len(specs))]
    found = {TensorId(node.name): spec for node, spec in zip(nodes, specs, strict=True)}
    results = []
    for place, spec in enumerate(specs):
        node = Node(f"r{place}", changed.get(place, "Identity"), [TensorId(f"a{place}")], outputs=1)
        nodes.append(node)
        found[TensorId(node.name)] = spec
        results.append(TensorId(node.name))
    return Function(Graph([*nodes, *more], found), tuple(f"a{place}" for place in range(len(specs))), tuple(results))


def graph(gradients: list[tuple[str, TensorSpec]], more: tuple[Node, ...] = ()) -> Graph:
    """A forward loop and a gradient loop that starts from these, each `(what it is made for, spec)`.

    "h", "K" and "W" are `ZerosLike` or `Fill` of the forward loop's state, variable and tensor; "zeros" is a constant.
    """
    nodes = [Node(f"i{place}", "Placeholder", outputs=1) for place in range(len(FORWARD))]
    specs = {TensorId(node.name): spec for node, spec in zip(nodes, FORWARD, strict=True)}
    nodes.append(Node("F", "While", [TensorId(node.name) for node in nodes], outputs=len(FORWARD)))
    specs |= {TensorId("F", place): spec for place, spec in enumerate(FORWARD)}
    constants = {"number": np.zeros((), np.float32)}
    nodes.append(Node("number", "Const", outputs=1))
    starts = []
    for place, (made_for, spec) in enumerate(gradients):
        name = f"start{place}"
        match made_for:
            case "h" | "W":
                nodes.append(Node(name, "ZerosLike", [TensorId("F", 2 if made_for == "h" else 4)], outputs=1))
            case "K":
                nodes.append(Node(f"{name}/shape", "VariableShape", [TensorId("F", 3)], outputs=1))
                nodes.append(Node(name, "Fill", [TensorId(f"{name}/shape"), TensorId("number")], outputs=1))
            case _:
                nodes.append(Node(name, "Const", outputs=1))
                constants[name] = np.zeros((2, 2), np.float32)
        specs[TensorId(name)] = spec
        starts.append(TensorId(name))
    inputs = [TensorId("i0"), TensorId("i1"), TensorId("F", 0), *starts, TensorId("F", 5)]
    nodes.append(Node("B", "StatelessWhile", inputs, outputs=len(inputs)))
    back = [COUNT, COUNT, COUNT, *(spec for _, spec in gradients), LIST]
    changed = {0: "AddV2", **{3 + place: "AddN" for place in range(len(gradients))}, len(back) - 1: "TensorListPopBack"}
    ahead = function(FORWARD, {0: "AddV2", 2: "Tanh", 5: "TensorListPushBack"}, more)
    bodies = {("F", "body"): ahead, ("F", "cond"): ahead, ("B", "body"): function(back, changed)}
    return Graph(nodes, specs, constants, bodies)


def test_every_variable_has_a_gradient() -> None:
    made = graph([("h", FLOAT), ("K", FLOAT), ("W", FLOAT)])
    assert list(gradient_loops(made)) == [("F", "B")]
    pair = read_pair(made, "F", "B")
    assert pair.variables == {3: 2, 4: 3, 5: 4}
    assert pair.lists == {5}
    assert len(without_lists(made, pair).initial) == 5


@pytest.mark.parametrize(("made_for", "variable"), [("K", 3), ("W", 4)])
def test_a_weight_was_left_out_and_zeros_say_which_is_there(made_for: str, variable: int) -> None:
    assert read_pair(graph([("h", FLOAT), (made_for, FLOAT)]), "F", "B").variables == {3: 2, 4: variable}


def test_types_say_which_is_there() -> None:
    wide = TensorSpec("float32", 4, (2, 3))
    with pytest.raises(Unreadable, match="no way") as raised:
        read_pair(graph([("h", FLOAT), ("zeros", wide)]), "F", "B")
    assert raised.value.refusal.reason is Reason.GRADIENT_UNCLEAR


def test_two_answers_are_none() -> None:
    with pytest.raises(Unreadable, match="several ways") as raised:
        read_pair(graph([("h", FLOAT), ("zeros", FLOAT)]), "F", "B")
    assert raised.value.refusal.reason is Reason.GRADIENT_UNCLEAR


def test_a_state_has_to_have_a_gradient() -> None:
    with pytest.raises(Unreadable, match="no way") as raised:
        read_pair(graph([("K", FLOAT), ("W", FLOAT)]), "F", "B")
    assert raised.value.refusal.reason is Reason.GRADIENT_UNCLEAR
