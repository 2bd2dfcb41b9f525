"""What an `EqualPlan` does to a graph; makes no choice."""

from __future__ import annotations

from graph_passes.analysis.equal_numbers import equal_rewrites
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Rewrite
from graph_passes.passes.equal.plan import EqualPlan


def numbers_once(plan: EqualPlan, _: Graph) -> list[Rewrite]:
    """One rewrite for each number that several ops compute."""
    return equal_rewrites(plan.equal)
