"""Waits for pure ops without the `NoOp` in between, which would end every region. Pure.

    filter's gradient, input's gradient -> NoOp -> both, as optimizers of TensorFlow 1 read them

`tf.compat.v1.train` optimizers make the gradients of each op wait for one another so. In a function, Grappler drops
that. But the graph of a session is planned before Grappler sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Rewrite, apply_rewrites

MOST_EDGES = 64  # that stand for one gate


def with_open_gates(graph: Graph, order: Sequence[str], fetched: Collection[str]) -> tuple[Graph, list[Rewrite]]:
    """A copy of `graph` whose ops wait for pure ops directly, and the rewrites that make it so.

    Args:
        graph: not changed.
        order: of one step, names of its nodes, each behind those that it waits for.
        fetched: nodes that stay.
    """
    edited, rewrites = graph.copy(), list[Rewrite]()
    for name in order:
        node = edited[name]
        waiting = list(edited.waiting(node))
        if node.op != "NoOp" or name in fetched or not node.control or not waiting:
            continue
        if len(node.control) * len(waiting) > MOST_EDGES or any(edited[before].stateful for before in node.control):
            continue
        direct = tuple((after, before) for after in waiting for before in node.control)
        rewrites.append(Rewrite(name, order=direct, replaced=(name,), successor=node.control[0]))
        apply_rewrites(rewrites[-1:], edited)
    return edited, rewrites
