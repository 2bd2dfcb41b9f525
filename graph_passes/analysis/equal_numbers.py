"""Numbers that several nodes compute alike, which one of them will compute for all.

    read step --> cast --> beta^step  (a variable)            read step --> cast --> beta^step --> (all variables)
    read step --> cast --> beta^step  (the next one)   ->

Keras's optimizers compute such numbers for each variable. TensorFlow keeps the reads apart, and so all that follows.
Two reads are equal where they wait for the same nodes: a write that one of them waits for, the other would, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from graph_passes.analysis.op_pattern import NodePattern, OpPattern
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import copied
from graph_passes.graph.order import topological
from graph_passes.graph.rewrite import Rewrite

NUMBER = 8  # bytes of one
_KINDS = frozenset({OpPattern.ELEMENTWISE, OpPattern.VIEW, OpPattern.READ})


@dataclass(frozen=True)
class Equal:
    """Nodes that compute the same number.

    Attributes:
        name: of the one that stays.
        others: of those that go.
    """

    name: str
    others: tuple[str, ...]


def equal_numbers(graph: Graph, known: Mapping[str, NodePattern], keep: Collection[str]) -> tuple[Equal, ...]:
    """The ops of a graph that compute equal numbers; the nodes named in `keep` are fetched, and stay."""
    first: dict[Hashable, str] = {}
    others: dict[str, list[str]] = {}
    stays: dict[str, str] = {}
    for name in topological(graph):
        node = graph[name]
        if name in keep or known[name].pattern not in _KINDS or not _is_number(graph, node):
            continue
        key = (
            node.op,
            node.device,
            tuple((key, _text(value)) for key, value in sorted(copied(node).items())),
            tuple(_tensor(graph, tensor, stays) for tensor in node.inputs),
            frozenset(stays.get(before, before) for before in node.control),
        )
        if first.setdefault(key, name) != name:
            stays[name] = first[key]
            others.setdefault(first[key], []).append(name)
    return tuple(Equal(name, tuple(found)) for name, found in others.items())


def equal_rewrites(found: Sequence[Equal]) -> list[Rewrite]:
    """What reads one of the others reads the one that stays."""
    return [
        Rewrite(
            each.name,
            rewired=tuple((TensorId(other), TensorId(each.name)) for other in each.others),
            replaced=each.others,
            successor=each.name,
        )
        for each in found
    ]


def _is_number(graph: Graph, node: Node) -> bool:
    """Whether a node has inputs, and one small result of known size."""
    spec = graph.specs.get(TensorId(node.name))
    return bool(node.inputs) and node.outputs == 1 and spec is not None and spec.nbytes in range(1, NUMBER + 1)


def _tensor(graph: Graph, tensor: TensorId, stays: Mapping[str, str]) -> Hashable:
    value = graph.constants.get(tensor.node)
    if value is not None:
        return str(value.dtype), value.shape, value.tobytes()
    return stays.get(tensor.node, tensor.node), tensor.index


def _text(value: object) -> str | bytes:
    serialize = getattr(value, "SerializeToString", None)
    return bytes(serialize(deterministic=True)) if serialize else repr(value)
