"""The list of passes: what a user can name, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import pytest

from graph_passes.contract import Contract, Property
from graph_passes.errors import GraphError
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.rewrite import NewNode, Rewrite, applied
from graph_passes.pipeline import PASSES, Pass, PassOutcome, PassPhase, Step, run_passes, runs
from tfmem.options import FusionOptions, Options, PassName, default_passes


def test_each_pass_has_a_name_and_they_stand_in_the_order_of_their_phases() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)
    phases = list(PassPhase)
    places = [phases.index(each.phase) for each in PASSES]
    assert places == sorted(places)


def test_users_name_passes_by_their_options() -> None:
    assert tuple(dict.fromkeys(each.option for each in PASSES)) == get_args(PassName)
    for timed in (False, True):
        assert set(default_passes(Options(), timed)) <= set(get_args(PassName))


@pytest.mark.parametrize(
    ("changes", "timed", "fuses"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"fusion": FusionOptions(tune="full")}, True, True),
        ({"fusion": FusionOptions(tune="off")}, True, False),
        ({"observe": False}, True, False),
        ({"memory_budget": "1GiB"}, True, True),
    ],
)
def test_where_steps_are_stitched_by_default(changes: dict[str, Any], timed: bool, fuses: bool) -> None:
    passes = default_passes(Options(**changes), timed)
    assert passes == (("recurrent", "fusion", "offload") if fuses else ("recurrent", "offload"))


@pytest.mark.parametrize(
    ("asked", "phases"),
    [
        ((), set()),
        (("recurrent",), {PassPhase.BEFORE_GRAPPLER}),
        (("fusion",), {PassPhase.AFTER_GRAPPLER}),
        (("offload",), {PassPhase.UNDER_BUDGET}),
        (("recurrent", "offload"), {PassPhase.BEFORE_GRAPPLER, PassPhase.UNDER_BUDGET}),
    ],
)
def test_which_phases_run(asked: tuple[str, ...], phases: set[PassPhase]) -> None:
    assert {phase for phase in PassPhase if runs(phase, asked)} == phases


def session_graph() -> Graph:
    """A reference variable that is written, and read by an op that nothing orders behind the update."""
    nodes = [
        Node("variable", "VariableV2", outputs=1),
        Node("gradient", "MatMul", [TensorId("variable"), TensorId("variable")], outputs=1),
        Node("update", "ApplyGradientDescent", [TensorId("variable"), TensorId("gradient")], outputs=1),
        Node("reader", "Neg", [TensorId("variable")], outputs=1),
        Node("restore", "NoOp"),
    ]
    return Graph(nodes, {TensorId(node.name): TensorSpec("float32", 4, (2, 2)) for node in nodes if node.outputs})


def test_a_step_of_a_sessions_graph_reads_variables_before_it_writes_them() -> None:
    graph = session_graph()
    step = Step.of_session(graph, ["update", "reader:0"])
    assert set(step.held) == {("update", "gradient"), ("update", "reader")}
    assert "restore" not in step.graph.nodes
    assert set(step.graph["update"].control) == {"gradient", "reader"}
    assert graph["update"].control == []


def test_what_runs_is_in_the_graph() -> None:
    with pytest.raises(GraphError, match="nothing"):
        Step.of_session(session_graph(), ["nothing"])


class Held:
    """A source that holds its graph; what `refuse` names cannot be carried out."""

    def __init__(self, graph: Graph, refuse: Sequence[str] = ()) -> None:
        self.graph, self.refuse = graph, refuse

    def read(self, _: Collection[str] | None = None) -> Graph:
        return self.graph

    def keep(self, _: Graph) -> set[str]:
        return set()

    def edit(self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]) -> dict[str, Exception]:
        errors = {each.name: GraphError("refused") for each in rewrites if each.name in self.refuse}
        self.graph, _ = applied([each for each in rewrites if each.name not in errors], graph, check)
        return errors


def doubling(
    name: str, option: str = "fusion", phase: PassPhase = PassPhase.AFTER_GRAPPLER
) -> Pass[Sequence[str], tuple[str, ...]]:
    """A pass that puts an op behind each op that its needs name."""

    def plan(source: Readable, needs: Sequence[str]) -> tuple[tuple[str, ...], Graph]:
        graph = source.read()
        return tuple(node for node in needs if graph[node]), graph

    def rewrites(nodes: Sequence[str], _: Graph) -> list[Rewrite]:
        return [Rewrite(node, (NewNode(f"{node}/{name}", "Neg", (TensorId(node),)),)) for node in nodes]

    return Pass(name, phase, option, plan, rewrites, Contract(ensures=frozenset({Property.WELL_FORMED})))


def test_passes_of_a_phase_run_in_order_each_on_what_the_one_before_left() -> None:
    source = Held(Graph([Node("x", "Placeholder", outputs=1)], {}))
    seen: list[Mapping[str, PassOutcome]] = []

    def after_first(done: Mapping[str, PassOutcome]) -> list[str]:
        seen.append(dict(done))
        return ["x/first"]

    passes = (doubling("first"), doubling("second"), doubling("early", phase=PassPhase.BEFORE_GRAPPLER))
    needs = {"first": lambda _: ["x"], "second": after_first, "early": lambda _: ["x"]}
    done = run_passes(PassPhase.AFTER_GRAPPLER, ["fusion"], source, needs, passes)
    assert set(source.graph.nodes) == {"x", "x/first", "x/first/second"}
    assert done == {"first": PassOutcome(("x",)), "second": PassOutcome(("x/first",))}
    assert seen == [{"first": PassOutcome(("x",))}]


def test_who_was_not_asked_for_or_has_nothing_to_do_does_not_run() -> None:
    source = Held(Graph([Node("x", "Placeholder", outputs=1)], {}))
    passes = (doubling("other", option="other"), doubling("idle"), doubling("unknown"))
    needs = {"other": lambda _: ["x"], "idle": lambda _: None}
    assert run_passes(PassPhase.AFTER_GRAPPLER, ["fusion"], source, needs, passes) == {}
    assert set(source.graph.nodes) == {"x"}


def test_what_fails_costs_nothing_else() -> None:
    source = Held(Graph([Node("x", "Placeholder", outputs=1), Node("y", "Placeholder", outputs=1)], {}), ["y"])
    passes = (doubling("broken"), doubling("sound"))
    needs = {"broken": lambda _: ["no such node"], "sound": lambda _: ["x", "y"]}
    done = run_passes(PassPhase.AFTER_GRAPPLER, ["fusion"], source, needs, passes)
    assert isinstance(done["broken"].failed, KeyError | GraphError)
    assert done["sound"].plan == ("x", "y")
    assert set(done["sound"].errors) == {"y"}
    assert set(source.graph.nodes) == {"x", "y", "x/sound"}
