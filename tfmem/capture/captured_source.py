"""A captured graph in the form that passes plan on and edit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import tensorflow as tf

from custom_ops.background import go_on
from graph_passes.errors import GraphError
from graph_passes.graph import serde
from graph_passes.graph.graph_source import Source
from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import LOOPS
from graph_passes.graph.rewrite import Rewrite, applied
from tfmem.capture.body_source import Body, bodies, with_function
from tfmem.capture.build import FeedShapes, shaped_graph
from tfmem.capture.captured import Captured, op_name, unique
from tfmem.capture.equal_bodies import followed, names_by_place, structure_of
from tfmem.capture.inline import inline_captured


class CapturedSource:
    """A `graph_passes.graph.graph_source.Source`. Each version of the graph is read once.

    TensorFlow infers its shapes once: the import that checks an edited graph infers those of the next version.

    Attributes:
        captured: as the passes left it.
    """

    structure: Hashable = None

    def __init__(
        self,
        captured: Captured,
        feed_shapes: FeedShapes | None = None,
        asked: Collection[str] = (),
        shaped: tf.Graph | None = None,
    ) -> None:
        """
        Args:
            captured: what capture, or Grappler, gave.
            feed_shapes: shapes of feeds ("x:0"), where better known than in the graph.
            asked: names that the user asked for among the fetches. If there are any, copies of a loop's results that
                nothing reads need not stay; TensorFlow 1 makes one of each result.
            shaped: `captured` with its shapes, if it is at hand.
        """
        self.captured = captured
        self._feed_shapes = feed_shapes
        self._asked = frozenset(map(op_name, asked))
        self._version = _Version(captured, captured, shaped)

    def fork(self) -> CapturedSource:
        """This as the passes left it. An edit of either leaves the other alone."""
        other = copy(self)
        other._version = replace(self._version)
        return other

    def read(self, inlined: Collection[str] | None = None, functions: bool = True) -> Graph:
        """See `Source`."""
        if self._version.of is not self.captured:  # a body was edited
            self._version = _Version(self.captured, self.captured)
        key = None if inlined is None else tuple(sorted(inlined))
        if key != self._version.inlined:
            given = self.captured if inlined is None else inline_captured(self.captured, inlined)
            self._version = _Version(self.captured, given, inlined=key)
        version = self._version
        if version.graph is None or (functions and not version.with_functions):
            version.graph = serde.from_graph_def(
                version.captured.graph_def, inferred=self._shaped(version), functions=functions
            )
            version.with_functions = functions
        return version.graph

    def _shaped(self, version: _Version) -> tf.Graph:
        if version.shaped is None:
            version.shaped = shaped_graph(version.captured, feed_shapes=self._feed_shapes)
            go_on()
        return version.shaped

    def keep(self, graph: Graph) -> set[str]:
        """See `Source`."""
        keep = {name for name in map(op_name, self.captured.fetches) if _can_be_fetched(graph, name)}
        return {n for n in keep if not self._asked or n in self._asked or not _copies_a_result(graph, n)}

    def bodies(self) -> Mapping[str, Source]:
        """See `Source`."""
        version = self._version
        if version.captured is not self.captured:
            version = _Version(self.captured, self.captured)
        found = bodies(self.captured, self._shaped(version))
        return {body.caller: _BodySource(self, body) for body in found}

    def follow(self, other: Source) -> Mapping[str, str]:
        """See `Source`."""
        raise GraphError("internal error in tfmem: a top-level graph cannot follow another; please report this")

    def edit(
        self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]
    ) -> Mapping[str, Exception]:
        """See `Source`; a graph that TensorFlow does not import is not sound."""
        successors = {name: rewrite.successor for rewrite in rewrites for name in rewrite.replaced}
        before, checked = self._version.captured, list[_Version]()

        def check_and_import(edited: Graph) -> None:
            check(edited)
            written = _written(before, edited, successors)
            checked.append(_Version(written, written, shaped_graph(written, feed_shapes=self._feed_shapes)))

        _, errors = applied(rewrites, graph, check_and_import)
        if len(errors) < len(rewrites):  # the last that held is that of all that are kept
            self._version = checked[-1]
            self.captured = self._version.captured
        return errors


@dataclass
class _Version:
    """What is known of the graph between two edits.

    Attributes:
        of: as the passes left it.
        captured: the same, with calls at the top level.
        shaped: `captured` with its shapes; None until they are asked for.
        inlined: the functions that were brought to the top level in `captured`; None: no call was.
        graph: what was read of it; None until then.
        with_functions: whether it was read with functions.
    """

    of: Captured
    captured: Captured
    shaped: tf.Graph | None = None
    inlined: tuple[str, ...] | None = None
    graph: Graph | None = None
    with_functions: bool = False


class _BodySource(CapturedSource):
    """A function that another source calls."""

    def __init__(self, owner: CapturedSource, body: Body) -> None:
        super().__init__(body.captured, shaped=body.shaped)
        self._owner = owner
        self._name = body.name
        self._given = body.captured
        self.structure = structure_of(body.captured)

    def bodies(self) -> Mapping[str, Source]:
        """None: those of the owner are all."""
        return {}

    def follow(self, other: Source) -> Mapping[str, str]:
        """See `Source`."""
        if not isinstance(other, _BodySource) or other.structure is None or other.structure != self.structure:
            raise GraphError("internal error in tfmem: these functions differ; please report this")
        if other.captured is not other._given:
            self.captured = followed(self._given, other._given, other.captured)
            self._owner.captured = with_function(self._owner.captured, self._name, self.captured)
        return names_by_place(other._given, self._given)

    def edit(
        self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]
    ) -> Mapping[str, Exception]:
        """See `Source`."""
        errors = super().edit(graph, rewrites, check)
        if len(errors) < len(rewrites):
            self._owner.captured = with_function(self._owner.captured, self._name, self.captured)
        return errors


def _written(before: Captured, graph: Graph, successors: Mapping[str, str]) -> Captured:
    """`before` with another graph; what ran for its side effects is run as what took its place."""
    present = graph.nodes
    control = [name if name in present else successors.get(name, "") for name in before.control_fetches]
    graph_def = serde.to_graph_def(graph, before.graph_def)
    return replace(
        before,
        graph_def=graph_def,
        fetches=tuple(name for name in before.fetches if op_name(name) in present),
        control_fetches=unique(list(filter(None, control))),
        creation_order=tuple(node.name for node in graph_def.node),
    )


def _can_be_fetched(graph: Graph, name: str) -> bool:
    """Whether a caller can fetch the node: lists of tensors and resources stay in the graph."""
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(graph[name])] if name in graph.nodes else []
    return not specs or any(spec is None or spec.dtype not in ("variant", "resource") for spec in specs)


def _copies_a_result(graph: Graph, name: str) -> bool:
    node = graph.nodes.get(name)
    return node is not None and node.op == "Identity" and graph[node.inputs[0].node].op in LOOPS
