"""A graph that passes plan on and edit, one after another. What captured it says how it is read and written.

Readable    what a plan is given: it reads, and cannot edit
Source      what `run_passes` edits: the same, and the edits
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol

from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Rewrite


class Readable(Protocol):
    """What was captured, as the passes before left it. Reading it again gives the same graph until it is edited."""

    def read(self, inlined: Collection[str] | None = None, functions: bool = True) -> Graph:
        """The graph, with the shapes that are known; its readers do not change it.

        Args:
            inlined: bring calls to the top level, of these functions too though they are one of several
                implementations; None leaves all calls as they are.
            functions: whether bodies that nodes call are read as well (`Graph.functions`).
        """

    def keep(self, graph: Graph) -> set[str]:
        """Names of the nodes of such a graph that are fetched."""


class Source(Readable, Protocol):
    """A `Readable` that can be edited."""

    def bodies(self) -> Mapping[str, Source]:
        """The functions that the graph calls, bodies of `If` and `While` among them, and those that these call.

        Each is a separate graph, by the path of its callers ("decoder/while/body"). An edit of one is an edit of this.
        """

    @property
    def structure(self) -> Hashable:
        """A key that is equal for bodies which differ in nothing but names; None for what is like no other."""

    def follow(self, other: Source) -> Mapping[str, str]:
        """Be edited as `other`, a body of the same structure, was edited.

        Returns:
            Names here by the names there.

        Raises:
            GraphError: that cannot be done; nothing was edited.
        """

    def edit(
        self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]
    ) -> Mapping[str, Exception]:
        """Carry out those of `rewrites` that can be, and say by their names why the others cannot.

        Args:
            graph: one that `read` gave, or one that was made of it; not changed.
            rewrites: made of `graph`, each with a unique name.
            check: raises if an edited graph is not what the pass promised.
        """
