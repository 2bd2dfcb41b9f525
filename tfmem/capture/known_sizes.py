"""Keras's divisions of sparse gradients as ops of known sizes, so that regions hold them and no condition stops a step.

What a `Division` returns has a size that depends on data. What its readers make of it does not: they add it up by rows,
or change a variable's rows. So either branch is written for all that it may return, and the predicate chooses:

    no row is bad      quotients = values / divisor[ids]         sums of segments, as before
    a row is bad       all rows of Keras's quotients, and which of them it returns

    UnsortedSegmentSum(f(quotients), rows)           select(bad, select(returned, f(all rows), 0), sums)
    ResourceScatterSub(variable, rows, f(...))       variable -= the same

`f` is elementwise, and is written twice. Both branches run on a GPU, where nothing raises: an id out of range counts
nowhere, and a position out of range reads 0, as in TensorFlow's kernels there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.ops import handle_data_util

from graph_passes.errors import GraphError
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import Captured, free_name, op_name
from tfmem.capture.divided_slices import Division, division
from tfmem.capture.written_ops import Known, written_ops

MOST_NUMBERS = 1 << 24  # of a table: all are read and written, but Keras's check for bad rows reads all of them, too
LINE = 128  # numbers that are added up at once, all before each: what the rule of Cumsum takes
WRAPS = 65_535  # positions up to here have a sum below 2^31
_ELEMENTWISE = frozenset(
    {"Abs", "AddV2", "Cast", "Identity", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Sign", "Sqrt", "Square", "Sub"}
)
UPDATES = {"ResourceScatterAdd": "AssignAddVariableOp", "ResourceScatterSub": "AssignSubVariableOp"}
SUM = "UnsortedSegmentSum"


def with_known_sizes(captured: Captured) -> Captured:
    """`captured` without the divisions of slices that can be written so; itself if there are none. For a GPU."""
    if not _divisions(captured, captured.graph_def):
        return captured
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    found = _divisions(captured, graph_def)
    handed = {f"{each.name}:{place}": tensor for each in found for place, tensor in each.handed.items()}
    for node in graph_def.node:
        node.input[:] = [handed.get(name, name) for name in node.input]
    try:
        shapes = shaped_graph(replace(captured, graph_def=graph_def))
    except GraphError:  # whatever reads the graph next says so
        return captured
    readers = readers_of(graph_def)
    uses = [use for each in _divisions(captured, graph_def) if (use := _use(each, readers, shapes, captured.fetches))]
    if not uses:
        return captured
    taken = {node.name for node in graph_def.node}
    made = [node for use in uses for node in _Writing(use, shapes, taken).nodes()]
    gone = {use.divided.name for use in uses}
    result = GraphDef(versions=graph_def.versions, library=graph_def.library)
    result.node.extend(node for node in graph_def.node if node.name not in gone)
    result.node.extend(made)
    return replace(captured, graph_def=result)


def _divisions(captured: Captured, graph_def: GraphDef) -> list[Division]:
    library = {each.signature.name: each for each in graph_def.library.function}
    fetched = {op_name(name) for name in (*captured.fetches, *captured.control_fetches)}
    found = [each for node in graph_def.node if (each := division(node, library))]
    return [each for each in found if each.name not in fetched]


Readers = Mapping[str, Sequence[NodeDef]]


@dataclass(frozen=True)
class _Use:
    """A division, and all that is made of it.

    Attributes:
        divided: the division.
        rows: sizes of the divisor.
        elementwise: ops of the quotients, each behind those that it reads.
        ends: those that add up by rows, or update a variable.
    """

    divided: Division
    rows: tuple[int, ...]
    elementwise: tuple[NodeDef, ...]
    ends: tuple[NodeDef, ...]


def readers_of(graph_def: GraphDef) -> Readers:
    """The nodes that read each tensor, or wait for each op."""
    found: dict[str, list[NodeDef]] = {}
    for node in graph_def.node:
        for name in dict.fromkeys(map(_plain, node.input)):
            found.setdefault(name, []).append(node)
    return found


def _plain(name: str) -> str:
    return name.removesuffix(":0")


def _use(divided: Division, readers: Readers, shapes: tf.Graph, fetches: Sequence[str]) -> _Use | None:
    """All that is made of a division; None if its size reaches something else."""
    sizes = _sizes(divided, shapes)
    if sizes is None or f"^{divided.name}" in readers:
        return None
    elementwise, ends, waiting = dict[str, NodeDef](), dict[str, NodeDef](), [divided.name]
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            if node.op in _ELEMENTWISE and node.name not in elementwise:
                elementwise[node.name] = node
                waiting.append(node.name)
            elif node.op not in _ELEMENTWISE:
                ends[node.name] = node
    derived = {divided.name, *elementwise}
    others = {name for node in elementwise.values() for name in inputs_of(node)} - derived
    if elementwise.keys() & set(map(_plain, fetches)) or not all(
        _is_smaller(shapes, name, len(sizes)) for name in others
    ):
        return None
    at_ends = all(_adds_up(node, divided, derived, sizes, shapes) for node in ends.values())
    if not at_ends or not all(node.name in ends for node in readers.get(f"{divided.name}:1", ())):
        return None
    return _Use(divided, sizes, _in_order(elementwise), tuple(ends.values()))


def inputs_of(node: NodeDef) -> list[str]:
    """The tensors that a node reads, the first output of an op by its name."""
    return [_plain(name) for name in node.input if not name.startswith("^")]


def _in_order(nodes: Mapping[str, NodeDef]) -> tuple[NodeDef, ...]:
    """Nodes, each behind those that it reads."""
    found: dict[str, NodeDef] = {}

    def add(node: NodeDef) -> None:
        for name in inputs_of(node):
            if name in nodes and name not in found:
                add(nodes[name])
        found[node.name] = node

    for node in nodes.values():
        add(node)
    return tuple(found.values())


def _sizes(divided: Division, shapes: tf.Graph) -> tuple[int, ...] | None:
    """Sizes of the divisor; None if they, or those of what it divides, are not known or too many."""
    divisor, bad, ids, values = (
        tensor_of(shapes, name).shape for name in (divided.divisor, divided.bad, divided.ids, divided.values)
    )
    if not divisor.is_fully_defined() or not divisor.rank or values.rank is None:
        return None
    sizes = tuple(divisor.as_list())
    count = divided.count
    if isinstance(count, str):
        known = tf.get_static_value(tensor_of(shapes, count))
        count = -1 if known is None else int(known[0])
    fits = count == sizes[0] and bad.as_list() == [count] and ids.rank == 1 and values[1:] == divisor[1:]
    floats = tensor_of(shapes, divided.values).dtype.is_floating
    return sizes if fits and floats and 0 not in sizes and prod(sizes) <= MOST_NUMBERS else None


def tensor_of(shapes: tf.Graph, name: str) -> tf.Tensor:
    """A tensor of the graph with its shapes."""
    return shapes.get_tensor_by_name(name if ":" in name else f"{name}:0")


def _is_smaller(shapes: tf.Graph, name: str, rank: int) -> bool:
    """Whether a tensor is the same for all rows."""
    found = tensor_of(shapes, name).shape.rank
    return found is not None and found < rank


def _adds_up(
    node: NodeDef, divided: Division, derived: Collection[str], sizes: tuple[int, ...], shapes: tf.Graph
) -> bool:
    """Whether a node adds up by the rows of the division, or updates a variable's."""
    inputs, rows = inputs_of(node), f"{divided.name}:1"
    if node.op == SUM:
        known = tensor_of(shapes, node.name).shape
        return inputs[0] in derived and inputs[1] == rows and known.rank is not None and known[0] == sizes[0]
    if node.op not in UPDATES or inputs[1] != rows or inputs[2] not in derived:
        return False
    return variable_sizes(shapes, inputs[0]) == sizes


def known_of(shapes: tf.Graph, name: str) -> Known:
    """Dtype and shape of a tensor of the graph."""
    found = tensor_of(shapes, name)
    return found.dtype, found.shape


def variable_sizes(shapes: tf.Graph, handle: str) -> tuple[int, ...] | None:
    """Sizes of the variable that a handle stands for; None if they are not known."""
    data = handle_data_util.get_handle_data(tensor_of(shapes, handle))
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    found = tf.TensorShape(data.shape_and_type[0].shape)
    return tuple(found.as_list()) if found.is_fully_defined() else None


class _Writing:
    """One use of a division, written with known sizes."""

    def __init__(self, use: _Use, shapes: tf.Graph, taken: set[str]) -> None:
        self._use, self._shapes, self._taken = use, shapes, taken
        self._made: list[NodeDef] = []

    def nodes(self) -> list[NodeDef]:
        """New nodes. The ops that the use had are changed in place."""
        divided, sizes = self._use.divided, self._use.rows
        values, divisor, ids = divided.values, divided.divisor, divided.ids
        (quotients,) = self._write(lambda v, d, i: [v / tf.gather(d, i)], values, divisor, ids)
        returned, rows = self._write(all_rows, ids, values, divisor, divided.bad)
        by_id, by_row = {divided.name: quotients}, {divided.name: rows}
        for node in self._use.elementwise:
            by_row[node.name] = self._copy(node, by_row)
            by_id[node.name] = node.name
            node.input[:] = [by_id.get(_plain(name), name) for name in node.input]
        for node in self._use.ends:
            summed = inputs_of(node)[0 if node.op == SUM else 2]
            dtype = tensor_of(self._shapes, summed).dtype
            own, every = by_id[summed], by_row[summed]
            known = {returned: (tf.bool, sizes[:1]), own: (dtype, (None, *sizes[1:])), every: (dtype, sizes)}
            choose = _added if node.op == "ResourceScatterAdd" else _chosen
            (chosen,) = self._write(choose, divided.predicate, returned, own, every, ids, known=known)
            self._end(node, chosen, dtype)
        return self._made

    def _copy(self, node: NodeDef, by_row: Mapping[str, str]) -> str:
        """An elementwise op, of all rows."""
        copy = NodeDef()
        copy.CopyFrom(node)
        copy.name = free_name(f"{self._use.divided.name}/{node.name}", self._taken)
        copy.input[:] = [by_row.get(_plain(name), name) for name in node.input]
        self._made.append(copy)
        return copy.name

    def _end(self, node: NodeDef, chosen: str, dtype: tf.DType) -> None:
        """Have a node hand on what was chosen, or give it to its variable."""
        waits = [name for name in node.input if name.startswith("^")]
        op = UPDATES.get(node.op)
        new = NodeDef(name=node.name, op=op or "Identity", device=node.device)
        new.input.extend([*([node.input[0]] if op else []), chosen, *waits])
        new.attr["dtype" if op else "T"].type = dtype.as_datatype_enum
        node.CopyFrom(new)

    def _write(
        self, function: Callable[..., list[tf.Tensor]], *inputs: str, known: Mapping[str, Known] | None = None
    ) -> list[str]:
        """Write what a function makes of tensors; the names of the results."""
        divided, given = (
            self._use.divided,
            [(name, (known or {}).get(name) or known_of(self._shapes, name)) for name in inputs],
        )
        made, results = written_ops(function, given, divided.name, divided.device, self._taken)
        self._made += made
        return results


def all_rows(ids: tf.Tensor, values: tf.Tensor, divisor: tf.Tensor, bad: tf.Tensor) -> list[tf.Tensor]:
    """Which rows Keras returns if some are bad, and all rows of its quotients.

    Args:
        ids: integers [ids].
        values: floats [ids, ...].
        divisor: of their dtype, [rows, ...], of known sizes.
        bad: bool [rows].

    Returns:
        bool [rows], and floats of the divisor's shape; rows that are not returned hold any numbers.
    """
    rows, number = divisor.shape[0], values.shape[0]
    count = tf.shape(values)[0] if number is None else tf.constant(number)
    positions = tf.cast(tf.range(1, count + 1 if number is None else number + 1), tf.int64)
    found = tf.scatter_nd(tf.expand_dims(ids, 1), positions, tf.constant([rows], ids.dtype))
    returned = tf.not_equal(found, 0) | bad
    if number is None or number > WRAPS:  # Keras adds up int32
        found = tf.cast(tf.cast(found, tf.int32), tf.int64)
    marks = tf.cast(returned, tf.float32)  # exact up to 2^24
    as_many = tf.equal(tf.cast(tf.reduce_sum(marks), tf.int32), count)
    place = tf.where(as_many, tf.cast(_sums_so_far(marks), tf.int64), found)
    within = (place >= 0) & (place <= tf.cast(count, tf.int64))
    padded = tf.concat([tf.zeros([1, *values.shape[1:]], values.dtype), values], 0)
    taken = tf.gather(padded, tf.where(within, place, tf.zeros_like(place)))
    taken = tf.where(_of_rows(within, taken), taken, tf.zeros_like(taken))
    return [returned, taken / divisor]


def _sums_so_far(marks: tf.Tensor) -> tf.Tensor:
    """Running sums: of lines first, and then of lines' sums."""
    size = marks.shape[0]
    if size <= LINE:
        return tf.cumsum(marks)
    lines = -(-size // LINE)
    whole = tf.pad(marks, [[0, lines * LINE - size]]) if size % LINE else marks
    whole = tf.reshape(whole, [lines, LINE])
    sums = tf.reduce_sum(whole, 1)
    before = _sums_so_far(sums) - sums
    return tf.reshape(tf.cumsum(whole, 1) + tf.expand_dims(before, 1), [-1])[:size]


def _of_rows(marks: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return tf.reshape(marks, [rows.shape[0], *[1] * (rows.shape.rank - 1)])


def _chosen(
    predicate: tf.Tensor, returned: tf.Tensor, quotients: tf.Tensor, rows: tf.Tensor, ids: tf.Tensor
) -> list[tf.Tensor]:
    """The sums of rows, of either branch."""
    summed = tf.math.unsorted_segment_sum(quotients, ids, rows.shape[0])
    every = tf.where(_of_rows(returned, rows), rows, tf.zeros_like(rows))
    return [tf.where(predicate, every, summed)]


def _added(*given: tf.Tensor) -> list[tf.Tensor]:
    """The sums for a variable that adds them: -0.0, which changes nothing, in place of 0.0."""
    (found,) = _chosen(*given)
    return [tf.where(tf.equal(found, 0), -tf.zeros_like(found), found)]
