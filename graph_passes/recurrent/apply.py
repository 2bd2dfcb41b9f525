"""Edits a graph as a `RecurrentPlan` says; makes no choice."""

from __future__ import annotations

from graph_passes.graph.ir import Editor, Graph
from graph_passes.graph.rewrite import apply_rewrites
from graph_passes.recurrent.match import RecurrentPlan


def apply_recurrent(plan: RecurrentPlan, graph: Graph, editor: Editor | None = None) -> None:
    """Carry out `plan`, made of `graph`; see `apply_rewrites`."""
    apply_rewrites(plan.rewrites(), graph, editor)
