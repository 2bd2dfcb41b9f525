"""What a pass promises, as data, and the checker of it (ONNX IR's pre- and postconditions are the model).

requires    properties of the graph that the pass is given
ensures     properties of the graph that it leaves
leaves      what is the same before and after
inserts     the types of the ops that it may insert
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import is_update
from graph_passes.graph.rewrite import Rewrite
from graph_passes.graph.verify import verify_graph


class ContractError(RuntimeError):
    """A pass was given, or left, a graph that is not what its contract says. That is a fault of tfmem's own, which a
    user cannot change; so it is no `TfmemError`."""


class Property(Enum):
    """What holds of one graph; the value is how a broken contract names it."""

    WELL_FORMED = "acyclic but for lowered loops, every input present"
    TYPED = "a dtype for every tensor that a node reads"


class Kept(Enum):
    """What is the same in a graph before and after a pass; the value is how a broken contract names it."""

    FETCHES = "every fetched node"
    UPDATES = "as many ops that write variables, but for those that were replaced"
    OTHERS = "type, attributes, device and outputs of every node that was not replaced"


@dataclass(frozen=True)
class Contract:
    """See the module's docstring.

    Attributes:
        requires, ensures, leaves, inserts: as there; None: `inserts` is open, for the pass copies or differentiates ops
            of the graph.
    """

    requires: frozenset[Property] = frozenset()
    ensures: frozenset[Property] = frozenset()
    leaves: frozenset[Kept] = frozenset()
    inserts: frozenset[str] | None = field(default=None)

    def require(self, graph: Graph) -> None:
        """
        Raises:
            ContractError: `graph` lacks what the pass requires.
        """
        for each in sorted(self.requires, key=lambda each: each.name):
            _raise("the pass requires", each.value, _PROPERTIES[each](graph))

    def ensure(self, before: Graph, rewrites: Sequence[Rewrite], keep: Collection[str], after: Graph) -> None:
        """
        Args:
            before: the graph that the rewrites were made of.
            rewrites: all of the pass; not each of them need be in `after`.
            keep: names of nodes that are fetched.
            after: the edited graph.

        Raises:
            ContractError: `after` is not what the pass promises.
        """
        for each in sorted(self.ensures, key=lambda each: each.name):
            _raise("the pass ensures", each.value, _PROPERTIES[each](after))
        for kept in sorted(self.leaves, key=lambda each: each.name):
            _raise("the pass leaves", kept.value, _KEPT[kept](before, rewrites, keep, after))
        if self.inserts is not None:
            new = {node.op for rewrite in rewrites for node in rewrite.nodes} - self.inserts
            _raise("the pass inserts", ", ".join(sorted(self.inserts)), (f"it inserts a {op}" for op in sorted(new)))


def _raise(promise: str, what: str, faults: Iterator[str]) -> None:
    fault = next(faults, None)
    if fault is not None:
        raise ContractError(f"{promise} {what}; but {fault}: a bug in tfmem; please report this")


def _ill_formed(graph: Graph) -> Iterator[str]:
    try:
        verify_graph(graph)
    except GraphError as error:
        if type(error) is not GraphError:  # it tells the user what to change, and is no fault of a pass
            raise
        yield str(error)


def _untyped(graph: Graph) -> Iterator[str]:
    return (
        f"'{node.name}' reads '{tensor}' of unknown dtype"
        for node in graph
        for tensor in node.inputs
        if tensor not in graph.specs
    )


_PROPERTIES: dict[Property, Callable[[Graph], Iterator[str]]] = {
    Property.WELL_FORMED: _ill_formed,
    Property.TYPED: _untyped,
}


def _lost(before: Graph, _: Sequence[Rewrite], keep: Collection[str], after: Graph) -> Iterator[str]:
    return (f"'{name}' is gone" for name in sorted(keep) if name in before.nodes and name not in after.nodes)


def _unwritten(before: Graph, rewrites: Sequence[Rewrite], _: Collection[str], after: Graph) -> Iterator[str]:
    replaced = {name for rewrite in rewrites for name in rewrite.replaced}
    names = [node.name for node in before if is_update(node.op) and node.name not in replaced]
    return (f"'{name}' is gone" for name in names if name not in after.nodes)


def _changed(before: Graph, rewrites: Sequence[Rewrite], _: Collection[str], after: Graph) -> Iterator[str]:
    replaced = Counter(name for rewrite in rewrites for name in rewrite.replaced)
    for node in before:
        now = after.nodes.get(node.name)
        if now is None and node.name not in replaced:
            yield f"'{node.name}' is gone"
        elif now is not None and node.name not in replaced:
            one, other = ((each.op, each.device, each.outputs, each.attrs) for each in (node, now))
            if one != other:
                yield f"'{node.name}' changed"


_KEPT: dict[Kept, Callable[[Graph, Sequence[Rewrite], Collection[str], Graph], Iterator[str]]] = {
    Kept.FETCHES: _lost,
    Kept.UPDATES: _unwritten,
    Kept.OTHERS: _changed,
}
