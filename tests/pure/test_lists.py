"""What loops keep in lists, and what functions need while they run: counted by hand, on graphs made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.calls import WithCalls
from graph_passes.analysis.memory.fragmentation import SMALL, Room, first_failure
from graph_passes.analysis.memory.lists import ListSize, list_sizes, steps_of
from graph_passes.analysis.memory.liveness import build_timeline
from graph_passes.analysis.memory.loop_lists import only_reads
from graph_passes.analysis.memory.observe import Sample, observe
from graph_passes.analysis.memory.roles import has_gradient
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import COUNTED, Buffer, ScheduledOp, Timeline
from graph_passes.errors import InfeasibleBudgetError, UnknownShapeError
from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.refusals import Reason
from graph_passes.step_report import describe

KIB, MIB = 1 << 10, 1 << 20
H = TensorSpec("float32", 4, (1024, 128))  # 512 KiB
SCALAR, LIST_SPEC = TensorSpec("int32", 4, ()), TensorSpec("variant", 0, ())
COSTS = WithCalls(Roofline(load("unit")))


def function(
    arguments: dict[str, TensorSpec], nodes: list[tuple[Any, ...]], results: list[str], **more: Any
) -> Function:
    """`nodes`: (name, op, inputs, spec of its output), a constant's value in place of inputs."""
    specs = {TensorId(name): spec for name, spec in arguments.items()}
    made = [Node(name, "Placeholder", outputs=1) for name in arguments]
    constants = {}
    for name, op, inputs, spec in nodes:
        if op == "Const":
            constants[name] = np.array(inputs)
        read = [] if op == "Const" else [TensorId(each) for each in inputs]
        made.append(Node(name, op, read, outputs=1))
        specs[TensorId(name)] = spec
    return Function(Graph(made, specs, constants, **more), tuple(arguments), tuple(map(TensorId, results)))


ARGUMENTS = {"i": SCALAR, "n": SCALAR, "h": H, "list": LIST_SPEC, "twin": LIST_SPEC}
COND = function(ARGUMENTS, [("less", "Less", ["i", "n"], SCALAR)], ["less"])
BODY = function(
    ARGUMENTS,
    [
        ("one", "Const", 1, SCALAR),
        ("next", "AddV2", ["i", "one"], SCALAR),
        ("tanh", "Tanh", ["h"], H),
        ("push", "TensorListPushBack", ["list", "h"], LIST_SPEC),
        ("push2", "TensorListPushBack", ["twin", "tanh"], LIST_SPEC),
        ("sin", "Sin", ["tanh"], H),
    ],
    ["next", "n", "sin", "push", "push2"],
)


def step(body: Function = BODY, cond: Function = COND, steps: int | None = 40, h: TensorSpec = H) -> Graph:
    """x -> loop -> (sin) -> gradient's loop, which takes the lists apart."""
    loop = [TensorId(name) for name in ("start", "steps", "x", "empty", "empty")]
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("start", "Const", outputs=1),
        Node("steps", "Placeholder" if steps is None else "Const", outputs=1),
        Node("empty", "EmptyTensorList", outputs=1),
        Node("loop", "While", loop, outputs=5),
        Node("loss", "Sin", [TensorId("loop", 2)], outputs=1),
        Node("back", "While", [TensorId("loss"), TensorId("loop", 3), TensorId("loop", 4)], outputs=3),
        Node("end", "Sin", [TensorId("back")], outputs=1),
    ]
    specs = {TensorId("x"): h, TensorId("start"): SCALAR, TensorId("steps"): SCALAR, TensorId("empty"): LIST_SPEC}
    specs |= {TensorId("loop", place): spec for place, spec in enumerate((SCALAR, SCALAR, h, LIST_SPEC, LIST_SPEC))}
    specs |= {TensorId("loss"): h, TensorId("end"): h}
    specs |= {TensorId("back", place): spec for place, spec in enumerate((h, LIST_SPEC, LIST_SPEC))}
    back = function(
        {"g": h, "list": LIST_SPEC, "twin": LIST_SPEC},
        [("pop", "TensorListPopBack", ["list"], LIST_SPEC), ("pop2", "TensorListPopBack", ["twin"], LIST_SPEC)],
        ["g", "pop", "pop2"],
    )
    constants = {"start": np.array(0)} | ({} if steps is None else {"steps": np.array(steps)})
    functions = {("loop", "body"): body, ("loop", "cond"): cond, ("back", "body"): back}
    return Graph(nodes, specs, constants, functions)


def timeline(graph: Graph) -> Timeline:
    return build_timeline(graph, list(graph.nodes), COSTS)


def test_a_loops_lists_are_alive_until_they_are_read() -> None:
    """40 steps put h and its tanh in. h is the sin of the step before, so both are new in every step."""
    graph = step()
    assert steps_of(graph, graph["loop"]) == 40
    found = list_sizes(graph)
    assert found == {
        TensorId("loop", 3): ListSize(20 * MIB, 512 * KIB),
        TensorId("loop", 4): ListSize(20 * MIB, 512 * KIB),
    }
    (both,) = [buffer for buffer in timeline(graph).buffers if buffer.tensor.node == "loop" and buffer.element]
    names = list(graph.nodes)
    assert (names[both.start], names[both.uses[-1]], both.nbytes) == ("loop", "back", 40 * MIB)
    assert both.views == (TensorId("loop", 3), TensorId("loop", 4))
    assert both.movable
    (chain,) = both.chains
    assert [names[position] for position in chain.ops] == ["loop"]  # which makes them again, and its h
    assert chain.held == (40 * MIB + 512 * KIB + 8,)
    usage = dict(zip(names, ((timeline(graph).usage - timeline(graph).base) // KIB).tolist(), strict=True))
    assert usage["loop"] == 40 * KIB + 512 + 512  # the lists, the loop's h, and what a step makes beyond the lists
    assert usage["loss"] == 40 * KIB + 512  # in place
    assert usage["end"] <= 1024


def test_lists_that_cannot_move_stay_where_they_are() -> None:
    def held(graph: Graph, **more: Any) -> Buffer:
        buffers = build_timeline(graph, list(graph.nodes), COSTS, **more).buffers
        return next(buffer for buffer in buffers if buffer.tensor == TensorId("loop", 3))

    small = step(h=TensorSpec("float32", 4, (32, 32)), body=_with_h(TensorSpec("float32", 4, (32, 32))))
    assert held(small).pinned_by == Reason.LIST_FILLED()
    assert held(step(), fetches=[TensorId("loop", 3)]).pinned_by == Reason.LIST_FILLED()
    given = step()
    given.insert("mine", "Placeholder", [], {})
    given.rewire("loop", 3, TensorId("mine"))
    assert held(given).pinned_by == Reason.LIST_FILLED()  # the caller holds some of it


def _with_h(spec: TensorSpec) -> Function:
    specs = {tensor: spec if found == H else found for tensor, found in BODY.graph.specs.items()}
    return replace(BODY, graph=Graph(list(BODY.graph), specs, BODY.graph.constants))


@pytest.mark.parametrize(("op", "reads"), [("RandomUniform", False), ("ReadVariableOp", True), ("Print", False)])
def test_only_a_loop_without_other_effects_runs_again(op: str, reads: bool) -> None:
    nodes = [replace(node, op=op, stateful=True) if node.name == "sin" else node for node in BODY.graph]
    graph = step(replace(BODY, graph=Graph(nodes, BODY.graph.specs, BODY.graph.constants)))
    assert only_reads(graph, graph["loop"]) is reads
    loop = next(node for node in graph if node.name == "loop")
    assert loop.op == "While"
    graph.nodes["loop"] = replace(loop, stateful=True)
    buffer = next(each for each in timeline(graph).buffers if each.tensor.node == "loop" and each.element)
    assert bool(buffer.chains[0].ops) is reads


def test_a_loops_time_is_that_of_its_steps() -> None:
    once = sum(COSTS.seconds(part.graph, node) for part in (BODY, COND) for node in part.graph)
    graph = step()
    assert COSTS.seconds(graph, graph["loop"]) >= 40 * once > 0


def test_a_loop_that_takes_from_lists_is_a_gradient() -> None:
    graph = step()
    assert has_gradient(graph)
    del graph.functions["back", "body"]
    assert not has_gradient(graph)


def test_a_buffer_in_two_lists_counts_once() -> None:
    """Where h is the tanh of the step before, the lists of both hold the same buffers."""
    body = replace(BODY, results=(*BODY.results[:2], TensorId("tanh"), *BODY.results[3:]))
    assert list_sizes(step(body)) == {TensorId("loop", 3): ListSize(20 * MIB, 512 * KIB)}
    late = step(body)
    late.insert("later", "Identity", [TensorId("loop", 4)], {})
    position = {name: place for place, name in enumerate(late.nodes)}
    assert list_sizes(late, position) == {TensorId("loop", 4): ListSize(20 * MIB, 512 * KIB)}  # it is read last


@pytest.mark.parametrize("op", ["ReadVariableOp", "Const"])
def test_what_lives_outside_of_the_loop_is_not_the_lists(op: str) -> None:
    body = function(
        ARGUMENTS,
        [("w", op, [], H), ("push", "TensorListPushBack", ["list", "w"], LIST_SPEC)],
        ["i", "n", "h", "push", "twin"],
    )
    assert not list_sizes(step(body))
    same = function(
        ARGUMENTS, [("push", "TensorListPushBack", ["list", "h"], LIST_SPEC)], ["i", "n", "h", "push", "twin"]
    )
    assert not list_sizes(step(same))  # h is what it was, in every step


def test_a_list_of_a_known_length_is_written_into() -> None:
    body = function(
        ARGUMENTS,
        [
            ("one", "Const", 1, SCALAR),
            ("next", "AddV2", ["i", "one"], SCALAR),
            ("tanh", "Tanh", ["h"], H),
            ("set", "TensorListSetItem", ["list", "i", "tanh"], LIST_SPEC),
        ],
        ["next", "n", "tanh", "set", "twin"],
    )
    assert list_sizes(step(body)) == {TensorId("loop", 3): ListSize(20 * MIB, 512 * KIB)}


def test_what_cannot_be_counted() -> None:
    open_body = replace(BODY, graph=BODY.graph.copy())
    open_body.graph.specs[TensorId("tanh")] = TensorSpec("float32", 4, (None, 128))
    graph = step(open_body)
    assert list_sizes(graph) == {TensorId("loop", 3): ListSize(20 * MIB, 512 * KIB), TensorId("loop", 4): None}
    endless = function(ARGUMENTS, [("yes", "Const", True, SCALAR)], ["yes"])
    for unknown in (step(steps=None), step(cond=endless)):
        assert steps_of(unknown, unknown["loop"]) is None
        assert list_sizes(unknown) == {TensorId("loop", 3): None, TensorId("loop", 4): None}
    of_others = function(ARGUMENTS, [("other", "Mystery", ["list"], LIST_SPEC)], ["i", "n", "h", "other", "twin"])
    assert list_sizes(step(of_others)) == {TensorId("loop", 3): None}
    unread = step()
    del unread.functions["loop", "body"]
    assert list_sizes(unread)[TensorId("loop", 3)] is None


def test_the_report_says_for_what_the_budget_is_not_enforced() -> None:
    graph = step(steps=None)
    read = pipeline.Step.read(graph)
    found = read.timeline(COSTS)
    assert [buffer.pinned_by for buffer in found.buffers if not buffer.nbytes] == [Reason.LIST_UNKNOWN()] * 2
    plan = pipeline.plan_step(read, found, Link(1.0, 1.0), 8 * MIB, OffloadOptions())
    report = describe(read, found, plan, "hybrid", graph="g", device="d")
    assert report.not_enforced == ("loop:3", "loop:4")
    assert "the budget is not enforced for 2 lists ('loop:3', ...) of loops" in str(report)
    known = pipeline.Step.read(step())
    with pytest.raises(InfeasibleBudgetError):
        pipeline.plan_step(known, known.timeline(COSTS), Link(1.0, 1.0), 8 * MIB, OffloadOptions())


def test_a_loop_in_a_loop_keeps_lists_of_lists() -> None:
    """Loops of 8 steps in each of 40: 160 MiB for each list of the inner loop."""
    inner = step(steps=8)
    del inner.functions["back", "body"]
    inner.remove(["end", "back", "loss"])
    inside = {place: spec for place, spec in inner.specs.items() if place.node != "x"}
    nodes = [node.copy() for node in inner if node.name != "x"]
    for node in nodes:
        node.inputs = [TensorId("h") if tensor.node == "x" else tensor for tensor in node.inputs]
    nodes += [Node(name, "Placeholder", outputs=1) for name in ARGUMENTS]
    nodes += [
        Node("one", "Const", outputs=1),
        Node("next", "AddV2", [TensorId("i"), TensorId("one")], outputs=1),
        Node("push", "TensorListPushBack", [TensorId("list"), TensorId("loop", 3)], outputs=1),
    ]
    specs = inside | {TensorId(name): spec for name, spec in ARGUMENTS.items()}
    specs |= {TensorId("one"): SCALAR, TensorId("next"): SCALAR, TensorId("push"): LIST_SPEC}
    graph = Graph(nodes, specs, {**inner.constants, "one": np.array(1)}, inner.functions)
    results = (TensorId("next"), TensorId("n"), TensorId("loop", 2), TensorId("push"), TensorId("twin"))
    outer = step(Function(graph, tuple(ARGUMENTS), results))
    assert list_sizes(outer) == {TensorId("loop", 3): ListSize(160 * MIB, 512 * KIB)}


def test_a_list_that_is_summed_up_is_as_large_as_it_was() -> None:
    """The gradient of a list of 16 elements, read by a loop that leaves it as it is: zeros, and what is added."""
    keeps = function({"list": LIST_SPEC}, [], ["list"])
    adds = function(
        {"sum": LIST_SPEC, "g": TensorSpec("float32", 4, (None, 128))},
        [
            ("empty", "TensorListReserve", [], LIST_SPEC),
            ("set", "TensorListSetItem", ["empty", "sum", "g"], LIST_SPEC),
            ("added", "AddN", ["sum", "set"], LIST_SPEC),
        ],
        ["added", "g"],
    )
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("list", "TensorListFromTensor", [TensorId("x")], outputs=1),
        Node("forward", "While", [TensorId("list")], outputs=1),
        Node("zeros", "ZerosLike", [TensorId("forward")], outputs=1),
        Node("back", "While", [TensorId("zeros"), TensorId("x")], outputs=2),
    ]
    specs = {TensorId(name): LIST_SPEC for name in ("list", "forward", "zeros", "back")}
    specs[TensorId("x")] = TensorSpec("float32", 4, (16, 1024, 128))
    graph = Graph(nodes, specs, {}, {("forward", "body"): keeps, ("back", "body"): adds})
    assert list_sizes(graph) == {
        TensorId("zeros"): ListSize(8 * MIB, 512 * KIB),
        TensorId("back"): ListSize(8 * MIB, 512 * KIB),
    }
    graph.specs[TensorId("x")] = TensorSpec("float32", 4, (None, 1024, 128))
    assert list_sizes(graph) == {TensorId("back"): None}


def test_elements_that_no_allocator_counts() -> None:
    """A list of 16 elements of 128 KiB is 2 MiB, none of which a CPU's allocator counts."""
    buffers = (Buffer(TensorId("list"), 2 * MIB, 0, (2,), element=128 * KIB), Buffer(TensorId("large"), MIB, 1, (2,)))
    found = Timeline(tuple(ScheduledOp(name) for name in "abc"), buffers, 0, base=0, counted=COUNTED)
    assert found.uncounted.tolist() == [2 * MIB] * 3
    samples = [Sample(2 * place + 1, float(place), size, size) for place, size in enumerate((0, MIB, MIB))]
    samples[-1] = replace(samples[-1], bytes_in_use=0)
    seen = observe(found, (), samples)
    assert (seen.peak, seen.base, set(seen.workspace.values())) == (3 * MIB, 0, {0})


def test_elements_find_room_one_by_one() -> None:
    """4 elements of 64 KiB in chunks that hold one each."""
    found = Timeline(
        (ScheduledOp("a"), ScheduledOp("b")), (Buffer(TensorId("list"), 4 * SMALL, 0, (1,), element=SMALL),), 0, base=0
    )
    apart = tuple((place * 4 * SMALL, SMALL) for place in range(4))
    assert first_failure(found, (), Room(apart)) is None
    assert first_failure(found, (), Room(apart[1:])) is not None


def test_a_tensor_that_a_list_shares_lives_as_long() -> None:
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("tanh", "Tanh", [TensorId("x")], outputs=1),
        Node("list", "TensorListFromTensor", [TensorId("tanh")], outputs=1),
        Node("sin", "Sin", [TensorId("x")], outputs=1),
        Node("stack", "TensorListStack", [TensorId("list")], outputs=1),
    ]
    specs = {TensorId(node.name): H for node in nodes} | {TensorId("list"): LIST_SPEC}
    found = timeline(Graph(nodes, specs)).buffers[0]
    assert (found.tensor.node, found.uses, found.pinned_by) == ("tanh", (2, 4), Reason.LIST_SHARES())


def test_what_a_loop_gets_lives_as_long_as_the_list_that_it_goes_into() -> None:
    """The first step puts it in: it cannot move, nothing is written over it, and the list does not count it again."""
    graph = step()
    graph.insert("made", "Sin", [TensorId("x")], {})
    graph.rewire("loop", 2, TensorId("made"))
    graph.insert("late", "Sin", [TensorId("made")], {})
    graph.add_control("late", "loop")
    graph.rewire("back", 0, TensorId("late"))
    graph.specs |= {TensorId("made"): H, TensorId("late"): H}
    order = ["x", "start", "steps", "empty", "made", "loop", "loss", "late", "back", "end"]
    found = {str(buffer.tensor): buffer for buffer in build_timeline(graph, order, COSTS).buffers}
    assert sorted(order) == sorted(graph.nodes)
    made, filled = found["made:0"], found["loop:3"]
    assert made.uses[-1] == filled.uses[-1] > made.read
    assert made.pinned_by == Reason.LIST_FILLED()
    assert [(holder.list, holder.made) for holder in made.holders] == [(TensorId("loop", 3), False)]
    assert "late:0" in found
    assert filled.nbytes == 40 * MIB - made.nbytes


def test_open_inputs() -> None:
    """What depends on data is left alone; what only its caller left open is not."""
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("slice", "StridedSlice", [TensorId("x")], outputs=1),
        Node("one", "Tanh", [TensorId("slice")], outputs=1),
        Node("two", "TanhGrad", [TensorId("one"), TensorId("slice")], outputs=1),
    ]
    unknown = TensorSpec("float32", 4, (None, 4))
    graph = Graph(nodes, {TensorId(node.name): unknown for node in nodes})
    with pytest.raises(UnknownShapeError, match=r"'slice:0' .*input_shapes=\{'x'"):
        pipeline.Step.read(graph).timeline(COSTS)
    found = pipeline.Step.read(graph, of_data=frozenset({TensorId("slice")})).timeline(COSTS)
    assert [str(buffer.tensor) for buffer in found.buffers] == ["slice:0"]
