"""The graph that passes read and edit: nodes, edges, and the edits.

    Graph
      nodes: name -> Node            one op: type, device, inputs, control inputs, attributes
      specs: TensorId -> TensorSpec  dtype and static shape of each output, where inference knows them

Nodes are edited through the methods of `Graph` only, so that the use lists are always true. Attribute values read from
a GraphDef stay opaque; values that passes write are plain Python (see `AttrValue`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

from graph_passes.errors import GraphError

_MOVES = ("MemOpOffload", "MemOpRelease", "MemOpPrefetch", "MemOpAwait")
MEMORY_OPS = frozenset({*_MOVES, *(f"{op}Lists" for op in _MOVES), "MemOpProbe", "MemOpPreaccess"})


class TensorId(NamedTuple):
    """One output of one node; prints as TensorFlow writes it, `node:0`."""

    node: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which no caller needs of a tensor

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True)
class DataType:
    """A type attribute, such as `DataType("float32")`."""

    name: str


@dataclass(frozen=True)
class Shape:
    """A shape attribute; `None` for an unknown rank or dimension."""

    dims: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Literal:
    """A tensor attribute: the value of a Const. `values` are flat, in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[bool | int | float, ...]


@dataclass(frozen=True)
class Code:
    """A function attribute: the function that returns `data`, the code of a GPU kernel. It goes into the library of the
    graph with the node, once however many nodes name it."""

    data: bytes


Scalar: TypeAlias = bool | int | float | str | bytes | DataType | Code
AttrValue: TypeAlias = Scalar | Shape | Literal | tuple[Scalar, ...] | tuple[Shape, ...]


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists: dtype name, bytes an element takes, static shape.

    `behind` is what a resource stands for: the spec of the variable's value.
    """

    dtype: str
    itemsize: int
    shape: tuple[int | None, ...] | None
    behind: TensorSpec | None = None

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of the tensor's buffer, or None while a dimension is unknown."""
        return None if self.sizes is None else prod(self.sizes) * self.itemsize

    @cached_property
    def sizes(self) -> tuple[int, ...] | None:
        """The static shape, or None while a dimension is unknown."""
        if self.shape is None or None in self.shape:
            return None
        return tuple(dim for dim in self.shape if dim is not None)


class Use(NamedTuple):
    """One place that reads a tensor: data input `index` of `node`."""

    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index


@dataclass(slots=True)
class Node:
    """One op. `inputs` are data inputs in order; `control` are names of nodes that run before it."""

    name: str
    op: str
    inputs: list[TensorId] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    device: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 0
    stateful: bool = False

    def copy(self) -> Node:
        """An equal node that can be edited on its own; attribute values are shared."""
        own = list(self.inputs), list(self.control), self.device, dict(self.attrs)
        return Node(self.name, self.op, *own, self.outputs, self.stateful)


class Editor(Protocol):
    """The edits a pass may make: of a `Graph`, or of a live `tf.Graph`, by the same calls."""

    def insert(
        self,
        name: str,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, AttrValue | Any],
        device: str = "",
        control: Sequence[str] = (),
        outputs: int = 1,
    ) -> str:
        """Add a node with so many outputs that runs after `control`; returns its final, unique name."""

    def rewire(self, node: str, index: int, source: TensorId) -> None:
        """Make data input `index` of `node` read `source`."""

    def add_control(self, node: str, after: str) -> None:
        """Make `node` run after the node `after`."""

    def remove_control(self, node: str, after: str) -> None:
        """Let `node` no longer wait for the node `after`, unless it reads it."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a node calls, read as a separate graph.

    Attributes:
        graph: its body; arguments are nodes without inputs.
        arguments: the nodes that stand for its arguments, in order.
        results: what it returns, in order.
        attrs: its attributes.
    """

    graph: Graph
    arguments: tuple[str, ...]
    results: tuple[TensorId, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


class Graph:
    """A dataflow graph with use lists. Reading a fact costs the same at any size.

    Attributes:
        nodes: by name.
        specs: dtype and static shape of each tensor.
        constants: values of small Const nodes, by name.
        functions: bodies that nodes call, by node and attribute (`("loop", "body")`), with the shapes that hold there.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        specs: Mapping[TensorId, TensorSpec] | None = None,
        constants: Mapping[str, npt.NDArray[Any]] | None = None,
        functions: Mapping[tuple[str, str], Function] | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.specs: dict[TensorId, TensorSpec] = dict(specs or {})
        self.constants: dict[str, npt.NDArray[Any]] = dict(constants or {})
        self.functions: dict[tuple[str, str], Function] = dict(functions or {})
        self._uses: dict[tuple[str, int], list[Use]] = {}  # by `TensorId`
        self._controlled: dict[str, list[str]] = {}
        for node in nodes:
            if node.name in self.nodes:
                raise GraphError(f"two nodes are called '{node.name}'; names must be unique")
            self.nodes[node.name] = node
        for node in self.nodes.values():
            for index, tensor in enumerate(node.inputs):
                self._require(tensor.node, node.name)
                self._uses.setdefault(tensor, []).append(Use(node.name, index))
            for before in node.control:
                self._require(before, node.name)
                self._controlled.setdefault(before, []).append(node.name)

    def copy(self) -> Graph:
        """An equal graph that can be edited on its own; attribute values are shared."""
        return Graph((node.copy() for node in self), self.specs, self.constants, self.functions)

    def working_copy(self) -> WorkingCopy:
        """A copy that a plan makes to think on. It belongs to the plan: no pass but that one sees it."""
        return WorkingCopy((node.copy() for node in self), self.specs, self.constants, self.functions)

    def _require(self, name: str, reader: str) -> None:
        if name not in self.nodes:
            raise GraphError(f"node '{reader}' reads '{name}', which is not in the graph")

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Node:
        try:
            return self.nodes[name]
        except KeyError:
            raise GraphError(f"the graph has no node '{name}'") from None

    def uses(self, tensor: TensorId) -> Sequence[Use]:
        """Every data input that reads `tensor`, in no particular order."""
        return self._uses.get(tensor, ())

    def tensors(self, node: Node) -> Iterator[TensorId]:
        """The outputs of `node`."""
        return iter([TensorId(node.name, index) for index in range(node.outputs)])

    def nbytes(self, tensor: TensorId) -> int:
        """Bytes of a tensor's buffer; 0 where they are not known."""
        spec = self.specs.get(tensor)
        return spec.nbytes or 0 if spec is not None else 0

    def sizes(self, tensor: TensorId) -> tuple[int, ...] | None:
        """The static shape of a tensor; None unless all of it is known."""
        spec = self.specs.get(tensor)
        return spec.sizes if spec is not None else None

    def predecessors(self, node: Node) -> Iterator[str]:
        """Names of the nodes that `node` waits for, data inputs first; repeats are possible."""
        return iter([*[tensor.node for tensor in node.inputs], *node.control])

    def successors(self, node: Node) -> Iterator[str]:
        """Names of the nodes that wait for `node`; repeats are possible."""
        return iter([*self.readers(node), *self._controlled.get(node.name, ())])

    def readers(self, node: Node) -> Iterator[str]:
        """Names of the nodes that read an output of `node`; repeats are possible."""
        uses, name = self._uses, node.name
        return iter([use.node for index in range(node.outputs) for use in uses.get((name, index), ())])

    def reached(self, names: Iterable[str], step: Callable[[Node], Iterable[str]]) -> set[str]:
        """These nodes and all that `step` (`predecessors`, say) leads to from them."""
        found = {self[name].name for name in names}
        pending = list(found)
        while pending:
            for name in step(self[pending.pop()]):
                if name not in found:
                    found.add(name)
                    pending.append(name)
        return found

    def waiting(self, node: Node) -> Sequence[str]:
        """Names of the nodes that have a control edge from `node`."""
        return self._controlled.get(node.name, ())

    def insert(
        self,
        name: str,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, AttrValue | Any],
        device: str = "",
        control: Sequence[str] = (),
        outputs: int = 1,
    ) -> str:
        """See `Editor.insert`."""
        unique, suffix = name, 1
        while unique in self.nodes:
            unique, suffix = f"{name}_{suffix}", suffix + 1
        for tensor in inputs:
            self._require(tensor.node, unique)
        for before in control:
            self._require(before, unique)
        node = Node(unique, op, list(inputs), list(control), device, dict(attrs), outputs, op in MEMORY_OPS)
        self.nodes[unique] = node
        for index, tensor in enumerate(inputs):
            self._uses.setdefault(tensor, []).append(Use(unique, index))
        for before in control:
            self._controlled.setdefault(before, []).append(unique)
        return unique

    def rewire(self, node: str, index: int, source: TensorId) -> None:
        """See `Editor.rewire`."""
        reader = self[node]
        self._require(source.node, node)
        old, use = reader.inputs[index], Use(node, index)
        self._uses[old].remove(use)
        reader.inputs[index] = source
        self._uses.setdefault(source, []).append(use)

    def add_control(self, node: str, after: str) -> None:
        """See `Editor.add_control`; an edge that exists already is not repeated."""
        waiting = self[node]
        self._require(after, node)
        if after not in waiting.control:
            waiting.control.append(after)
            self._controlled.setdefault(after, []).append(node)

    def remove_control(self, node: str, after: str) -> None:
        """See `Editor.remove_control`."""
        waiting = self[node]
        if after in waiting.control:
            waiting.control.remove(after)
            self._controlled[after].remove(node)

    def remove(self, names: Collection[str]) -> None:
        """Take nodes out, with all edges to them; only they themselves may read their outputs.

        Raises:
            GraphError: another node reads one of them.
        """
        gone = set(names)
        for name in gone:
            for tensor in self.tensors(self[name]):
                for use in self.uses(tensor):
                    if use.node not in gone:
                        raise GraphError(f"cannot remove node '{name}': its output is still used by '{use.node}'")
        for name in gone:
            node = self.nodes.pop(name)
            for index, tensor in enumerate(node.inputs):
                self._uses[tensor].remove(Use(name, index))
            for before in node.control:
                self._controlled[before].remove(name)
            for tensor in self.tensors(node):
                self.specs.pop(tensor, None)
            self.constants.pop(name, None)
            for attribute in [key for owner, key in self.functions if owner == name]:
                del self.functions[name, attribute]
        for name in gone:
            for waiting in self._controlled.pop(name, ()):
                if waiting in self.nodes:
                    self.nodes[waiting].control.remove(name)


class WorkingCopy(Graph):
    """A graph that a plan made and that nothing else may edit. A plan's rewrites may be made of it."""


def integer(value: Any) -> int:
    """An integer attribute, read from a GraphDef or written by a pass."""
    return value if isinstance(value, int) else int(value.i)


def integers(value: Any) -> tuple[int, ...]:
    """A list of integers as an attribute, read from a GraphDef or written by a pass; empty where there is none."""
    return tuple(value.list.i if hasattr(value, "list") else value or ())


def boolean(value: Any) -> bool:
    """A boolean attribute, read from a GraphDef or written by a pass; False where there is none."""
    return bool(value) if value is None or isinstance(value, bool) else bool(value.b)


def whole(value: Any) -> int:
    """An integer attribute, read from a GraphDef or written by a pass; 0 where there is none."""
    return value or 0 if value is None or isinstance(value, int) else int(value.i)


def floating(value: Any) -> float:
    """A float attribute, read from a GraphDef or written by a pass."""
    return value if isinstance(value, float) else float(value.f)


def text(value: Any) -> str:
    """A text attribute, read from a GraphDef or written by a pass; empty where there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return str(value.s.decode(errors="backslashreplace"))


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts as an attribute, read from a GraphDef or written by a pass; empty where there is none."""
    items = value.list.s if hasattr(value, "list") else value or ()
    return tuple(item.decode(errors="backslashreplace") if isinstance(item, bytes) else str(item) for item in items)


def parse_input(text: str) -> tuple[TensorId, bool]:
    """Read a NodeDef input string; returns the tensor and whether it is a control input."""
    if text.startswith("^"):
        return TensorId(text[1:]), True
    name, _, index = text.partition(":")
    return TensorId(name, int(index) if index else 0), False
