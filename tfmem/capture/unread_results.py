"""Dead code elimination in conditions and loops: it drops results that no op reads, the ops that only these results
need, and the arguments that only these ops read.

TensorFlow lowers `If`, `Case` and `While` to single ops before its Grappler runs, which then prunes. In tfmem
they stay single ops, and a call computes all results of a function. So this module prunes the functions:

    a, b = cond(p, f, g, x, y)           no op reads b, and the branches compute a from x alone:
    a    = cond(p, f_read, g_read, x)

A variable of a loop stays if an op reads its result, if the condition reads it, or if another that stays needs it. An
op with an effect stays with all that it reads. Random ops whose numbers no op reads go, as in TensorFlow.

Relies on how a FunctionDef writes tensors: an argument by its name, a result of an If or While as "cond:output:1".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from tfmem.capture.captured import (
    BODIES,
    RANDOM,
    READERS,
    Captured,
    free_name,
    functions_in,
    is_stateful,
    op_name,
)

_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LOOPS = frozenset({"While", "StatelessWhile"})
# about arguments, by their places; only TensorFlow's tracing, which is over, and its importer make use of them
_BY_PLACE = ("_read_only_resource_inputs", "_input_shapes", "_output_shapes")


def without_unread(captured: Captured) -> Captured:
    """`captured` without unread results of its conditions and loops, at any depth; itself if ops read all of them.

    Names of feeds, fetches and control fetches stay, and so do all results of an op that is fetched itself.
    """
    if not any(node.op in _BRANCHES | _LOOPS for node in captured.graph_def.node):
        return captured
    pruning = _Pruning(captured)
    fetched = set(map(op_name, captured.fetches))
    roots = {*fetched, *captured.control_fetches, *map(op_name, captured.feeds)}
    left = pruning.pruned(captured.graph_def.node, roots, (), whole=fetched)
    if not left.changed:
        return captured
    source = captured.graph_def
    graph_def = GraphDef(versions=source.versions, node=left.nodes, library=source.library)
    graph_def.library.function.extend(pruning.made.values())
    traced = {function.signature.name: key[0] for key, function in pruning.made.items()}
    known = {new: captured.traced[old] for new, old in traced.items() if old in captured.traced}
    return replace(captured, graph_def=graph_def, traced={**captured.traced, **known})


@dataclass(frozen=True)
class _Left:
    """What is left of a graph or body.

    Attributes:
        nodes: copies.
        results: the tensors that it returns.
        arguments: names of what it reads that is none of its nodes.
        changed: whether a condition or loop in it became another.
    """

    nodes: list[NodeDef]
    results: list[str]
    arguments: set[str]
    changed: bool


class _Pruning:
    """
    Attributes:
        made: the functions that take the places of others, by the other's name, its arguments and its results.
    """

    def __init__(self, captured: Captured) -> None:
        self._library = {function.signature.name: function for function in captured.graph_def.library.function}
        self._taken = set(self._library)
        self.made: dict[tuple[str, tuple[int, ...], tuple[int, ...]], FunctionDef] = {}
        # Without it, each question about a loop would compute again what the loops inside it need.
        self._bodies: dict[tuple[str, tuple[int, ...]], _Left] = {}

    def pruned(
        self, nodes: Iterable[NodeDef], roots: Collection[str], results: Sequence[str], whole: Collection[str] = ()
    ) -> _Left:
        """The nodes that `roots` (names) and `results` (tensors) need; of those named in `whole` all results do."""
        copies = GraphDef(node=nodes).node
        results, changed = list(results), False
        while True:
            by_name = {node.name: node for node in copies}
            read, arguments = _read(by_name, roots, results)
            copies = [node for node in copies if node.name in read]
            places = {
                node.name: self._narrowed(node, sorted(read[node.name])) for node in copies if node.name not in whole
            }
            moved = {name: place for name, place in places.items() if place is not None}
            if not moved:
                return _Left(list(copies), results, arguments, changed)
            changed = True
            for node in copies:
                node.input[:] = [_moved(text, moved) for text in node.input]
            results = [_moved(text, moved) for text in results]

    def _narrowed(self, node: NodeDef, read: list[int]) -> dict[int, int] | None:
        """Drop the unread results of `node`; the new places of the others by the old ones, None if `node` is unchanged.

        Args:
            node: is edited.
            read: places of its results that other nodes read.
        """
        if node.op not in _BRANCHES | _LOOPS:
            return None
        called = [function for attribute in BODIES[node.op] for function in functions_in(node.attr[attribute])]
        functions = [self._library.get(each.name) for each in called]
        waits = [text for text in node.input if text.startswith("^")]
        given = [text for text in node.input if not text.startswith("^")]
        before = 1 if node.op in _BRANCHES else 0  # the condition's own input
        types = node.attr["Tout" if node.op in _BRANCHES else "T"].list.type
        counts = [1, len(types)] if node.op in _LOOPS else [len(types)] * len(functions)
        fits = all(_takes(function, len(given) - before) for function in functions)
        if not fits or not all(map(_returns, functions, counts)) or max(read, default=-1) >= len(types):
            return None
        known = [function for function in functions if function is not None]
        if node.op in _LOOPS:
            arguments = kept = self._variables(known[0], known[1], set(read))
            results = [(0,), kept]
        else:
            kept = tuple(read)
            results = [kept] * len(known)
            used = {place for function in known for place in self._used(function, kept)}
            arguments = tuple(sorted(used))
        names = [self._function(*each) for each in zip(known, [arguments] * len(known), results, strict=True)]
        if names == [each.name for each in called]:
            return None
        for each, name in zip(called, names, strict=True):
            each.name = name
        node.input[:] = [*given[:before], *(given[before + place] for place in arguments), *waits]
        _keep(node, ("Tin",), arguments)
        _keep(node, ("Tout", "T", "output_shapes"), kept)
        for key in _BY_PLACE:
            node.attr.pop(key, None)
        return {old: new for new, old in enumerate(kept)}

    def _variables(self, condition: FunctionDef, body: FunctionDef, read: set[int]) -> tuple[int, ...]:
        """Places of the loop variables that are read, and of those that they are computed from."""
        needed = read | self._used(condition, (0,)) | self._used(body, ())
        while True:
            more = needed | self._used(body, sorted(needed))
            if more == needed:
                return tuple(sorted(needed))
            needed = more

    def _used(self, function: FunctionDef, results: Sequence[int]) -> set[int]:
        """Places of the arguments that these results, and effects, are computed from."""
        left = self._body(function, results)
        return {place for place, each in enumerate(function.signature.input_arg) if each.name in left.arguments}

    def _body(self, function: FunctionDef, results: Sequence[int]) -> _Left:
        """What these results of `function` and its effects need; callers do not edit it."""
        key = function.signature.name, tuple(results)
        if key not in self._bodies:
            returned = [function.ret[function.signature.output_arg[place].name] for place in results]
            effects = {node.name for node in function.node_def if self._has_effect(node)}
            self._bodies[key] = self.pruned(function.node_def, {*effects, *function.control_ret.values()}, returned)
        return self._bodies[key]

    def _has_effect(self, node: NodeDef) -> bool:
        called = self._library.get(node.op)
        stateful = is_stateful(node.op) if called is None else called.signature.is_stateful
        return stateful and node.op not in READERS | RANDOM

    def _function(self, function: FunctionDef, arguments: tuple[int, ...], results: tuple[int, ...]) -> str:
        """The name of the function that replaces `function`, with these of its arguments and results; `function`'s
        name if it stays unchanged."""
        signature, key = function.signature, (function.signature.name, arguments, results)
        if key in self.made:
            return self.made[key].signature.name
        left = self._body(function, results)
        if not left.changed and (len(arguments), len(results)) == (len(signature.input_arg), len(signature.output_arg)):
            return str(signature.name)
        made = FunctionDef()
        made.CopyFrom(function)
        made.signature.name = free_name(f"{signature.name}_read", self._taken)
        for field in ("node_def", "ret", "arg_attr", "resource_arg_unique_id"):
            made.ClearField(field)
        made.node_def.extend(left.nodes)
        _choose(made.signature.input_arg, arguments)
        _choose(made.signature.output_arg, results)
        for output, text in zip(made.signature.output_arg, left.results, strict=True):
            made.ret[output.name] = text
        for new, old in enumerate(arguments):
            if old in function.arg_attr:
                made.arg_attr[new].CopyFrom(function.arg_attr[old])
            if old in function.resource_arg_unique_id:
                made.resource_arg_unique_id[new] = function.resource_arg_unique_id[old]
        for name in _BY_PLACE:
            made.attr.pop(name, None)
        self.made[key] = self._library[made.signature.name] = made
        return str(made.signature.name)


def _read(
    nodes: Mapping[str, NodeDef], roots: Iterable[str], results: Iterable[str]
) -> tuple[dict[str, set[int]], set[str]]:
    """The nodes that run, each with the places of its results that are read; and the names read that are no node."""
    found: dict[str, set[int]] = {}
    others: set[str] = set()
    waiting = [f"^{name}" for name in roots] + list(results)
    while waiting:
        text = waiting.pop()
        name = op_name(text)
        if name not in nodes:
            others.add(name)
            continue
        if name not in found:
            found[name] = set()
            waiting += nodes[name].input
        if not text.startswith("^"):
            found[name].add(_place(text))
    return found, others


def _place(text: str) -> int:
    return int(text.rpartition(":")[2]) if ":" in text else 0


def _moved(text: str, moved: Mapping[str, Mapping[int, int]]) -> str:
    """A tensor of a node whose results are at other places now."""
    places = moved.get(op_name(text))
    if places is None or ":" not in text:  # what waits for the node, and a first result, which stays first
        return text
    return f"{text.rpartition(':')[0]}:{places[_place(text)]}"


def _takes(function: FunctionDef | None, count: int) -> bool:
    return function is not None and len(function.signature.input_arg) == count


def _returns(function: FunctionDef | None, count: int) -> bool:
    """Whether a function has so many results, and says what they are."""
    outputs = function.signature.output_arg if function is not None else ()
    return function is not None and len(outputs) == count and all(output.name in function.ret for output in outputs)


def _keep(node: NodeDef, attributes: Iterable[str], places: Sequence[int]) -> None:
    """Keep the items at `places` of lists that have an item for each argument or result."""
    for name in attributes:
        if name in node.attr:
            items = node.attr[name].list
            _choose(items.shape if name == "output_shapes" else items.type, places)


def _choose(items, places: Sequence[int]) -> None:  # type: ignore[no-untyped-def]
    """Keep the items at `places` of a repeated field; a list of shapes may be missing as a whole."""
    kept = [items[place] for place in places] if len(items) > max(places, default=-1) else []
    copies = [type(item).FromString(item.SerializeToString()) if hasattr(item, "CopyFrom") else item for item in kept]
    del items[:]
    items.extend(copies)
