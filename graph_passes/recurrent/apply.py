"""Edits a graph as a `RecurrentPlan` says; makes no choice."""

from __future__ import annotations

from graph_passes.ir import DataType, Editor, Graph, TensorId, Use
from graph_passes.recurrent.match import Launch, Match, NewNode, RecurrentPlan


def apply_recurrent(plan: RecurrentPlan, graph: Graph, editor: Editor | None = None) -> None:
    """Carry out `plan`.

    Args:
        plan: made of `graph`.
        graph: tells who reads what. Edited itself, and freed of dead nodes, unless there is an editor.
        editor: edit this (a live `tf.Graph`) instead; dead nodes stay in it, and nothing runs them.
    """
    replaced: dict[TensorId, TensorId] = {}
    inserted: dict[TensorId, list[Use]] = {}  # readers that a graph which is not edited itself does not know of
    for match in plan.matches:
        _apply(plan, match, graph, graph if editor is None else editor, replaced, inserted)
        if editor is None:
            types = {name: graph.specs.get(TensorId(name)) for name, _ in match.renamed}  # before they are gone
            graph.remove([name for name in match.removed if name in graph.nodes])
            for name, _ in match.renamed:
                spec = types[name]
                attrs = {} if spec is None else {"T": DataType(spec.dtype)}
                graph.insert(name, "Identity", [replaced[TensorId(name)]], attrs)


def _apply(
    plan: RecurrentPlan,
    match: Match,
    graph: Graph,
    editor: Editor,
    replaced: dict[TensorId, TensorId],
    inserted: dict[TensorId, list[Use]],
) -> None:
    """`replaced`: what earlier matches rewired, which this one may still name; `inserted`: what their nodes read."""
    names: dict[str, str] = {}

    def now(tensor: TensorId) -> TensorId:
        tensor = replaced.get(tensor, tensor)
        return TensorId(names.get(tensor.node, tensor.node), tensor.index)

    for planned in match.nodes:
        node = _node(planned, plan) if isinstance(planned, Launch) else planned
        inputs = [now(tensor) for tensor in node.inputs]
        names[node.name] = editor.insert(node.name, node.op, inputs, node.attrs, node.device, node.control)
    new_nodes = set(names.values())
    for old, new in match.rewired:
        for use in [*graph.uses(old), *(inserted.get(old, ()) if editor is not graph else ())]:
            if use.node not in new_nodes:
                editor.rewire(use.node, use.index, now(new))
    replaced.update({old: now(new) for old, new in match.rewired})
    for planned in match.nodes:
        for index, tensor in enumerate(map(now, _inputs(planned))):
            inserted.setdefault(tensor, []).append(Use(names[planned.name], index))
    first = names[match.launches[0].name]  # a gradient's launch comes later, and nobody waited for that alone
    removed = set(match.removed)
    for name in match.removed:
        for waiting in list(graph.waiting(graph[name])):
            if waiting not in removed:
                editor.add_control(waiting, first)
                editor.remove_control(waiting, name)


def _node(launch: Launch, plan: RecurrentPlan) -> NewNode:
    kernels = plan.kernels.get(launch.name)
    return launch.node(plan.precision, kernels.programs if kernels else ())


def _inputs(node: NewNode | Launch) -> tuple[TensorId, ...]:
    return (node.node() if isinstance(node, Launch) else node).inputs
