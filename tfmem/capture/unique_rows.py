"""Updates of unique rows as ops of known sizes, so that regions hold them and the host waits for no count.

The optimizers of tf_keras add up the gradients of equal ids before they update rows. How many ids differ depends on
data: TensorFlow's kernel for `Unique` sorts, and the host waits for the count. What is made of the rows does not depend
on it, so it is made of all rows, and those that no id names stay as they are:

    rows, place = Unique(ids)
    sums = UnsortedSegmentSum(values, place, size(rows))   sums = UnsortedSegmentSum(values, ids, size of the table)
    held = ResourceGather(accumulator, rows)               held = ReadVariableOp(accumulator)
    mean = GatherV2(means of all rows, rows)               mean = Identity(means of all rows)
    UnsortedSegmentSum(f(sums), rows, size of the table)   select(named, f(sums), 0)
    ResourceScatterAdd(table, rows, f(sums, held))         AssignAddVariableOp(table, select(named, f(sums, held), -0))

`f` is elementwise. A sum has the order of the ids in both forms, and to add -0 (to subtract 0) changes no number. An id
that is no row's counts nowhere, as in TensorFlow's kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.errors import GraphError
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import Captured, op_name
from tfmem.capture.known_sizes import (
    MOST_NUMBERS,
    SUM,
    UPDATES,
    inputs_of,
    known_of,
    readers_of,
    tensor_of,
    variable_sizes,
)
from tfmem.capture.written_ops import Known, written_ops

UNIQUE = "Unique"
GATHERS = {"ResourceGather": "ReadVariableOp", "GatherV2": "Identity"}
ELEMENTWISE = frozenset(
    {
        *("Abs", "AddV2", "Cast", "Identity", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "Reciprocal"),
        *("Rsqrt", "Sign", "Sqrt", "Square", "SquaredDifference", "Sub", "ZerosLike"),
    }
)


def with_all_rows(captured: Captured) -> Captured:
    """`captured` without `Unique`, where all that is made of it updates rows; itself if there is none. For a GPU."""
    if not any(node.op == UNIQUE for node in captured.graph_def.node):
        return captured
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    try:
        shapes = shaped_graph(captured)
    except GraphError:  # whatever reads the graph next says so
        return captured
    reading = _Reading(captured, graph_def, shapes)
    uses = [use for node in graph_def.node if node.op == UNIQUE and (use := reading.use(node))]
    if not uses:
        return captured
    writing = _Writing(shapes, {node.name for node in graph_def.node})
    for use in uses:
        writing.write(use)
    gone = {name for use in uses for name in use.counted}
    result = GraphDef(versions=graph_def.versions, library=graph_def.library)
    result.node.extend(node for node in graph_def.node if node.name not in gone)
    result.node.extend(writing.made)
    return replace(captured, graph_def=result)


@dataclass(frozen=True)
class _Use:
    """An op that finds unique ids, and all that is made of it.

    Attributes:
        name, device: of the op.
        ids: the tensor.
        sizes: of the table: rows first.
        counted: names of the op, and of those that count its rows.
        sums: nodes that add up equal ids.
        gathers: those that read rows of a variable, or of a tensor.
        ends: those that update rows of a variable, or make a tensor of all rows.
    """

    name: str
    device: str
    ids: str
    sizes: tuple[int, ...]
    counted: tuple[str, ...]
    sums: tuple[NodeDef, ...]
    gathers: tuple[NodeDef, ...]
    ends: tuple[NodeDef, ...]


def _given(end: NodeDef) -> str:
    """What an end adds up, or is given for each row."""
    return inputs_of(end)[0 if end.op == SUM else 2]


class _Reading:
    """What is made of unique ids in a graph."""

    def __init__(self, captured: Captured, graph_def: GraphDef, shapes: tf.Graph) -> None:
        self._readers, self._shapes = readers_of(graph_def), shapes
        self._fetched = frozenset(map(op_name, captured.fetches))
        self._kept = self._fetched.union(captured.control_fetches)

    def use(self, unique: NodeDef) -> _Use | None:
        """All that is made of an op; None if the number of its rows reaches something else."""
        counted = self._counted(unique)
        sums = self._readers.get(f"{unique.name}:1", ())
        rows = [node for node in self._readers.get(unique.name, ()) if node.name not in counted]
        gathers = [node for node in rows if node.op in GATHERS and self._takes_rows(node)]
        ends = [node for node in rows if node.op in (*UPDATES, SUM)]
        others = len(gathers) + len(ends) < len(rows) or f"^{unique.name}" in self._readers or unique.name in self._kept
        if not ends or others:
            return None
        tables = set(map(self._table, (*gathers, *ends)))
        sizes = next(iter(tables))
        if len(tables) > 1 or not sizes or 0 in sizes or prod(sizes) > MOST_NUMBERS:
            return None
        added_up = all(node.op == SUM and inputs_of(node)[1] == f"{unique.name}:1" for node in sums)
        added_up &= all(inputs_of(node)[2] in counted for node in sums)
        by_rows = all(inputs_of(node)[1] == unique.name for node in (*gathers, *ends))
        if not added_up or not by_rows:
            return None
        derived = self._derived([*sums, *gathers], {node.name for node in ends}, len(sizes))
        if derived is None or any(_given(node) not in derived for node in ends):
            return None
        made = [tensor_of(self._shapes, name).shape for name in derived]
        if any(shape.rank != len(sizes) or tuple(shape[1:]) != sizes[1:] for shape in made):
            return None
        return _Use(
            unique.name, unique.device, inputs_of(unique)[0], sizes, counted, tuple(sums), tuple(gathers), tuple(ends)
        )

    def _takes_rows(self, node: NodeDef) -> bool:
        """Whether a gather takes whole rows."""
        axis = tf.get_static_value(tensor_of(self._shapes, inputs_of(node)[2])) if node.op == "GatherV2" else 0
        return not node.attr["batch_dims"].i and axis is not None and int(axis) == 0

    def _table(self, node: NodeDef) -> tuple[int, ...] | None:
        """Sizes of what a gather reads, or an end makes or changes; None if they are not known."""
        table = inputs_of(node)[0]
        if node.op not in ("GatherV2", SUM):
            return variable_sizes(self._shapes, table)
        shape = tensor_of(self._shapes, node.name if node.op == SUM else table).shape
        return tuple(shape.as_list()) if shape.is_fully_defined() else None

    def _counted(self, unique: NodeDef) -> tuple[str, ...]:
        """The op, and those that count its rows for sums, which nothing else reads."""
        found = [unique.name]
        for node in self._readers.get(unique.name, ()):
            parts = [node, *(self._readers.get(node.name, ()) if node.op == "Shape" else ())]
            names = dict.fromkeys(part.name for part in parts)
            last = [reader for part in parts for reader in self._readers.get(part.name, ()) if reader.name not in names]
            counts = (node.op == "Shape" and all(part.op in ("StridedSlice", "Squeeze") for part in parts[1:])) or (
                node.op == "Size"
            )
            if counts and self._kept.isdisjoint(names) and all(reader.op == SUM for reader in last):
                found += names
        return tuple(found)

    def _derived(self, first: Sequence[NodeDef], ends: set[str], rank: int) -> set[str] | None:
        """Names of all that is computed for each row; None if anything else reads of it."""
        found, waiting = {node.name for node in first}, [node.name for node in first]
        while waiting:
            name = waiting.pop()
            for node in self._readers.get(name, ()):
                if node.name in found or (node.name in ends and _given(node) == name):
                    continue
                if node.op not in ELEMENTWISE:
                    return None
                found.add(node.name)
                waiting.append(node.name)
        others = {
            name
            for derived in found - {node.name for node in first}
            for name in inputs_of(self._node(derived))
            if name not in found
        }
        alike = all(
            (shape := tensor_of(self._shapes, name).shape).rank is not None and shape.rank < rank for name in others
        )
        return found if alike and found.isdisjoint(self._fetched) else None

    def _node(self, name: str) -> NodeDef:
        return self._shapes.get_operation_by_name(name).node_def


class _Writing:
    """Uses, written with known sizes.

    Attributes:
        made: new nodes. The ops that a use had are changed in place.
    """

    def __init__(self, shapes: tf.Graph, taken: set[str]) -> None:
        self._shapes, self._taken = shapes, taken
        self.made: list[NodeDef] = []

    def write(self, use: _Use) -> None:
        """Write one use."""
        rows = use.sizes[0]
        for node in use.sums:
            kind = tf.as_dtype(node.attr["Tnumsegments"].type)
            (count,) = self._new(use, lambda kind=kind: [tf.constant(rows, kind)])
            dtype = tensor_of(self._shapes, use.ids).dtype
            node.attr["Tindices"].type = dtype.as_datatype_enum
            node.attr.pop("_output_shapes", None)
            node.input[1:3] = [use.ids, count]
        for node in use.gathers:
            self._change(node, GATHERS[node.op], [node.input[0]])
        (named,) = self._new(use, lambda ids: [_named(ids, use.sizes)], use.ids)
        for node in use.ends:
            summed = _given(node)
            dtype = tensor_of(self._shapes, summed).dtype
            known = {named: (tf.bool, (rows, *[1] * (len(use.sizes) - 1))), summed: (dtype, use.sizes)}
            (chosen,) = self._new(use, _CHOSEN[node.op], named, summed, known=known)
            op = UPDATES.get(node.op, "Identity")
            self._change(node, op, [node.input[0], chosen] if node.op in UPDATES else [chosen])

    @staticmethod
    def _change(node: NodeDef, op: str, inputs: Sequence[str]) -> None:
        """Make another op of a node, of the same dtype, which waits for the same ops."""
        waits = [name for name in node.input if name.startswith("^")]
        new = NodeDef(name=node.name, op=op, device=node.device)
        new.input.extend([*inputs, *waits])
        kept = {"GatherV2": "Tparams", SUM: "T"}.get(node.op, "dtype")
        new.attr["T" if op == "Identity" else "dtype"].CopyFrom(node.attr[kept])
        node.CopyFrom(new)

    def _new(
        self,
        use: _Use,
        function: Callable[..., list[tf.Tensor]],
        *inputs: str,
        known: Mapping[str, Known] | None = None,
    ) -> list[str]:
        """Write what a function makes of tensors; the names of the results."""
        given = [(name, (known or {}).get(name) or known_of(self._shapes, name)) for name in inputs]
        made, results = written_ops(function, given, use.name, use.device, self._taken)
        self.made += made
        return results


def _where(named: tf.Tensor, x: tf.Tensor, other: float) -> list[tf.Tensor]:
    return [tf.where(named, x, tf.constant(other, x.dtype))]


# What an end is given for all rows, of bool [rows, 1, ...] and numbers [rows, ...]; a sum begins with 0, also of -0.
_CHOSEN: Mapping[str, Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]] = {
    "ResourceScatterAdd": lambda named, x: _where(named, x, -0.0),
    "ResourceScatterSub": lambda named, x: _where(named, x, 0.0),
    SUM: lambda named, x: [_where(named, x, 0.0)[0] + tf.constant(0.0, x.dtype)],
}


def _named(ids: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Which rows an id names: bool [rows, 1, ...], for `ids` of [ids]."""
    counts = tf.math.unsorted_segment_sum(tf.zeros_like(ids) + 1, ids, sizes[0])
    return tf.reshape(tf.not_equal(counts, 0), [sizes[0], *[1] * (len(sizes) - 1)])
