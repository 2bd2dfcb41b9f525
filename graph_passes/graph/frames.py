"""Lowered loops: cycles of Enter, Merge, Switch and NextIteration, as TensorFlow 1 wrote them and as freezing leaves
them.

    initial -> Enter -> Merge -> Switch -> body -> NextIteration
                          ^        |                    |
                          |        +-> Exit -> final    |
                          +-----------------------------+
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId, boolean, text

_ENTERS = frozenset({"Enter", "RefEnter"})


@dataclass(frozen=True)
class FrameVariable:
    """The nodes that carry one variable around."""

    enter: str
    merge: str
    switch: str
    next_iteration: str
    exit: str | None


@dataclass(frozen=True)
class Frame:
    """One loop.

    Attributes:
        name: its frame's name.
        condition: the LoopCond node.
        variables: what changes.
        constants: Enter nodes of what does not.
        nodes: every node in the frame.
    """

    name: str
    condition: str
    variables: tuple[FrameVariable, ...]
    constants: tuple[str, ...]
    nodes: tuple[str, ...]


def frames(graph: Graph) -> Iterator[Frame]:
    """Every innermost lowered loop of `graph`."""
    conditions = [node for node in graph if node.op == "LoopCond"]
    for node in conditions:
        found = _frame(graph, node)
        if found is not None:
            yield found


def subgraph(graph: Graph, results: list[TensorId], ends: frozenset[str]) -> list[str]:
    """The nodes that `results` are computed from, down to `ends`, which are not among them."""

    def before(tensors: Iterable[TensorId]) -> Iterator[str]:
        return (tensor.node for tensor in tensors if tensor.node not in ends)

    found = graph.reached(before(results), lambda node: before(node.inputs))
    return [name for name in graph.nodes if name in found]


def _frame(graph: Graph, condition: Node) -> Frame | None:
    variables: list[FrameVariable] = []
    switches = {use.node for use in graph.uses(TensorId(condition.name)) if graph[use.node].op == "Switch"}
    for switch in sorted(switches):
        merge = graph[graph[switch].inputs[0].node]
        if merge.op != "Merge" or len(merge.inputs) != 2:
            return None
        sides = {graph[tensor.node].op: tensor.node for tensor in merge.inputs}
        exits = [use.node for use in graph.uses(TensorId(switch, 0)) if graph[use.node].op == "Exit"]
        if "Enter" not in sides or "NextIteration" not in sides or len(exits) > 1:
            return None
        around = (sides["Enter"], merge.name, switch, sides["NextIteration"])
        variables.append(FrameVariable(*around, exits[0] if exits else None))
    if not variables:
        return None
    frame_name = text(graph[variables[0].enter].attrs.get("frame_name"))
    enters = [n for n in graph if n.op in _ENTERS and text(n.attrs.get("frame_name")) == frame_name]
    carried = {variable.enter for variable in variables}
    constants = [node.name for node in enters if node.name not in carried]
    if not all(boolean(graph[name].attrs.get("is_constant")) for name in constants):
        return None
    inside = graph.reached(
        (node.name for node in enters), lambda node: () if node.op == "Exit" else graph.successors(node)
    )
    nodes = [name for name in graph.nodes if name in inside]
    nested = any(graph[name].op in _ENTERS and name not in carried and name not in constants for name in nodes)
    return None if nested else Frame(frame_name, condition.name, tuple(variables), tuple(constants), tuple(nodes))
