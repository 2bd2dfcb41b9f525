"""Which numbers of a step under a budget are computed once, though several ops compute them alike.

The hard case: ops that are ready when the step begins, and that the memory plan does not put into an order.

    read step -> cast -> beta^step -> ...       for each of 200 variables: nothing reads it before the backward pass
    input -> product 1 -> product 2 -> ...      the plan's order; its copies hide behind these ops

TensorFlow enqueues ops in the order in which they become ready. So all kernels of the first line run between the first
few products: some 1,800 kernels of BERT's step, each shorter than the host takes to enqueue it. The GPU waits, and the
plan's copies meet other times than the plan counts with. One step count, cast and power for all variables are enough.

    equal_numbers   the ops that compute equal numbers (`analysis/equal_numbers.py`)

The passes of fusion do the same where they run (`prepare`).
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.analysis.equal_numbers import Equal, equal_numbers
from graph_passes.analysis.op_pattern import patterns_of
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph


@dataclass(frozen=True)
class Needs:
    """What planning takes: nothing beside the graph, of which all runs."""


@dataclass(frozen=True)
class EqualPlan:
    """Ops that compute equal numbers."""

    equal: tuple[Equal, ...]


def plan_equal(source: Readable, _: Needs) -> tuple[EqualPlan, Graph]:
    """What is computed once in a graph, and the graph."""
    graph = source.read()
    return EqualPlan(equal_numbers(graph, patterns_of(graph), source.keep(graph))), graph
