"""A graph that passes plan on and edit, one after another; whoever captured it knows how it is read and written."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Protocol

from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Rewrite


class Source(Protocol):
    """What was captured, as the passes before left it."""

    def read(self, inlined: Collection[str] | None = None, functions: bool = True) -> Graph:
        """The graph, with the shapes that are known.

        Args:
            inlined: bring calls to the top level, of these functions too though they are one of several
                implementations; None leaves all calls as they are.
            functions: whether bodies that nodes call are read as well (`Graph.functions`).
        """

    def keep(self, graph: Graph) -> set[str]:
        """Names of the nodes of such a graph that are fetched."""

    def bodies(self) -> Mapping[str, Source]:
        """The functions that the graph calls, bodies of `If` and `While` among them, and those that these call, as
        graphs of their own, by who calls them ("decoder/while/body"). An edit of one is an edit of this."""

    @property
    def structure(self) -> Hashable:
        """The same for bodies that differ in nothing but names; None for what is like no other."""

    def follow(self, other: Source) -> Mapping[str, str]:
        """Be edited as `other`, a body of the same structure, was edited.

        Returns:
            Names here by the names there.

        Raises:
            GraphError: that cannot be done; nothing was edited.
        """

    def edit(self, graph: Graph, rewrites: Sequence[Rewrite]) -> Mapping[str, Exception]:
        """Carry out those of `rewrites` that can be, and say by their names why the others cannot.

        Args:
            graph: one that `read` gave, or one that was made of it; not changed.
            rewrites: made of `graph`, each with a name of its own.
        """
