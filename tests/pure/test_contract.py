"""The contracts of passes: each property is told from its breach, and a pass that breaks its contract costs itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from graph_passes.analysis.cost.device_costs import load, product_sizes
from graph_passes.analysis.cost.kernel_costs import Small
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.contract import Contract, ContractError, Kept, Property
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec, WorkingCopy
from graph_passes.graph.rewrite import NewNode, Rewrite, applied
from graph_passes.pass_infra import Pass, PassPhase, run_passes
from graph_passes.passes.equal import plan as equal
from graph_passes.passes.fuse import plan as fuse
from graph_passes.passes.merge import plan as merge
from graph_passes.passes.offload import plan as offload
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.prepare import plan as prepare
from graph_passes.passes.products import plan as products
from graph_passes.passes.recurrent import plan as recurrent
from graph_passes.passes.split import plan as split
from graph_passes.pipeline import PASSES, Step
from tests.fusion_graphs import UNIT
from tests.pure.test_fusion_merging import trained
from tests.pure.test_recurrent_match import loop_graph, read


def graph(*more: Node) -> Graph:
    nodes = [
        Node("variable", "VarHandleOp", outputs=1),
        Node("x", "Placeholder", outputs=1),
        Node("y", "Relu", [TensorId("x")], outputs=1, attrs={"T": "float32"}),
        Node("update", "AssignVariableOp", [TensorId("variable"), TensorId("y")]),
        *more,
    ]
    return Graph(nodes, {TensorId(node.name): TensorSpec("float32", 4, (2,)) for node in nodes if node.outputs})


CYCLE = (Node("one", "Neg", [TensorId("two")], outputs=1), Node("two", "Neg", [TensorId("one")], outputs=1))


def untyped() -> Graph:
    found = graph()
    del found.specs[TensorId("x")]
    return found


@pytest.mark.parametrize(
    ("required", "given", "words"),
    [
        (Property.WELL_FORMED, graph(*CYCLE), "the graph has a cycle"),
        (Property.TYPED, untyped(), "'y' reads 'x:0' of unknown dtype"),
    ],
)
def test_a_graph_that_lacks_what_a_pass_requires(required: Property, given: Graph, words: str) -> None:
    contract = Contract(requires=frozenset({required}), ensures=frozenset({required}))
    contract.require(graph())
    with pytest.raises(ContractError, match=f"^the pass requires {required.value}; but .*{words}"):
        contract.require(given)
    with pytest.raises(ContractError, match=f"^the pass ensures {required.value}; but .*{words}"):
        contract.ensure(graph(), [], (), given)


def test_every_property_is_tested_above_and_below() -> None:
    assert set(Property) == {Property.WELL_FORMED, Property.TYPED}
    assert set(Kept) == {Kept.FETCHES, Kept.UPDATES, Kept.OTHERS}


def without(*names: str) -> Graph:
    return Graph([node for node in graph() if node.name not in names])


def changed() -> Graph:
    found = graph()
    found["y"].attrs["T"] = "float64"
    return found


@pytest.mark.parametrize(
    ("kept", "after", "keep", "words"),
    [
        (Kept.FETCHES, without("y", "update"), {"y"}, "'y' is gone"),
        (Kept.UPDATES, without("update"), (), "'update' is gone"),
        (Kept.OTHERS, changed(), (), "'y' changed"),
        (Kept.OTHERS, without("update"), (), "'update' is gone"),
    ],
)
def test_a_graph_in_which_something_did_not_stay(kept: Kept, after: Graph, keep: Collection[str], words: str) -> None:
    contract = Contract(leaves=frozenset({kept}))
    contract.ensure(graph(), [], keep, graph())
    with pytest.raises(ContractError, match=f"^the pass leaves {kept.value}; but {words}"):
        contract.ensure(graph(), [], keep, after)


def test_what_is_replaced_may_go() -> None:
    contract = Contract(leaves=frozenset({Kept.UPDATES, Kept.OTHERS}))
    contract.ensure(graph(), [Rewrite("update", replaced=("update",))], (), without("update"))


def test_an_op_that_the_pass_may_not_insert() -> None:
    contract = Contract(inserts=frozenset({"Neg"}))
    contract.ensure(graph(), [Rewrite("a", (NewNode("n", "Neg", (TensorId("x"),)),))], (), graph())
    with pytest.raises(ContractError, match=r"^the pass inserts Neg; but it inserts a Relu"):
        contract.ensure(graph(), [Rewrite("a", (NewNode("n", "Relu", (TensorId("x"),)),))], (), graph())


class Source:
    """A source of one graph."""

    structure = None

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def read(self, inlined: Collection[str] | None = None, functions: bool = True) -> Graph:
        return self.graph

    def keep(self, graph: Graph) -> set[str]:
        return {"y"} & graph.nodes.keys()

    def bodies(self, in_loops: bool = False) -> Mapping[str, Any]:
        return {}

    def follow(self, other: Any) -> Mapping[str, str]:
        raise NotImplementedError

    def edit(self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]) -> dict[str, Exception]:
        self.graph, errors = applied(rewrites, graph, check)
        return errors


def test_a_pass_that_breaks_its_contract_costs_itself() -> None:
    def rewrites(plan: str, graph: Graph) -> list[Rewrite]:
        return [Rewrite("bad", (NewNode("bad", "Neg", (TensorId("x"),)),), replaced=("update",))]

    contract = Contract(
        requires=frozenset({Property.TYPED}), leaves=frozenset({Kept.OTHERS}), inserts=frozenset({"Tanh"})
    )
    broken = Pass(
        "broken", PassPhase.AFTER_GRAPPLER, "fusion", lambda source, _: ("", source.read()), rewrites, contract
    )
    source = Source(graph())
    done = run_passes(PassPhase.AFTER_GRAPPLER, ["fusion"], source, {"broken": lambda _: 1}, [broken])
    assert isinstance(done["broken"].errors["bad"], ContractError)
    assert set(source.graph.nodes) == set(graph().nodes)
    ill = Source(untyped())
    done = run_passes(
        PassPhase.AFTER_GRAPPLER, ["fusion"], ill, {"broken": lambda _: 1}, [replace(broken, name="broken")]
    )
    assert isinstance(done["broken"].failed, ContractError)


def test_every_pass_promises_a_graph_that_is_one_and_leaves_what_it_does_not_name() -> None:
    for each in PASSES:
        assert each.contract.requires, each.name
        assert Property.WELL_FORMED in each.contract.ensures, each.name
        assert each.contract.leaves == set(Kept), each.name


class Frozen(Graph):
    """A graph that was read: an edit of it is an error, and copies are ordinary graphs."""

    def insert(self, *_: Any, **__: Any) -> str:
        raise AssertionError("a plan edits the graph that it was given")

    rewire = add_control = remove_control = remove = insert  # type: ignore[assignment]


def frozen(given: Graph) -> Frozen:
    return Frozen((node.copy() for node in given), given.specs, given.constants, given.functions)


def step_graph() -> Graph:
    """Products of one operand, and what is elementwise around them; enough for every pass to plan something."""
    return trained().graph()


NEEDS: dict[str, Any] = {
    "recurrent": recurrent.Needs(lambda *_: ((), ()), lambda *_: None, lambda plan: plan),
    "products": products.Needs(("q", "k", "v"), product_sizes("h200"), list),
    "prepare": prepare.Needs(),
    "equal": equal.Needs(),
    "merge": merge.Needs(replace(UNIT, most=Small(0, 0)), lambda forms: 1e4 * len(forms)),
    "split": split.SplitNeeds(
        Step.read(step_graph()).order, (), [split.SplitLane(0, ())], 1, lambda plan: split.SplitEstimate(1, 1.0)
    ),
    "fuse": fuse.Needs(UNIT, "/job:localhost/replica:0/task:0/device:CPU:0", lambda node: b""),
}


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_a_plan_edits_nothing_and_comes_out_equal_again(each: Pass[Any, Any]) -> None:
    given = read(loop_graph()) if each.name == "recurrent" else step_graph()
    needs = NEEDS.get(each.name)
    if each.name == "offload":
        step = Step.read(given)
        timeline = step.timeline(Roofline(load("unit")))
        needs = [offload.Needs(timeline, OffloadOptions(), offload.PlanRequest(Link(1.0, 1.0), timeline.peak))]
    source = Source(frozen(given))
    plan, planned = each.plan(source, needs)
    assert plan == each.plan(source, needs)[0]
    assert planned is source.graph or isinstance(planned, WorkingCopy)
    assert str(plan)
    each.contract.require(planned)
    rewrites = each.rewrites(plan, planned)
    _, errors = applied(rewrites, planned, lambda after: each.contract.ensure(planned, rewrites, (), after))
    assert errors == {}
