"""The list of passes: what a user can name, and in which order they run."""

from __future__ import annotations

from typing import get_args

import pytest

from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.pipeline import PASSES, Phase, Step, runs
from tfmem.options import Options, PassName


def test_each_pass_has_a_name_and_they_stand_in_the_order_of_their_phases() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)
    phases = list(Phase)
    places = [phases.index(each.phase) for each in PASSES]
    assert places == sorted(places)


def test_users_name_passes_by_their_options() -> None:
    assert tuple(dict.fromkeys(each.option for each in PASSES)) == get_args(PassName) == Options().passes


@pytest.mark.parametrize(
    ("asked", "phases"),
    [
        ((), set()),
        (("recurrent",), {Phase.BEFORE_GRAPPLER}),
        (("offload",), {Phase.UNDER_BUDGET}),
        (("recurrent", "offload"), {Phase.BEFORE_GRAPPLER, Phase.UNDER_BUDGET}),
    ],
)
def test_which_phases_run(asked: tuple[str, ...], phases: set[Phase]) -> None:
    assert {phase for phase in Phase if runs(phase, asked)} == phases


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
