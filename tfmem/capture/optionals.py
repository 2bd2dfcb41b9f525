"""Conditions whose gradient reads what a branch kept, for XLA, which has no kernel for Optionals.

    If -> y, Optional(a or b)    gradient: If(Optional), get      becomes      If -> y, a, b    If(a, b)

A branch wraps what its gradient reads. One Optional may hold a tensor of one type and size in one branch, and another
one in the other; an empty one fills up the rest. Here a condition returns a tensor for each type and size. The branch
that does not make one returns a `FakeParam` in its place, which is never read. TensorFlow itself traces conditions so
where XLA is asked for from the start. The same branch runs, and its numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.errors import GraphError
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph, TensorId
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import Captured, called_by, every_node, free_name
from tfmem.capture.inline import inline_captured

VALUE, NONE, GET = "OptionalFromValue", "OptionalNone", "OptionalGetValue"
OPTIONALS = frozenset({VALUE, NONE, GET})
CONDITIONS = frozenset({"If", "StatelessIf"})
_BRANCHES = ("then_branch", "else_branch")


class _UnknownError(Exception):
    """An Optional goes where it cannot be followed, or holds a tensor of unknown size."""


class _Content(NamedTuple):
    """The type and the sizes of a tensor in an Optional."""

    dtype: int
    sizes: tuple[int, ...]


class _Tensor(NamedTuple):
    """An output of a node in a scope, or an argument of the branch that the scope is."""

    scope: _Scope
    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index


@dataclass(eq=False)
class _Scope:
    """The nodes of a graph, or of a branch of a condition in one.

    Attributes:
        graph: their tensors' sizes, and the branches of their conditions.
        nodes: by name.
        library: the functions, by name.
        definition: of a branch; None for the graph.
        caller: what a branch belongs to: a scope, and the condition in it.
    """

    graph: Graph
    nodes: Mapping[str, NodeDef]
    library: Mapping[str, FunctionDef]
    definition: FunctionDef | None = None
    caller: tuple[_Scope, NodeDef] | None = None

    @cached_property
    def arguments(self) -> dict[str, int]:
        """The place of each, by its name."""
        given = self.definition.signature.input_arg if self.definition else ()
        return {each.name: place for place, each in enumerate(given)}

    @cached_property
    def results(self) -> list[_Tensor]:
        """What a branch returns."""
        if self.definition is None:
            return []
        return [self.tensor(self.definition.ret[each.name]) for each in self.definition.signature.output_arg]

    @cached_property
    def branches(self) -> dict[str, list[_Scope]]:
        """The branches of each condition, by its name.

        Raises:
            _UnknownError: TensorFlow does not infer sizes in one.
        """
        return {name: self._branches(node) for name, node in self.nodes.items() if node.op in CONDITIONS}

    @cached_property
    def _flat(self) -> dict[str, str]:
        names = serde.flat_names(self.definition, self.library) if self.definition else {}
        if names is None:
            raise _UnknownError
        return names

    def tensor(self, text: str) -> _Tensor:
        """What is written "node" or "node:1", and in a branch "node:output:1"."""
        name, _, place = self._flat.get(text, text).partition(":")
        return _Tensor(self, name, int(place or 0))

    def content(self, tensor: _Tensor) -> _Content:
        """The type and the sizes of a tensor that is no Optional.

        Raises:
            _UnknownError: a size is unknown.
        """
        spec = self.graph.specs.get(TensorId(tensor.node, tensor.index))
        if spec is None or spec.sizes is None:
            raise _UnknownError
        return _Content(tf.as_dtype(spec.dtype).as_datatype_enum, spec.sizes)

    def _branches(self, node: NodeDef) -> list[_Scope]:
        made = []
        for attribute in _BRANCHES:
            read = self.graph.functions.get((node.name, attribute))
            definition = self.library.get(_called(node, attribute))
            if read is None or definition is None:
                raise _UnknownError
            nodes = {each.name: each for each in definition.node_def}
            made.append(_Scope(read.graph, nodes, self.library, definition, (self, node)))
        return made


def without_optionals(captured: Captured) -> Captured | None:
    """`captured` with tensors in place of what conditions keep for their gradients; itself where they keep nothing.

    None where an Optional goes elsewhere, as into the lists of a loop, or holds a tensor of unknown size.
    """
    if not any(node.op in OPTIONALS for node in every_node(captured.graph_def)):
        return captured
    inlined = inline_captured(captured)
    given = inlined.graph_def
    try:
        graph = serde.from_graph_def(given, shaped_graph(inlined), functions=True)
        library = {each.signature.name: each for each in given.library.function}
        top = _Scope(graph, {node.name: node for node in given.node}, library)
        writer = _Writer(library)
        if any(writer.contents.is_optional(top.tensor(name)) for name in inlined.fetches):
            return None
        nodes = writer.nodes(top)
    except (_UnknownError, GraphError):
        return None
    graph_def = GraphDef(versions=given.versions, library=given.library, node=nodes)
    graph_def.library.function.extend(writer.functions)
    return replace(inlined, graph_def=graph_def)


class _Contents:
    """What Optionals may hold, whichever branches run."""

    def __init__(self) -> None:
        self._optional: dict[_Tensor, bool] = {}
        self._found: dict[_Tensor, tuple[_Content, ...]] = {}

    def is_optional(self, tensor: _Tensor) -> bool:
        """Whether a tensor is an Optional: it is made as one, or is what another one holds."""
        if tensor not in self._optional:
            node = tensor.scope.nodes.get(tensor.node)
            if node is not None and node.op == GET:
                found = any(map(self.is_optional, self._held(tensor.scope.tensor(node.input[0]))))
            else:
                found = (node is not None and node.op in OPTIONALS) or any(map(self.is_optional, _sources(tensor)))
            self._optional[tensor] = found
        return self._optional[tensor]

    def __call__(self, tensor: _Tensor) -> tuple[_Content, ...]:
        """All that an Optional may hold, each once; of an Optional in an Optional, what the inner one holds."""
        if tensor not in self._found:
            self._found[tensor] = tuple(dict.fromkeys(self._all(tensor)))
        return self._found[tensor]

    def _all(self, tensor: _Tensor) -> Iterable[_Content]:
        scope, node = tensor.scope, tensor.scope.nodes.get(tensor.node)
        if node is not None and node.op in (VALUE, GET):
            if sum(not name.startswith("^") for name in node.input) != 1:
                raise _UnknownError
            inner = scope.tensor(node.input[0])
            return self(inner) if self.is_optional(inner) else (scope.content(inner),)
        return (content for source in _sources(tensor) for content in self(source))

    def _held(self, tensor: _Tensor) -> list[_Tensor]:
        """The tensors that are put into an Optional, on any way to it."""
        node = tensor.scope.nodes.get(tensor.node)
        if node is not None and node.op == VALUE:
            return [tensor.scope.tensor(node.input[0])]
        if node is not None and node.op == GET:
            return [held for inner in self._held(tensor.scope.tensor(node.input[0])) for held in self._held(inner)]
        return [held for source in _sources(tensor) for held in self._held(source)]


def _sources(tensor: _Tensor) -> list[_Tensor]:
    """The tensors of which one is handed on as `tensor`; none where an op makes it."""
    scope, node = tensor.scope, tensor.scope.nodes.get(tensor.node)
    if node is None:
        if scope.caller is None or tensor.node not in scope.arguments:
            return []
        outer, condition = scope.caller
        return [outer.tensor(condition.input[1 + scope.arguments[tensor.node]])]
    if node.op == "Identity":
        return [scope.tensor(node.input[0])]
    if node.op in CONDITIONS:
        return [branch.results[tensor.index] for branch in scope.branches[node.name]]
    return []


class _Writer:
    """Writes nodes without Optionals, and the functions that they call.

    Attributes:
        contents: what Optionals hold.
        functions: the branches that were written.
    """

    def __init__(self, library: Mapping[str, FunctionDef]) -> None:
        """`library`: the functions of the graph, by name."""
        self.contents = _Contents()
        self.functions: list[FunctionDef] = []
        self._holding = _holding(library)

    def nodes(self, scope: _Scope) -> list[NodeDef]:
        """The nodes of a scope.

        Raises:
            _UnknownError: see `without_optionals`.
        """
        return [self._node(scope, node) for node in scope.nodes.values()]

    def _node(self, scope: _Scope, given: NodeDef) -> NodeDef:
        inputs = [name for name in given.input if not name.startswith("^")]
        waits = [name for name in given.input if name.startswith("^")]
        tensors = [scope.tensor(name) for name in inputs]
        if given.op in CONDITIONS:
            return self._condition(scope, given, tensors, inputs, waits)
        if self.contents.is_optional(_Tensor(scope, given.name, 0)) and given.op in {*OPTIONALS, "Identity"}:
            makers = [f"^{tensor.node}" for tensor in tensors if tensor.node in scope.nodes]
            return NodeDef(name=given.name, op="NoOp", input=[*makers, *waits], device=given.device)
        if given.op == GET:
            return self._taken_out(scope, given, tensors[0], waits)
        if any(map(self.contents.is_optional, tensors)) or not self._holding.isdisjoint(called_by([given])):
            raise _UnknownError
        node = NodeDef()
        node.CopyFrom(given)
        node.input[:] = [*(self._text(scope, name) for name in inputs), *waits]
        return node

    def _taken_out(self, scope: _Scope, given: NodeDef, optional: _Tensor, waits: Sequence[str]) -> NodeDef:
        """The tensor itself in place of what is taken out of an Optional."""
        types, shapes = given.attr["output_types"].list.type, given.attr["output_shapes"].list.shape
        if len(types) != 1 or shapes[0].unknown_rank or not self.contents.is_optional(optional):
            raise _UnknownError
        wanted = _Content(types[0], tuple(dim.size for dim in shapes[0].dim))
        slots = dict(zip(self.contents(optional), self._slots(optional), strict=True))
        if wanted not in slots:
            raise _UnknownError
        node = NodeDef(name=given.name, op="Identity", input=[slots[wanted], *waits], device=given.device)
        node.attr["T"].type = wanted.dtype
        return node

    def _slots(self, tensor: _Tensor) -> list[str]:
        """How the tensors are written that an Optional may hold, in the order of its contents."""
        scope, node = tensor.scope, tensor.scope.nodes.get(tensor.node)
        count = len(self.contents(tensor))
        if node is None:
            return [_slot(tensor.node, number) for number in range(count)]
        if node.op in CONDITIONS:
            first = self._place(scope, node, tensor.index)
            return [_written(scope, node.name, first + number) for number in range(count)]
        if node.op == NONE:
            return []
        inner = scope.tensor(node.input[0])
        return self._slots(inner) if self.contents.is_optional(inner) else [self._text(scope, node.input[0])]

    def _text(self, scope: _Scope, given: str) -> str:
        """How a tensor is written that is no Optional."""
        tensor = scope.tensor(given)
        node = scope.nodes.get(tensor.node)
        if node is not None and node.op in CONDITIONS:
            return _written(scope, node.name, self._place(scope, node, tensor.index))
        return f"{tensor.node}:output:0" if scope.definition and node is not None and node.op == GET else given

    def _place(self, scope: _Scope, condition: NodeDef, index: int) -> int:
        """Which output one is, once Optionals are tensors."""
        before = (_Tensor(scope, condition.name, place) for place in range(index))
        return sum(len(self.contents(each)) if self.contents.is_optional(each) else 1 for each in before)

    def _condition(
        self, scope: _Scope, given: NodeDef, tensors: Sequence[_Tensor], inputs: Sequence[str], waits: Sequence[str]
    ) -> NodeDef:
        """A condition, whose branches are written, too, if Optionals are in it."""
        node = NodeDef()
        node.CopyFrom(given)
        results = [_Tensor(scope, given.name, index) for index in range(len(given.attr["Tout"].list.type))]
        if len(given.attr["output_shapes"].list.shape) != len(results):
            raise _UnknownError
        for each in ("Tin", "Tout", "output_shapes"):
            node.attr[each].list.Clear()
        node.input[:] = [self._text(scope, inputs[0])]
        for text, tensor, dtype in zip(inputs[1:], tensors[1:], given.attr["Tin"].list.type, strict=True):
            kept = self.contents(tensor) if self.contents.is_optional(tensor) else None
            node.input.extend([self._text(scope, text)] if kept is None else self._slots(tensor))
            node.attr["Tin"].list.type.extend([dtype] if kept is None else [content.dtype for content in kept])
        node.input.extend(waits)
        out, shapes = node.attr["Tout"].list, node.attr["output_shapes"].list
        for index, tensor in enumerate(results):
            if self.contents.is_optional(tensor):
                out.type.extend(content.dtype for content in self.contents(tensor))
                shapes.shape.extend(tf.TensorShape(content.sizes).as_proto() for content in self.contents(tensor))
            else:
                out.type.append(given.attr["Tout"].list.type[index])
                shapes.shape.append(given.attr["output_shapes"].list.shape[index])
        for attribute, branch in zip(_BRANCHES, scope.branches[given.name], strict=True):
            if _called(given, attribute) in self._holding or any(map(self.contents.is_optional, tensors)):
                node.attr[attribute].func.name = self._branch(branch, tensors[1:], results)
        return node

    def _branch(self, branch: _Scope, given: Sequence[_Tensor], results: Sequence[_Tensor]) -> str:
        """The name of a new function, given and returning what the condition is given and returns now."""
        old = branch.definition
        assert old is not None
        new = FunctionDef(attr=old.attr, control_ret=old.control_ret, node_def=self.nodes(branch))
        new.signature.CopyFrom(old.signature)
        new.signature.name = f"{old.signature.name}_without_optionals_{len(self.functions)}"
        del new.signature.input_arg[:], new.signature.output_arg[:]
        for place, (argument, tensor) in enumerate(zip(old.signature.input_arg, given, strict=True)):
            if self.contents.is_optional(tensor):
                for number, content in enumerate(self.contents(tensor)):
                    new.signature.input_arg.add(name=_slot(argument.name, number), type=content.dtype)
            else:
                if place in old.arg_attr:
                    new.arg_attr[len(new.signature.input_arg)].CopyFrom(old.arg_attr[place])
                new.signature.input_arg.append(argument)
        for result, own, tensor in zip(old.signature.output_arg, branch.results, results, strict=True):
            if not self.contents.is_optional(tensor):
                new.signature.output_arg.append(result)
                new.ret[result.name] = self._text(branch, old.ret[result.name])
                continue
            slots = dict(zip(self.contents(own), self._slots(own), strict=True))
            for number, content in enumerate(self.contents(tensor)):
                name = _slot(result.name, number)
                new.signature.output_arg.add(name=name, type=content.dtype)
                new.ret[name] = slots[content] if content in slots else _unread(new, content)
        self.functions.append(new)
        return str(new.signature.name)


def _called(condition: NodeDef, attribute: str) -> str:
    return str(condition.attr[attribute].func.name)


def _slot(name: str, number: int) -> str:
    """The name of what takes the place of an Optional that is an argument, or a result."""
    return f"{name}_kept_{number}"


def _written(scope: _Scope, node: str, place: int) -> str:
    """How the output of a condition is written."""
    return f"{node}:output:{place}" if scope.definition else f"{node}:{place}" if place else node


def _unread(function: FunctionDef, content: _Content) -> str:
    """A new node in place of what only the other branch makes."""
    taken = {each.name for each in (*function.node_def, *function.signature.input_arg)}
    made = function.node_def.add(name=free_name("tfmem_unread", taken), op="FakeParam")
    made.attr["dtype"].type = content.dtype
    made.attr["shape"].shape.CopyFrom(tf.TensorShape(content.sizes).as_proto())
    return f"{made.name}:output:0"


def _holding(library: Mapping[str, FunctionDef]) -> set[str]:
    """Names of the functions in which there are Optionals, at any depth."""
    found = {name for name, each in library.items() if any(node.op in OPTIONALS for node in each.node_def)}
    while True:
        more = {name for name, each in library.items() if not found.isdisjoint(called_by(each.node_def))}
        if more <= found:
            return found
        found |= more
