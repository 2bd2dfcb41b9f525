"""Initial states that are zeros: the op takes a tensor without rows for them, which nobody has to fill."""

from __future__ import annotations

from dataclasses import replace

from graph_passes.ir import DataType, Graph, Literal, TensorId
from graph_passes.recurrent.hoist import Names
from graph_passes.recurrent.layout import is_zero
from graph_passes.recurrent.match import Launch, Match, NewNode


def without_zeros(graph: Graph, match: Match, names: Names) -> Match:
    """`match`, whose launches start from no tensor of `graph` that is known to be zeros."""
    nodes: list[NewNode | Launch] = []
    for node in match.nodes:
        nodes += _starting_from_none(graph, node, names) if isinstance(node, Launch) else [node]
    return replace(match, nodes=tuple(nodes))


def _starting_from_none(graph: Graph, launch: Launch, names: Names) -> list[NewNode | Launch]:
    states = {state for direction in launch.directions for state in direction.states}
    zeros = {state for state in states if state.node in graph.nodes and is_zero(graph, state)}
    if not zeros:
        return [launch]
    attrs = {"dtype": DataType(launch.dtype), "value": Literal(launch.dtype, (0, launch.units), ())}
    none = NewNode(names.fresh(f"{launch.name}/zeros"), "Const", (), attrs, launch.device)
    instead = dict.fromkeys(zeros, TensorId(none.name))
    directions = [
        replace(direction, states=tuple(instead.get(state, state) for state in direction.states))
        for direction in launch.directions
    ]
    return [none, replace(launch, directions=tuple(directions))]
