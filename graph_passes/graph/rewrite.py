"""What a pass does to a graph, as data, and the one place that carries it out.

    Rewrite
      nodes: NewNode ...                     what is inserted; each reads the graph, or nodes before it
      rewired: old tensor -> new tensor      every reader of the old one will read the new one
      inputs: (node, index) -> new tensor    this input alone will
      order: (node, before)                  control edges
      replaced: node names                   dead once all that is done

Example, `y = relu(x)` for a reader `z`, replaced by one op of tfmem's: `nodes` holds the new op, which reads `x`,
`rewired` leads from `y:0` to its output, `replaced` is `y`, and `successor` the new op, for whom everybody waits who
waited for `y`.

A rewrite is complete: every new node is in it, with the name that it will have. So it can be printed, compared and
evaluated without a graph, and applying it takes no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from graph_passes.graph.ir import AttrValue, DataType, Editor, Graph, TensorId, Use


@dataclass(frozen=True)
class NewNode:
    """A plain TensorFlow op to insert.

    Attributes:
        name: unique in the graph and among all rewrites that are applied together (see `Names`).
        op: the op's type.
        inputs: tensors of the graph, or of new nodes that come earlier.
        attrs: its attributes; values are plain Python (`ir.AttrValue`), or copied from another node unread.
        device: as TensorFlow writes it; "" lets TensorFlow place the op.
        control: names of nodes that run before it.
        outputs: how many outputs it has.
    """

    name: str
    op: str
    inputs: tuple[TensorId, ...] = ()
    attrs: Mapping[str, AttrValue | Any] = field(default_factory=dict)
    device: str = ""
    control: tuple[str, ...] = ()
    outputs: int = 1


class Inserted(Protocol):
    """What is known of anything that becomes a node: its name, and what it will read."""

    @property
    def name(self) -> str:
        """Of the node."""

    @property
    def inputs(self) -> tuple[TensorId, ...]:
        """As `NewNode` has them."""


class Names:
    """Names that no node of a graph has yet, nor any other new node."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._taken: set[str] = set()

    def fresh(self, wanted: str) -> str:
        """`wanted`, or with a number behind."""
        name, suffix = wanted, 1
        while name in self._graph.nodes or name in self._taken:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        self._taken.add(name)
        return name


@dataclass(frozen=True)
class Rewrite:
    """See the module's docstring.

    Attributes:
        name: what users know the rewritten part by.
        nodes: what is inserted, in topological order.
        rewired: (old tensor, new tensor), each old one once. New nodes of the same rewrite still read the old one.
        inputs: (data input, new tensor), for a tensor that only some of its readers read anew.
        order: (node, the node that it waits for).
        replaced: nodes that nothing needs any more.
        successor: the new node that those wait for who waited for a replaced one; "" where nothing is replaced.
        renamed: names of replaced nodes with one output that are fetched by name, and the tensor that takes the name.
    """

    name: str
    nodes: tuple[NewNode, ...] = ()
    rewired: tuple[tuple[TensorId, TensorId], ...] = ()
    inputs: tuple[tuple[Use, TensorId], ...] = ()
    order: tuple[tuple[str, str], ...] = ()
    replaced: tuple[str, ...] = ()
    successor: str = ""
    renamed: tuple[tuple[str, TensorId], ...] = ()


def apply_rewrites(rewrites: Sequence[Rewrite], graph: Graph, editor: Editor | None = None) -> None:
    """Carry out `rewrites`, one after the other.

    Args:
        rewrites: made of `graph`; a later one may name tensors that an earlier one rewired, and nodes to wait for
            that an earlier one replaced.
        graph: tells who reads what. Edited itself, and freed of what is replaced, unless there is an editor.
        editor: edit this (a live `tf.Graph`) instead; replaced nodes stay in it, and nothing runs them.
    """
    applier = _Applier(graph, graph if editor is None else editor)
    for rewrite in rewrites:
        applier.apply(rewrite)
        if editor is None:
            applier.remove(rewrite)


class _Applier:
    def __init__(self, graph: Graph, editor: Editor) -> None:
        self._graph = graph
        self._editor = editor
        self._names: dict[str, str] = {}  # planned -> as the editor named it
        self._moved: dict[TensorId, TensorId] = {}  # old tensor -> what was put in its place
        self._succeeded: dict[str, str] = {}  # replaced node -> for whom those wait who waited for it
        self._inserted: dict[TensorId, list[Use]] = {}  # readers that a graph which is only read does not know of

    def apply(self, rewrite: Rewrite) -> None:
        graph, editor, names = self._graph, self._editor, self._names
        new: set[str] = set()
        for node in rewrite.nodes:
            inputs = [self._now(tensor) for tensor in node.inputs]
            control = [self._succeeded.get(before, names.get(before, before)) for before in node.control]
            made = editor.insert(node.name, node.op, inputs, node.attrs, node.device, control, node.outputs)
            names[node.name] = made
            new.add(made)
        for name, before in rewrite.order:
            editor.add_control(names.get(name, name), names.get(before, before))
        for old, tensor in rewrite.rewired:
            for use in [*graph.uses(old), *(self._inserted.get(old, ()) if editor is not graph else ())]:
                if use.node not in new:
                    editor.rewire(use.node, use.index, self._now(tensor))
        for use, tensor in rewrite.inputs:
            editor.rewire(use.node, use.index, self._now(tensor))
        self._moved.update({old: self._now(tensor) for old, tensor in rewrite.rewired})
        for node in rewrite.nodes:
            for index, tensor in enumerate(map(self._now, node.inputs)):
                self._inserted.setdefault(tensor, []).append(Use(names[node.name], index))
        replaced = set(rewrite.replaced)
        if rewrite.successor:
            self._succeeded.update(dict.fromkeys(rewrite.replaced, names[rewrite.successor]))
        for name in rewrite.replaced:
            for waiting in list(graph.waiting(graph[name])) if name in graph.nodes else ():
                if waiting not in replaced:
                    editor.add_control(waiting, names[rewrite.successor])
                    editor.remove_control(waiting, name)

    def remove(self, rewrite: Rewrite) -> None:
        """Take out what `rewrite` replaced, and give its names to what stands there now."""
        graph = self._graph
        for old, new in self._moved.items():
            if old in graph.specs:
                graph.specs.setdefault(new, graph.specs[old])
        graph.remove([name for name in rewrite.replaced if name in graph.nodes])
        for name, _ in rewrite.renamed:
            taken = self._moved[TensorId(name)]
            attrs = {"T": DataType(graph.specs[taken].dtype)} if taken in graph.specs else {}
            graph.insert(name, "Identity", [taken], attrs)

    def _now(self, tensor: TensorId) -> TensorId:
        """`tensor` as it is called after what was rewired so far."""
        tensor = self._moved.get(tensor, tensor)
        return TensorId(self._names.get(tensor.node, tensor.node), tensor.index)


def applied(
    rewrites: Sequence[Rewrite], graph: Graph, check: Callable[[Graph], object]
) -> tuple[Graph, dict[str, Exception]]:
    """A copy of `graph` with those of `rewrites` that can be applied, and the errors of the others, by their names.

    Where some cannot be applied together, the first of them is, and the others have the error.

    Args:
        rewrites: made of `graph`, each with a name of its own.
        graph: not changed.
        check: raises if an edited graph is not sound.
    """
    with suppress(Exception):  # below it is found of which
        return _edited(rewrites, graph, check), {}
    kept: list[Rewrite] = []
    edited, errors = graph.copy(), dict[str, Exception]()
    for rewrite in rewrites:
        try:
            edited = _edited([*kept, rewrite], graph, check)
        except Exception as error:  # of tfmem's own, or of TensorFlow's: the graph is used without the rewrite
            errors[rewrite.name] = error
        else:
            kept.append(rewrite)
    return edited, errors


def _edited(rewrites: Sequence[Rewrite], graph: Graph, check: Callable[[Graph], object]) -> Graph:
    edited = graph.copy()
    apply_rewrites(rewrites, edited)
    check(edited)
    return edited
