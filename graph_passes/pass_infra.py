"""What a pass is, and what runs passes one after another.

    plan.py     a Planner: (a Readable, its needs) -> (a frozen plan, the graph that it is for)
    apply.py    an Applier: (plan, graph) -> rewrites, with no choice left
    Pass        both, typed by needs and plan, with the contract that is checked before and after

What a pass needs of TensorFlow or of a device (gradients, kernels that are timed, costs) is handed to its plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from custom_ops.background import go_on
from graph_passes.contract import Contract
from graph_passes.graph.graph_source import Readable, Source
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Rewrite

Plan = TypeVar("Plan")
Needs = TypeVar("Needs")
Needs_contra = TypeVar("Needs_contra", contravariant=True)
Plan_co = TypeVar("Plan_co", covariant=True)
Plan_contra = TypeVar("Plan_contra", contravariant=True)


class PassPhase(enum.Enum):
    """Where in the pipeline a pass stands.

    Attributes:
        BEFORE_GRAPPLER: on the graph as its author left it, with loops as they were written.
        AFTER_GRAPPLER: on the ops that will run, whether there is a budget or not.
        UNDER_BUDGET: the same, where memory is limited.
    """

    BEFORE_GRAPPLER = enum.auto()
    AFTER_GRAPPLER = enum.auto()
    UNDER_BUDGET = enum.auto()


class PassPlanner(Protocol[Needs_contra, Plan_co]):
    """Decides. It edits nothing: a graph that it changes is a `WorkingCopy` that it made."""

    def __call__(self, source: Readable, needs: Needs_contra, /) -> tuple[Plan_co, Graph]:
        """A plan, and the graph that it is for."""


class Applier(Protocol[Plan_contra]):
    """Writes what a plan says as rewrites, and makes no choice."""

    def __call__(self, plan: Plan_contra, graph: Graph, /) -> Sequence[Rewrite]:
        """The rewrites of `graph`, which the planner gave."""


@dataclass(frozen=True)
class Pass(Generic[Needs, Plan]):
    """One pass. Neither of its functions edits anything: `run_passes` does.

    Attributes:
        name: its folder.
        phase: where it stands.
        option: the name in a user's `passes` that asks for it.
        plan: decides.
        rewrites: writes the plan as rewrites.
        contract: what it requires, ensures and leaves.
    """

    name: str
    phase: PassPhase
    option: str
    plan: PassPlanner[Needs, Plan]
    rewrites: Applier[Plan]
    contract: Contract


@dataclass(frozen=True)
class PassOutcome(Generic[Plan]):
    """What came of one pass.

    Attributes:
        plan: what it decided; None if it failed.
        errors: why rewrites could not be carried out, by their names; the graph is without these.
        failed: what it failed with. The graph is the one before this pass.
    """

    plan: Plan | None = None
    errors: Mapping[str, Exception] = field(default_factory=dict)
    failed: Exception | None = None


# Makes what a pass needs of what came of the passes before it; None: the pass does not run.
NeedsOf = Callable[[Mapping[str, PassOutcome[Any]]], Any]


def run_passes(
    phase: PassPhase,
    asked: Collection[str],
    source: Source,
    needs: Mapping[str, NeedsOf],
    passes: Sequence[Pass[Any, Any]],
) -> dict[str, PassOutcome[Any]]:
    """Plan and carry out the passes of a phase, each on what those before it left; one that fails costs no other.

    Args:
        phase: the phase.
        asked: the user's `passes`.
        source: what is read and edited.
        needs: by name of a pass, what its plan is handed, made of what came of the passes before it. None, or no entry:
            the pass does not run.
        passes: all passes.

    Returns:
        What came of each pass that ran, by its name.
    """
    done: dict[str, PassOutcome[Any]] = {}
    for each in passes:
        if each.phase is not phase or each.option not in asked or each.name not in needs:
            continue
        go_on()
        try:
            handed = needs[each.name](done)
            if handed is not None:
                done[each.name] = _run(each, source, handed)
        except Exception as error:  # whatever it is, the step runs without this pass
            done[each.name] = PassOutcome(failed=error)
    return done


def _run(each: Pass[Needs, Plan], source: Source, needs: Needs) -> PassOutcome[Plan]:
    plan, graph = each.plan(source, needs)
    rewrites = each.rewrites(plan, graph)
    if not rewrites:
        return PassOutcome(plan)
    each.contract.require(graph)
    check = partial(each.contract.ensure, graph, rewrites, source.keep(graph))
    return PassOutcome(plan, source.edit(graph, rewrites, check))
