"""Recurrences that are written out step by step and stay so, for the report: found by what makes them recurrences.

That is a weight which is multiplied again and again, each time with something that the product before it went into;
and so is every other weight in between. Names, slices and the form of a step do not matter. Layers that only share a
weight are no recurrence, for no product goes into another; nor are a forward and a backward pass, which takes weights
transposed; nor layers of a graph network, which share the adjacency matrix, but not their weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from custom_ops.ordering import topological_order
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import FORWARD_CONVOLUTIONS, MATRIX_PRODUCTS
from graph_passes.passes.recurrent.match import Unmatched
from graph_passes.refusals import Reason, Refusal

LEAST = 2  # steps
PRODUCTS = MATRIX_PRODUCTS | FORWARD_CONVOLUTIONS
MODES = ("transpose_a", "transpose_b", "adj_x", "adj_y", "equation")

# Ops that give a weight, or a part of it, in another form.
FORMS = frozenset({
    "Identity", "ReadVariableOp", "Cast", "StridedSlice", "Slice", "Split", "SplitV", "Transpose", "Reshape",
    "ExpandDims", "Squeeze", "ConcatV2", "Pack", "Unpack", "EnsureShape", "StopGradient",
})  # fmt: skip
_DEPTH = 12  # of forms of one weight


class Refused(NamedTuple):
    """Steps that were recognised, and why no loop is made of them."""

    nodes: frozenset[str]
    unpack: str
    reason: Refusal


class _Use(NamedTuple):
    """How a product reads a weight: its number, at which input, and how the product takes its inputs."""

    weight: int
    place: int
    mode: tuple[str, ...]


@dataclass(frozen=True)
class _Chain:
    """Products that use one weight alike and go into each other, in order; what the first of them went into."""

    use: _Use
    products: tuple[str, ...]
    steps: int
    behind: frozenset[str]


def repeated(
    graph: Graph,
    keep: Collection[str] = (),
    refused: Sequence[Refused] = (),
    known: Collection[str] = (),
    in_place: bool = False,
) -> list[Unmatched]:
    """The recurrences in `graph` that are written out, one entry for each.

    Args:
        graph: the graph; those in bodies of its functions are found, too.
        keep: names of nodes that are fetched.
        refused: what `roll_up` recognised and left.
        known: nodes of recurrences that are reported already, or replaced.
        in_place: the graph is edited in place, where no loop is made of steps.
    """
    otherwise = Reason.UNROLLED_IN_PLACE() if in_place else Reason.UNROLLED()
    found = [*_within(graph, keep, refused, known, otherwise)]
    for (caller, _), function in graph.functions.items():
        if caller not in known:
            results = {tensor.node for tensor in function.results}
            found += _within(function.graph, results, (), known, otherwise)
    return found


def _within(
    graph: Graph, keep: Collection[str], refused: Sequence[Refused], known: Collection[str], otherwise: Refusal
) -> Iterator[Unmatched]:
    numbers: dict[object, int] = {}
    multiplying = (node for node in graph if node.op in PRODUCTS and node.name not in known)
    uses = {node.name: _uses(graph, node, numbers) for node in multiplying}
    chains = _chains(graph, uses)
    said: set[str] = set()
    for part in _joined(_firsts(chains)):
        products = {product for chain in part for product in chain.products}
        said |= products
        recognised = next((each.reason for each in refused if each.nodes & products), None)
        weights = {chain.use.weight for chain in part}
        transposed = [
            name for name, found in uses.items() if name not in products and weights & {u.weight for u in found}
        ]
        first = graph[part[0].products[0]]
        if first.op in FORWARD_CONVOLUTIONS:
            why = Reason.UNROLLED_CONVOLUTION.of(first)
        elif transposed and needed(graph, keep).isdisjoint(transposed):
            why = Reason.UNROLLED_IDLE()
        elif recognised is not None:
            why = (Reason.UNROLLED_TRAINED_BECAUSE if transposed else Reason.UNROLLED_BECAUSE)(because=recognised)
        else:
            why = Reason.UNROLLED_TRAINED() if transposed else otherwise
        yield Unmatched(first.name, f"unrolled, {part[0].steps} steps", why)
    for each in refused:
        if not each.nodes & said and not each.nodes & set(known):
            yield Unmatched(each.unpack, "unrolled", Reason.UNROLLED_BECAUSE(because=each.reason))


def _uses(graph: Graph, node: Node, numbers: dict[object, int]) -> list[_Use]:
    """The weights that a product reads."""
    mode = (node.op, *(str(node.attrs.get(key)) for key in MODES))
    found = ((_number(graph, tensor, numbers, _DEPTH), place) for place, tensor in enumerate(node.inputs[:2]))
    return [_Use(number, place, mode) for number, place in found if number is not None]


def _number(graph: Graph, tensor: TensorId, numbers: dict[object, int], depth: int) -> int | None:
    """Equal for tensors that are the same form of the same weight, read once or several times; None if it is none."""
    node = graph[tensor.node]
    value = graph.constants.get(node.name)
    key: object = tensor
    if value is not None:
        key = (value.dtype.str, value.shape, value.tobytes())
    elif node.inputs:
        if node.op not in FORMS or not depth:
            return None
        operands = [_number(graph, each, numbers, depth - 1) for each in node.inputs]
        if None in operands:
            return None
        key = ("" if node.op in ("Identity", "ReadVariableOp") else node.op, tensor.index, *operands)
    return numbers.setdefault(key, len(numbers))


def _chains(graph: Graph, uses: Mapping[str, Sequence[_Use]]) -> list[_Chain]:
    """All chains, the one that begins first first."""
    groups: dict[_Use, list[str]] = {}
    for name, found in uses.items():
        for use in found:
            groups.setdefault(use, []).append(name)
    groups = {use: names for use, names in groups.items() if len(names) >= LEAST}
    order = _order(graph) if groups else []
    chains = [_chain(graph, order, use, names) for use, names in groups.items()]
    chains = [chain for chain in chains if chain.steps >= LEAST]
    place = {name: position for position, name in enumerate(order)}
    chains.sort(key=lambda chain: place[chain.products[0]])
    again = {chain.use for chain in chains}
    return [chain for chain in chains if _is_recurrence(graph, chain, uses, again)]


def _chain(graph: Graph, order: Sequence[str], use: _Use, names: Sequence[str]) -> _Chain:
    products = set(names)
    depth: dict[str, int] = {}  # how many of the products a node needs, one after the other
    for name in order:
        before = max((depth.get(tensor.node, 0) for tensor in graph[name].inputs), default=0)
        if before or name in products:
            depth[name] = before + (name in products)
    ordered = tuple(sorted((name for name in names if name in depth), key=depth.__getitem__))
    behind = frozenset(name for name, count in depth.items() if count > (name in products))
    return _Chain(use, ordered, depth[ordered[-1]] if ordered else 0, behind)


def _is_recurrence(graph: Graph, chain: _Chain, uses: Mapping[str, Sequence[_Use]], again: Collection[_Use]) -> bool:
    """Whether each weight between the first product and the last is used again and again, too, and in one way.

    Where there are two steps, each has to read something that the other does not; a layer applied twice does not.
    """
    between = graph.reached([chain.products[-1]], lambda node: (tensor.node for tensor in node.inputs)) & (
        chain.behind | {chain.products[-1]}
    )
    found = {use for name in between for use in uses.get(name, ())} | {chain.use}
    if not found <= set(again) or len({(use.weight, use.place) for use in found}) < len(found):
        return False
    inside = {*chain.products, *chain.behind}
    read = (tensor for name in between for tensor in graph[name].inputs if tensor.node not in inside)
    return chain.steps > LEAST or any(_number(graph, tensor, {}, _DEPTH) is None for tensor in read)


def _firsts(chains: Sequence[_Chain]) -> list[_Chain]:
    """The first chain of each weight; others are of its gradient."""
    found: dict[int, _Chain] = {}
    for chain in chains:
        found.setdefault(chain.use.weight, chain)
    return list(found.values())


def _joined(chains: Sequence[_Chain]) -> list[list[_Chain]]:
    """The chains in groups: chains that go into each other belong together, since a step may have several products."""
    parts = [[chain] for chain in chains]
    for one, other in itertools.combinations(chains, 2):
        if not one.behind.isdisjoint(other.products) and not other.behind.isdisjoint(one.products):
            first, second = (next(part for part in parts if chain in part) for chain in (one, other))
            if first is not second:
                first += second
                parts.remove(second)
    return parts


def needed(graph: Graph, keep: Collection[str]) -> set[str]:
    """The nodes that serve what is fetched, or has an effect."""
    ends = {node.name for node in graph if node.stateful and not node.op.startswith("ReadVariable")}
    return graph.reached({*ends, *(name for name in keep if name in graph.nodes)}, graph.predecessors)


def _order(graph: Graph) -> list[str]:
    """Nodes behind what they read, without the edges by which a lowered loop starts its next iteration."""
    waiting = {node.name: len(_before(graph, node)) for node in graph}
    earliest = itertools.count()

    def after(name: str) -> Iterable[str]:
        node = graph[name]
        return () if node.op == "NextIteration" else dict.fromkeys(graph.readers(node))

    return topological_order(waiting, after, lambda _: next(earliest))


def _before(graph: Graph, node: Node) -> set[str]:
    return {tensor.node for tensor in node.inputs if graph[tensor.node].op != "NextIteration"}
