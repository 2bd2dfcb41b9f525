"""Patterns that are equal but for the names of their nodes, such as the steps of an unrolled loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import copied, passed

# Equal for equal patterns of one graph.
Signature: TypeAlias = tuple[int, ...]
Result = TypeVar("Result")


class Signatures:
    """The signatures of patterns of a graph: what their ops are, how they are connected, what they read and whether
    others read them. Everything that a kernel depends on, but for where its tensors lie."""

    def __init__(self, graph: Graph, fetched: Collection[TensorId] = ()) -> None:
        self._graph = graph
        self._fetched = frozenset(fetched)
        self._numbers: dict[Hashable, int] = {}
        self._ops: dict[str, int] = {}
        self._given: dict[TensorId, int] = {}
        self._readers: dict[str, tuple[tuple[TensorId, frozenset[str]], ...]] = {}

    def __call__(self, members: Sequence[str]) -> Signature:
        """The signature of a pattern, whose members are given in topological order."""
        graph, place = self._graph, {name: index for index, name in enumerate(members)}
        outside: dict[TensorId, int] = {}
        found: list[int] = []
        for name in members:
            node = graph.nodes[name]
            found.append(self._op(node))
            for tensor in node.inputs:
                if tensor.node in place:
                    found += (place[tensor.node], tensor.index)
                else:
                    found += (-1 - outside.setdefault(tensor, len(outside)), self._tensor(tensor))
            for tensor, readers in self._read_by(node):
                found.append(int(tensor in self._fetched or not place.keys() >= readers))
        return tuple(found)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _read_by(self, node: Node) -> tuple[tuple[TensorId, frozenset[str]], ...]:
        """What the node makes, each with the nodes that read it."""
        if node.name not in self._readers:
            made = ((tensor, self._graph.uses(tensor)) for tensor in self._graph.tensors(node))
            self._readers[node.name] = tuple((tensor, frozenset(use.node for use in uses)) for tensor, uses in made)
        return self._readers[node.name]

    def _op(self, node: Node) -> int:
        """The number of the op, its attributes and the shapes of what it makes."""
        if node.name not in self._ops:
            attrs = tuple((key, _text(value)) for key, value in sorted(copied(node).items()))
            specs = tuple(self._graph.specs.get(tensor) for tensor in self._graph.tensors(node))
            self._ops[node.name] = self._number((node.op, attrs, len(node.inputs), specs))
        return self._ops[node.name]

    def _tensor(self, tensor: TensorId) -> int:
        """The number of a tensor that a pattern is given: of its shape, and of its values if they are known."""
        if tensor not in self._given:
            value = self._graph.constants.get(passed(self._graph, tensor).node)
            known = None if value is None else (str(value.dtype), value.shape, value.tobytes())
            self._given[tensor] = self._number((self._graph.specs.get(tensor), known))
        return self._given[tensor]


def once(function: Callable[[Sequence[str]], Result], signatures: Signatures) -> Callable[[Sequence[str]], Result]:
    """`function` of a pattern, which is asked once about equal ones."""
    answers: dict[Signature, Result] = {}

    def answered(members: Sequence[str]) -> Result:
        signature = signatures(members)
        if signature not in answers:
            answers[signature] = function(members)
        return answers[signature]

    return answered


def _text(value: Any) -> str | bytes:
    """An attribute, read from a GraphDef or written by a pass."""
    serialize = getattr(value, "SerializeToString", None)
    return serialize(deterministic=True) if serialize else repr(value)
