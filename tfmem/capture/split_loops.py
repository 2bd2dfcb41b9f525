"""Loops of a captured graph put into pieces, as `graph_passes.analysis.memory.pieces` found them.

    s = while(cond, body, s0)      s1 = while(cond and counter < 6, body, s0);  s = while(cond, body, s1)

Each piece fills separate lists, and the gradient's loop runs in as many pieces, the last lists first. All steps run
in the same order, with the same kernels, on the same numbers. The last piece to run keeps the loop's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.analysis.memory.pieces import PiecewiseLoop, Split
from tfmem.capture.captured import Captured, free_name


def with_pieces(captured: Captured, splits: Sequence[Split]) -> Captured:
    """`captured` with these loops in pieces."""
    writer = _Writer(captured)
    for split in splits:
        writer.split(split)
    graph_def = GraphDef(versions=captured.graph_def.versions, library=captured.graph_def.library)
    graph_def.library.function.extend(writer.functions.values())
    for node in captured.graph_def.node:
        graph_def.node.extend(writer.pieces.get(node.name, [node]))
    order = [name for known in captured.creation_order for name in writer.names(known)]
    return replace(captured, graph_def=graph_def, creation_order=tuple(order))


@dataclass(frozen=True)
class _Piece:
    """One piece of a loop: its name, and the counter's value before which it ends; None for the last."""

    name: str
    until: int | None


class _Writer:
    """Makes the nodes and conditions of pieces."""

    def __init__(self, captured: Captured) -> None:
        self.nodes: Mapping[str, NodeDef] = {node.name: node for node in captured.graph_def.node}
        self.library = {function.signature.name: function for function in captured.graph_def.library.function}
        self.taken = {*self.nodes, *self.library}
        self.functions: dict[str, FunctionDef] = {}
        self.pieces: dict[str, list[NodeDef]] = {}

    def names(self, name: str) -> list[str]:
        """The nodes that stand where one did, in the order in which they run."""
        return [node.name for node in self.pieces.get(name, ())] or [name]

    def split(self, split: Split) -> None:
        """Put a loop and its gradient's into pieces."""
        steps, inner = split.ends[-1], split.ends[:-1]
        first = self._pieces(split.forward, inner)
        second = self._pieces(split.backward, [steps - end for end in reversed(inner)])
        own = {here for here, _ in split.lists}
        self._write(split.forward, first, [dict.fromkeys(own) for _ in first])
        given = [{there: f"{piece.name}:{here}" for here, there in split.lists} for piece in reversed(first)]
        self._write(split.backward, second, given)

    def _pieces(self, loop: PiecewiseLoop, ends: Sequence[int]) -> list[_Piece]:
        made = [
            _Piece(self._fresh(f"{loop.node}/piece_{number}"), loop.begins + end) for number, end in enumerate(ends)
        ]
        return [*made, _Piece(loop.node, None)]

    def _write(self, loop: PiecewiseLoop, pieces: Sequence[_Piece], given: Sequence[Mapping[int, str | None]]) -> None:
        """
        Args:
            loop: the loop.
            pieces: its pieces, in the order in which they run.
            given: for each, the inputs by place that are not what the piece before leaves behind; None for the loop's
                own input.
        """
        whole = self.nodes[loop.node]
        inputs = [name for name in whole.input if not name.startswith("^")]
        before, written = "", list[NodeDef]()
        for number, piece in enumerate(pieces):
            node = NodeDef()
            node.CopyFrom(whole)
            node.name = piece.name
            node.attr["parallel_iterations"].i = 1
            known = dict(loop.known[number - 1]) if number else {}
            del node.input[:]
            for place, own in enumerate(inputs):
                if place in given[number]:
                    node.input.append(given[number][place] or own)
                elif place in known:
                    written.append(self._constant(f"{piece.name}/argument_{place}", known[place], whole, place))
                    node.input.append(written[-1].name)
                else:
                    node.input.append(own if not number or place in loop.fixed else f"{before}:{place}")
            node.input.extend(name for name in whole.input if name.startswith("^"))
            if piece.until is not None:
                node.attr["cond"].func.name = self._until(whole.attr["cond"].func.name, loop.counter, piece.until)
            written.append(node)
            before = piece.name
        self.pieces[loop.node] = written

    def _constant(self, name: str, value: bool | int | float, whole: NodeDef, place: int) -> NodeDef:
        kind = whole.attr["T"].list.type[place]
        node = NodeDef(name=self._fresh(name), op="Const", device=whole.device)
        node.attr["dtype"].type = kind
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.as_dtype(kind), shape=[]))
        return node

    def _until(self, name: str, counter: int, end: int) -> str:
        """A condition that is also false from a counter's value on."""
        made = FunctionDef()
        made.CopyFrom(self.library[name])
        made.signature.name = self._fresh(f"{name}_until_{end}")
        argument, (result,) = made.signature.input_arg[counter], made.signature.output_arg
        taken = {node.name for node in made.node_def}
        bound, less, both = (free_name(f"until_{part}", taken) for part in ("bound", "less", "both"))
        node = made.node_def.add(name=bound, op="Const")
        node.attr["dtype"].type = argument.type
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(end, tf.as_dtype(argument.type), shape=[]))
        node = made.node_def.add(name=less, op="Less", input=[argument.name, f"{bound}:output:0"])
        node.attr["T"].type = argument.type
        made.node_def.add(name=both, op="LogicalAnd", input=[made.ret[result.name], f"{less}:z:0"])
        made.ret[result.name] = f"{both}:z:0"
        self.functions[made.signature.name] = made
        return str(made.signature.name)

    def _fresh(self, name: str) -> str:
        found = free_name(name, self.taken)
        self.taken.add(found)
        return found
