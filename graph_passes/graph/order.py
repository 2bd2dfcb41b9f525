"""The schedule: one total order of a graph's nodes, which is the time axis of every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from custom_ops.ordering import topological_order
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph
from graph_passes.graph.merged import merged_pairs
from graph_passes.graph.ops import EXTERNAL, SHAPE_READERS, VIEWS, shares_rows

TINY = 1e-3  # of the largest tensor's bytes


def topological(graph: Graph) -> list[str]:
    """A topological order, in time linear in nodes and edges; the same for equal graphs in every process.

    Raises:
        GraphError: the graph has a cycle (a TensorFlow 1 while loop, say); names one node on it.
    """
    return _Edges(graph).topological()


class _Edges:
    """The edges of a graph, read once: of each node what it waits for and what waits for it, each once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before = {node.name: list(dict.fromkeys(graph.predecessors(node))) for node in graph}
        self.after = {node.name: list(dict.fromkeys(graph.successors(node))) for node in graph}
        self.waiting = {name: len(before) for name, before in self.before.items()}

    def topological(self) -> list[str]:
        """See `topological`."""
        order = topological_order(self.waiting, self.after.__getitem__)
        if len(order) == len(self.graph):
            return order
        done = set(order)
        stuck = next(name for name in self.waiting if name not in done)
        raise GraphError(
            f"the graph has a cycle through or before '{stuck}' ({self.graph[stuck].op}); "
            "tfmem reads acyclic graphs: use TensorFlow 2 control flow (tf.while_loop with control flow v2)"
        )

    def by_place(self, order: Sequence[str], place: Mapping[str, float]) -> list[str]:
        """The topological order that follows `place` as far as the edges allow; ties as in `order`."""
        rank = {name: (place[name], index) for index, name in enumerate(order)}
        return topological_order(self.waiting, self.after.__getitem__, rank.__getitem__)


def is_acyclic(graph: Graph) -> bool:
    """Whether the graph has an order; one with a lowered loop has none."""
    try:
        topological(graph)
    except GraphError:
        return False
    return True


def schedule(graph: Graph, creation_order: Sequence[str] = (), merging: bool = False) -> list[str]:
    """The order in which the program created its ops, made consistent with the graph's edges.

    Programs create the forward pass before the backward pass, however the gradient is written, so this is the order
    that they run in. A node that `creation_order` does not know (Grappler made it) goes right before its first reader,
    and so does a view; a node without readers goes right after what it reads.

    Where oneDNN will merge ops (`merging`), views stay where they were: which others it merges depends on the order.
    """
    known = {name: place for place, name in enumerate(creation_order or graph.nodes)}
    edges = _Edges(graph)
    order, before, after = edges.topological(), edges.before, edges.after
    place: dict[str, float] = {}
    for name in reversed(order):
        if name in known:
            place[name] = known[name]
        else:
            readers = [place[s] for s in after[name] if s in place]
            place[name] = min(readers) - 0.5 if readers else float("inf")
    for name in order:
        if place[name] == float("inf"):
            place[name] = max((place[p] for p in before[name]), default=0.0) + 0.5
    # An op that reads a shape only must not keep the tensor waiting for it.
    for name in order:
        if graph[name].op in SHAPE_READERS:
            place[name] = max((place[p] for p in before[name]), default=place[name]) + 0.25
    # A bias's gradient goes with its filter's where the two will be merged (see `roles.unordered`).
    merged = merged_pairs(graph) if merging else []
    for stays, goes in merged:
        if graph[goes].op == "BiasAddGrad":
            place[goes] = place[stays] + 0.25
        elif graph[goes].op == "BiasAdd":  # the merged op reads the bias as well, which must not wait for the product
            for name in set(before[goes]).difference((stays,)):
                place[name] = min(place[name], place[stays] - 0.25)
    # A node is due when its first reader is: Grappler moves constants and casts about, and they must not wait.
    for name in reversed(order):
        readers = [place[s] for s in after[name]]
        if readers:
            place[name] = min(place[name], *readers)

    result = edges.by_place(order, place)
    freeing = _freeing(graph, result).difference(goes for _, goes in merged)
    if not freeing:
        return result if merged else _views_late(edges, result)
    # What frees more than it makes runs as soon as it can: a filter's gradient before the input's, an update at once.
    place = {name: float(index) for index, name in enumerate(result)}
    tiny = TINY * max((graph.nbytes(tensor) for node in graph for tensor in graph.tensors(node)), default=0)
    ready: dict[str, float] = {}  # when a node's value can be there; views and what is tiny are there at once
    for name in result:
        due = max((ready[p] for p in before[name]), default=place[name] if merged else 0.0)
        if name in freeing:
            place[name] = due + 0.25
        at_once = not merged and (graph[name].op in VIEWS or _is_tiny(graph, name, tiny))
        ready[name] = due if at_once else place[name]
    for name in reversed(result):
        readers = [place[s] for s in after[name]]
        if readers:
            place[name] = min(place[name], *readers)
    result = edges.by_place(result, place)
    return result if merged else _views_late(edges, result)


def _views_late(edges: _Edges, order: Sequence[str]) -> list[str]:
    """`order` with every view right before its first reader: it computes nothing, and would only be a use between."""
    due: dict[str, tuple[int, int]] = {name: (index, 0) for index, name in enumerate(order)}
    for name in reversed(order):
        readers = [due[successor] for successor in edges.after[name]]
        if readers and edges.graph[name].op in VIEWS:
            index, depth = min(readers)
            due[name] = (index, depth - 1)
    return sorted(order, key=due.__getitem__)


def _freeing(graph: Graph, order: Sequence[str]) -> set[str]:
    """Ops that are the last to read more bytes than twice what they make."""
    rank = {name: index for index, name in enumerate(order)}
    found = set()
    for name in order:
        node = graph[name]
        if shares_rows(node):  # it holds what it slices
            continue
        freed = 0
        for tensor in set(node.inputs):
            held = graph[tensor.node].op in EXTERNAL
            if not held and max(rank[use.node] for use in graph.uses(tensor)) == rank[name]:
                freed += graph.nbytes(tensor)
        if freed > 2 * sum(graph.nbytes(tensor) for tensor in graph.tensors(node)):
            found.add(name)
    return found


def _is_tiny(graph: Graph, name: str, tiny: float) -> bool:
    """Whether a node makes something, of known size, and all of it under `tiny` bytes: a shape, a constant."""
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(graph[name])]
    sizes = [spec.nbytes if spec else None for spec in specs]
    return bool(sizes) and None not in sizes and sum(size or 0 for size in sizes) < tiny
