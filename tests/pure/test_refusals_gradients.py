"""Reasons for which the recurrent pass leaves unrolled steps, gradients of loops, and ops of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from custom_ops.errors import CellError
from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.rewrite import Names
from graph_passes.passes.recurrent.faults import attempt
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.find.repeated import repeated
from graph_passes.passes.recurrent.find.roll import _Roller, roll_up
from graph_passes.passes.recurrent.find.unrolled import RecurrenceSearch
from graph_passes.passes.recurrent.lower.cudnn import match_cudnn
from graph_passes.passes.recurrent.match import Match, Unmatched
from graph_passes.passes.recurrent.train.loop_pairs import Pair
from graph_passes.passes.recurrent.train.plan_training import _Whole
from graph_passes.passes.recurrent.train.trained import Backward, WantedGradient, _Loops, _require_single, read_as
from graph_passes.refusals import Reason
from tests.pure.test_recurrent_match import INPUTS, UNITS, Builder

# Steps that are written out.


def unrolled(*readers: tuple[str, str, str]) -> Graph:
    """h = tanh(x[t] W + h R) for two t; `pack` holds both states. More ops read what they name."""
    b = Builder()
    x = b.op("x", "Placeholder", shapes=((2, 5, INPUTS),))
    w, r = b.op("W", "Placeholder", shapes=((INPUTS, UNITS),)), b.op("R", "Placeholder", shapes=((UNITS, UNITS),))
    h = b.op("h", "Placeholder", shapes=((5, UNITS),))
    b.op("items", "Unpack", x, shapes=((5, INPUTS),) * 2, axis=0, num=2)
    states = []
    for t in range(2):
        inputs = b.op(f"in{t}", "MatMul", TensorId("items", t), w, shapes=((5, UNITS),))
        hidden = b.op(f"rec{t}", "MatMul", h, r, shapes=((5, UNITS),))
        total = b.op(f"add{t}", "AddV2", inputs, hidden, shapes=((5, UNITS),))
        h = b.op(f"h{t}", "Tanh", total, shapes=((5, UNITS),))
        states.append(h)
    b.op("pack", "Pack", *states, shapes=((2, 5, UNITS),), axis=0)
    for name, op, read_by in readers:
        b.op(name, op, TensorId(read_by), shapes=((5, UNITS),))
    return b.graph()


def refused(graph: Graph, *keep: str) -> set[Reason]:
    rolled = roll_up(graph, keep)
    assert rolled.graph is None
    found = repeated(graph, keep, rolled.refused)
    assert {each.reason.reason for each in found} == {Reason.UNROLLED_BECAUSE}
    return {each.reason.reason for each in rolled.refused}


def test_steps_of_which_more_is_wanted_than_a_loop_gives() -> None:
    assert roll_up(unrolled(), ["consumer"]).loops
    assert refused(unrolled(), "h0") == {Reason.STEP_FETCHED}
    assert refused(unrolled(), "pack") == {Reason.STEPS_FETCHED}
    assert refused(unrolled(("reader", "Neg", "h0")), "reader") == {Reason.STEP_READ}
    zeros = unrolled(("zeros", "ZerosLike", "in0"))
    zeros.specs[TensorId("zeros")] = TensorSpec("float32", 4, (5, INPUTS))  # of no state
    assert refused(zeros, "zeros") == {Reason.STEP_ZEROS}


def test_steps_whose_gradient_nothing_needs() -> None:
    graph = unrolled()
    nodes = [node.copy() for node in graph]
    back = Node("back", "MatMul", [TensorId("h1"), TensorId("R")], outputs=1, attrs={"transpose_b": True})
    specs = {**graph.specs, TensorId("back"): TensorSpec("float32", 4, (5, UNITS))}
    found = repeated(Graph([*nodes, back], specs), ["h1"])
    assert {each.reason.reason for each in found} == {Reason.UNROLLED_IDLE}


# Gradients.


def test_a_cell_that_cannot_be_made_is_a_reason_and_all_else_a_fault() -> None:
    found: list[Unmatched] = []
    for error in (CellError("no"), Unreadable(Reason.NO_STATE()), KeyError("no")):
        with attempt(found, "loop", "While", CellError):
            raise error
    assert [each.reason.reason for each in found] == [Reason.CELL_REFUSED, Reason.NO_STATE, Reason.FAULT]


def small(*nodes: Node) -> Graph:
    specs = {TensorId(node.name, n): TensorSpec("float32", 4, (2, 2)) for node in nodes for n in range(node.outputs)}
    return Graph(nodes, specs)


def x(name: str = "x", op: str = "Placeholder", *inputs: str, outputs: int = 1) -> Node:
    return Node(name, op, list(map(TensorId, inputs)), outputs=outputs)


def reason_of(do: Callable[[], object]) -> Reason:
    with pytest.raises(Unreadable) as raised:
        do()
    return raised.value.refusal.reason


EMPTY = Match("loop", "While", (), (), ())


def test_gradients_whose_tensors_do_not_fit() -> None:
    graph = small(
        x(), x("F", "While", "x", "x", outputs=2), x("g"), x("stack", "TensorListStack", "g"), x("out", "Neg", "F")
    )
    assert reason_of(lambda: read_as(graph, EMPTY, TensorId("x"))) is Reason.GRADIENT_UNREAD
    assert reason_of(lambda: _require_single(graph, "F", TensorId("x"), 0)) is Reason.GRADIENT_TWICE


def loops(graph: Graph) -> _Loops:
    body = Function(small(x("a0"), x("a1")), ("a0", "a1"), (TensorId("a0"), TensorId("a1")))
    graph.functions["F", "body"] = body
    return _Loops(graph, "F", ["B"], ())


def test_gradients_of_lists_and_of_what_stays() -> None:
    nodes = [x(), x("l"), x("F", "While", "x", "l", outputs=2), x("g"), x("made", "TensorListFromTensor", "g")]
    graph = small(
        *nodes,
        x("B", "While", "g", "made", outputs=2),
        x("read", "Neg", "B"),
        Node("more", "Neg", [TensorId("B", 1)], outputs=1),
    )
    graph.specs[TensorId("l")] = TensorSpec("variant", 0, ())
    finder = loops(graph)
    pair = Pair("F", "B", {0: 0}, frozenset())
    assert reason_of(lambda: finder.given(pair)) is Reason.GRADIENT_OF_INVARIANT
    old = TensorId("F", 1)
    assert reason_of(lambda: list(finder.of_list(old, TensorId("g")))) is Reason.GRADIENT_OF_LIST
    assert reason_of(lambda: list(finder.of_list(old, TensorId("made")))) is Reason.GRADIENT_UNSTACKED
    wanted = _Loops(graph, "F", ["B"], ["more"]).wanted(Pair("F", "B", {1: 1}, frozenset()), EMPTY)
    assert reason_of(lambda: list(wanted)) is Reason.GRADIENT_OF_MADE_LIST


class Recurrence:
    """A recurrence with one gradient op."""

    def __init__(self, backward: Backward) -> None:
        self.backwards = (backward,)


def whole(graph: Graph, backward: Backward, *keep: str) -> _Whole:
    made = _Whole.__new__(_Whole)
    made.graph, made.keep, made.ahead, made.recurrences = graph, frozenset(keep), EMPTY, [Recurrence(backward)]  # type: ignore[list-item]
    return made


def test_gradients_that_something_else_reads() -> None:
    graph = small(x(), x("B", "While", "x"), x("reader", "Neg", "B"))
    wanted = Backward("B", (), (WantedGradient(TensorId("B"), TensorId("x")),))
    assert reason_of(lambda: whole(graph, wanted, "B").backward({}, 0)) is Reason.GRADIENT_FETCHED
    given = Backward("B", ((TensorId("x"), TensorId("B")),), ())
    assert reason_of(lambda: whole(graph, given).backward({}, 0)) is Reason.GRADIENT_WITHOUT_RESULT
    assert reason_of(lambda: whole(graph, given).require_nothing_lost(["B"], {})) is Reason.GRADIENT_LOST


# cuDNN's ops.


def cudnn(x_shape: Any = (3, 2, INPUTS), h_shape: Any = (1, 2, UNITS), reads: int = 0, **attrs: Any) -> Graph:
    names = ("x", "h", "c", "params")
    shapes = (x_shape, h_shape, h_shape, (None,))
    nodes = [Node(name, "Placeholder", outputs=1) for name in names]
    nodes.append(Node("rnn", "CudnnRNN", list(map(TensorId, names)), outputs=4, attrs=attrs))
    nodes += [Node("reader", "Neg", [TensorId("rnn", reads)], outputs=1)]
    specs = {TensorId(name): TensorSpec("float32", 4, shape) for name, shape in zip(names, shapes, strict=True)}
    specs |= {TensorId("rnn", place): TensorSpec("float32", 4, (3, 2, UNITS)) for place in range(4)}
    return Graph(nodes, specs)


@pytest.mark.parametrize(
    ("graph", "keep", "reason"),
    [
        (cudnn(rnn_mode="odd"), (), Reason.CUDNN_MODE),
        (cudnn(input_mode="skip_input"), (), Reason.CUDNN_INPUT),
        (cudnn(direction="bidirectional"), (), Reason.CUDNN_DIRECTION),
        (cudnn(dropout=0.5), (), Reason.CUDNN_DROPOUT),
        (cudnn(num_proj=3), (), Reason.CUDNN_PROJECTION),
        (cudnn(x_shape=(3, 2, None)), (), Reason.CUDNN_INPUT_WIDTH),
        (cudnn(h_shape=(1, 2, None)), (), Reason.CUDNN_STATE_WIDTH),
        (cudnn(h_shape=(2, 2, UNITS)), (), Reason.CUDNN_LAYERS),
        (cudnn(), ("rnn",), Reason.CUDNN_FETCHED),
        (cudnn(reads=3), ("reader",), Reason.CUDNN_OUTPUT),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else "",
)
def test_ops_of_cudnn(graph: Graph, keep: tuple[str, ...], reason: Reason) -> None:
    found = match_cudnn(graph, "rnn", Names(graph), keep)
    assert isinstance(found, Unmatched)
    assert found.reason.reason is reason


def test_steps_that_are_not_recognised() -> None:
    graph = unrolled()
    found = {each.reason.reason for each in repeated(graph, ["h1"])}
    assert found == {Reason.UNROLLED}
    assert {each.reason.reason for each in repeated(graph, ["h1"], in_place=True)} == {Reason.UNROLLED_IN_PLACE}
    back = Node("back", "MatMul", [TensorId("h1"), TensorId("R")], outputs=1, attrs={"transpose_b": True})
    specs = {**graph.specs, TensorId("back"): TensorSpec("float32", 4, (5, UNITS))}
    trained = Graph([*(node.copy() for node in graph), back], specs)
    assert {each.reason.reason for each in repeated(trained, ["back"])} == {Reason.UNROLLED_TRAINED}
    nodes = [node.copy() for node in graph]
    for node in nodes:
        node.op = "Conv2D" if node.op == "MatMul" else node.op
    convolved = Graph(nodes, graph.specs)
    assert {each.reason.reason for each in repeated(convolved, ["h1"])} == {Reason.UNROLLED_CONVOLUTION}


def test_steps_whose_single_values_something_else_needs() -> None:
    graph = unrolled(("early", "Neg", "h0"), ("late", "Neg", "h1"))
    steps = RecurrenceSearch(unrolled(), unrolled()["items"], False).find([])
    assert steps is not None
    roller = _Roller(graph, steps, "loop", None)
    with pytest.raises(Unreadable) as raised:
        roller._served({"h0"}, {}, ["early"])
    assert raised.value.refusal == Reason.STEP_NEEDED(node="early", op="Neg")
