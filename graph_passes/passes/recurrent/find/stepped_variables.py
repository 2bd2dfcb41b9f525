"""Variables to which every step of a loop adds the same whole numbers, as a generator of `keras.random` does.

    in a step                    in step i, from 0
    read                         start + i * (a + b)         0 assignments before it
    assign what was read + a
    read                         start + i * (a + b) + a     1 assignment before it
    assign what was read + b

TensorFlow orders the reads and assignments of a variable by control edges and by what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import IDENTITIES, passed

_WHOLE = ("int32", "int64")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp")


@dataclass(frozen=True)
class Stepped:
    """One such variable.

    Attributes:
        place: the loop's variable that holds the resource.
        spec: the dtype and the shape of its value, which are known.
        added: what each assignment of a step adds, in their order, tensors of the body.
        assigns: these assignments.
        reads: for each read of a step, how many assignments are before it.
    """

    place: int
    spec: TensorSpec
    added: tuple[TensorId, ...]
    assigns: tuple[str, ...]
    reads: Mapping[str, int]


def stepped_variables(
    graph: Graph, initial: tuple[TensorId, ...], invariants: Collection[int], body: Function, condition: Function
) -> tuple[Stepped, ...]:
    """The stepped variables of a loop; another variable that steps assign is not among them.

    Args:
        graph: the graph around the loop.
        initial: the loop's variables before it.
        invariants: the positions of those that stay, as a resource does.
        body: of the loop.
        condition: of the loop; it must not read such a variable.
    """
    sources = [passed(graph, tensor) for tensor in initial]
    found = []
    for place in sorted(invariants):
        spec = graph.specs.get(initial[place])
        behind = spec.behind if spec is not None and spec.dtype == "resource" else None
        if behind is None or behind.dtype not in _WHOLE or behind.sizes is None:
            continue
        alone = sources.count(sources[place]) == 1
        if alone and not condition.graph.uses(TensorId(condition.arguments[place])):
            stepped = _stepped(body, place, behind)
            found += [stepped] if stepped is not None else []
    return tuple(found)


def _stepped(body: Function, place: int, spec: TensorSpec) -> Stepped | None:
    graph, resource = body.graph, TensorId(body.arguments[place])
    users = [graph[name] for name in dict.fromkeys(_users(graph, resource))]
    assigns = [node for node in users if node.op in _ASSIGNS]
    reads = [node for node in users if node.op == "ReadVariableOp"]
    if not assigns or len(assigns) + len(reads) < len(users):
        return None
    before = {node.name: graph.reached([node.name], graph.predecessors) for node in users}
    order = sorted(assigns, key=lambda node: sum(other.name in before[node.name] for other in assigns))
    if any(sum(other.name in before[node.name] for other in assigns) != count + 1 for count, node in enumerate(order)):
        return None
    versions: dict[str, int] = {}
    for read in reads:
        count = sum(assign.name in before[read.name] for assign in order)
        if any(read.name not in before[assign.name] for assign in order[count:]):
            return None
        versions[read.name] = count
    added: list[TensorId] = []
    for count, assign in enumerate(order):
        by = _added(graph, assign, {name for name, version in versions.items() if version == count})
        if by is None:
            return None
        added.append(by)
    return Stepped(place, spec, tuple(added), tuple(node.name for node in order), versions)


def _users(graph: Graph, resource: TensorId) -> Iterator[str]:
    """The nodes that take the variable, copies of its handle left out."""
    for use in graph.uses(resource):
        if graph[use.node].op in IDENTITIES:
            yield from _users(graph, TensorId(use.node, use.index))
        else:
            yield use.node


def _added(graph: Graph, assign: Node, reads: Collection[str]) -> TensorId | None:
    """What an assignment adds to what `reads` read."""
    if assign.op == "AssignAddVariableOp":
        return assign.inputs[1]
    value = graph[passed(graph, assign.inputs[1]).node]
    if value.op not in ("Add", "AddV2"):
        return None
    here = next((here for here, side in enumerate(value.inputs) if passed(graph, side).node in reads), None)
    return None if here is None else value.inputs[1 - here]
