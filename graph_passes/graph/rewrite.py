"""What a pass does to a graph, as data, and the one place that carries it out.

    Rewrite
      nodes: NewNode ...                     what is inserted; each reads the graph, or nodes before it
      rewired: old tensor -> new tensor      every reader of the old one will read the new one
      inputs: (node, index) -> new tensor    this input alone will
      order: (node, before)                  control edges
      replaced: node names                   dead once all that is done

Example, `y = relu(x)` for a reader `z`, replaced by one op of tfmem's: `nodes` holds the new op, which reads `x`,
`rewired` leads from `y:0` to its output, `replaced` is `y`, and `successor` is the new op. Nodes that waited for `y`
then wait for the successor.

A rewrite is complete: every new node is in it, with the name that it will have. So it can be printed, compared and
evaluated without a graph, and applying it takes no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from custom_ops.background import go_on
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
        """The node's name."""

    @property
    def inputs(self) -> tuple[TensorId, ...]:
        """The tensors that it reads, as in `NewNode`."""


class Names:
    """Names that no node of a graph has yet, nor any other new node; TensorFlow takes upper for lower case here."""

    def __init__(self, graph: Graph) -> None:
        self._taken = {name.lower() for name in graph.nodes}

    def fresh(self, wanted: str) -> str:
        """`wanted`, or with a number behind."""
        name, suffix = wanted, 1
        while name.lower() in self._taken:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        self._taken.add(name.lower())
        return name


@dataclass(frozen=True)
class Rewrite:
    """See the module's docstring.

    Attributes:
        name: what users know the rewritten part by.
        nodes: what is inserted, in topological order.
        rewired: (old tensor, new tensor), each old one once. New nodes of the same rewrite still read the old one.
        inputs: (data input, new tensor), where only some readers of a tensor are given the new one.
        order: (node, the node that it waits for).
        replaced: nodes that nothing needs any more.
        successor: the node, new or another one of the graph, that others wait for in place of a replaced one; "" where
            nothing is replaced.
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
        rewrites: made of `graph`; a later one may name tensors that an earlier one rewired, and nodes that an earlier
            one replaced.
        graph: tells which node reads what. It is edited, and what is replaced removed, unless there is an editor.
        editor: edit this (a live `tf.Graph`) instead; replaced nodes stay in it, and nothing runs them.
    """
    copy = graph if editor is None else graph.copy()
    applier = _Applier(copy, copy if editor is None else _Both(copy, editor))
    for rewrite in rewrites:
        applier.apply(rewrite)
        applier.remove(rewrite, renames=editor is None)


class _Both:
    """Edits a copy, which tells what is true after each edit, and with it what `editor` edits, which may rename new
    nodes."""

    def __init__(self, graph: Graph, editor: Editor) -> None:
        self._graph = graph
        self._editor = editor
        self._names: dict[str, str] = {}  # in the copy -> as the editor named it

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
        made = self._graph.insert(name, op, inputs, attrs, device, control, outputs)
        tensors, waits = [self._tensor(tensor) for tensor in inputs], [self._node(before) for before in control]
        self._names[made] = self._editor.insert(name, op, tensors, attrs, device, waits, outputs)
        return made

    def rewire(self, node: str, index: int, source: TensorId) -> None:
        self._graph.rewire(node, index, source)
        self._editor.rewire(self._node(node), index, self._tensor(source))

    def add_control(self, node: str, after: str) -> None:
        self._graph.add_control(node, after)
        self._editor.add_control(self._node(node), self._node(after))

    def remove_control(self, node: str, after: str) -> None:
        self._graph.remove_control(node, after)
        self._editor.remove_control(self._node(node), self._node(after))

    def _node(self, name: str) -> str:
        return self._names.get(name, name)

    def _tensor(self, tensor: TensorId) -> TensorId:
        return TensorId(self._node(tensor.node), tensor.index)


class _Applier:
    def __init__(self, graph: Graph, editor: Editor) -> None:
        """
        Args:
            graph: true after each edit of the editor.
            editor: of the graph, at least.
        """
        self._graph = graph
        self._editor = editor
        self._names: dict[str, str] = {}  # as planned -> as inserted
        self._moved: dict[TensorId, TensorId] = {}  # old tensor -> what was put in its place
        self._became: dict[TensorId, list[TensorId]] = {}  # what was put there -> old tensors
        self._succeeded: dict[str, str] = {}  # replaced node -> its successor
        self._uses: dict[Use, list[Use]] = {}  # of a replaced node -> where new nodes read the same tensor

    def apply(self, rewrite: Rewrite) -> None:
        graph, editor = self._graph, self._editor
        new: dict[TensorId, list[Use]] = {}
        for node in rewrite.nodes:
            inputs = [self._now(tensor) for tensor in node.inputs]
            control = [self._node(before) for before in node.control]
            made = editor.insert(node.name, node.op, inputs, node.attrs, node.device, control, node.outputs)
            self._names[node.name] = made
            for index, tensor in enumerate(inputs):
                new.setdefault(tensor, []).append(Use(made, index))
        for name, before in rewrite.order:
            editor.add_control(self._node(name), self._node(before))
        replaced = [graph[name] for name in rewrite.replaced if name in graph.nodes]
        for gone in replaced:
            self._uses.update((Use(gone.name, index), new.get(each, [])) for index, each in enumerate(gone.inputs))
        moved = {self._now(old): self._now(tensor) for old, tensor in rewrite.rewired}
        places = [(use, moved[old]) for old in moved for use in graph.uses(old) if use not in new.get(old, ())]
        places += [(place, self._now(tensor)) for use, tensor in rewrite.inputs for place in self._uses.get(use, [use])]
        for use, tensor in places:
            editor.rewire(use.node, use.index, tensor)
        self._move(moved)
        successor = self._names.get(rewrite.successor, rewrite.successor)
        for gone in replaced:
            for waiting in list(graph.waiting(gone)):
                if waiting not in rewrite.replaced:
                    editor.add_control(waiting, successor)
                    editor.remove_control(waiting, gone.name)
        if rewrite.successor:
            self._succeeded.update(dict.fromkeys(rewrite.replaced, successor))

    def remove(self, rewrite: Rewrite, renames: bool) -> None:
        """Take out what `rewrite` replaced, and, with `renames`, give its names to what stands there now."""
        graph = self._graph
        for old, _ in rewrite.rewired:
            if old in graph.specs:
                graph.specs.setdefault(self._now(old), graph.specs[old])
        graph.remove([name for name in rewrite.replaced if name in graph.nodes])
        for name, _ in rewrite.renamed if renames else ():
            taken = self._now(TensorId(name))
            attrs = {"T": DataType(graph.specs[taken].dtype)} if taken in graph.specs else {}
            graph.insert(name, "Identity", [taken], attrs)

    def _node(self, name: str) -> str:
        """A node to wait for, or that waits, after what was replaced so far."""
        return self._succeeded.get(name, self._names.get(name, name))

    def _now(self, tensor: TensorId) -> TensorId:
        """`tensor` as it is called after what was rewired so far."""
        tensor = TensorId(self._names.get(tensor.node, tensor.node), tensor.index)
        return self._moved.get(tensor, tensor)

    def _move(self, moved: Mapping[TensorId, TensorId]) -> None:
        """Replace these tensors by the others from now on, also where an earlier rewrite put them in."""
        earlier = {old: self._became.pop(old, []) for old in moved}
        for old, tensor in moved.items():
            for each in (old, *earlier[old]):
                self._moved[each] = tensor
                self._became.setdefault(tensor, []).append(each)


def applied(
    rewrites: Sequence[Rewrite], graph: Graph, check: Callable[[Graph], object]
) -> tuple[Graph, dict[str, Exception]]:
    """A copy of `graph` with those of `rewrites` that can be applied, and the errors of the others, by their names.

    Where some cannot be applied together, the first of them is, and the others have the error. A check may take a
    second, so halves are tried: one wrong rewrite of a hundred takes 15 checks.

    Args:
        rewrites: made of `graph`, each with a unique name.
        graph: not changed.
        check: raises if an edited graph is not sound.
    """
    kept: list[Rewrite] = []
    edited, errors = graph.copy(), dict[str, Exception]()
    pending = [list(rewrites)]  # what comes first is last
    while pending:
        go_on()
        part = pending.pop()
        try:
            edited = _edited([*kept, *part], graph, check)
        except Exception as error:  # of tfmem's own, or of TensorFlow's: the graph is used without the rewrite
            half = len(part) // 2
            if half:
                pending += [part[half:], part[:half]]
            else:
                errors.update({each.name: error for each in part})
        else:
            kept += part
    return edited, errors


def _edited(rewrites: Sequence[Rewrite], graph: Graph, check: Callable[[Graph], object]) -> Graph:
    edited = graph.copy()
    apply_rewrites(rewrites, edited)
    check(edited)
    return edited
