"""Reads `CudnnRNNV3` (and `CudnnRNN`, `CudnnRNNV2`) into a match: what Keras emits where TensorFlow sees a GPU.

cuDNN wants one vector of all weights. Keras packs it again in every step, out of kernel, recurrent kernel and bias.
Where the vector can be traced back to those three, they are read directly and the packing is dead; else the vector is
taken apart (`provenance.py`). Its layout, for gates in cuDNN's order (LSTM i, f, c, o; GRU r, z, h):

    W of each gate [units, inputs], R of each gate [units, units], bias of W for each gate, bias of R for each gate

Past a sequence's length cuDNN keeps the state and puts out 0. A layer that goes backwards turns its sequences around in
front of cuDNN, each up to its length, and the outputs behind it; the launch walks backwards instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell
from graph_passes.graph.dead_code import dead_code
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, boolean, floating, integer, text
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.graph.writer import SHAPE_DTYPE, Writer
from graph_passes.passes.recurrent.find.equal_scalars import dimension_key, scalar_key
from graph_passes.passes.recurrent.find.provenance import Places, Traced, integers, is_zero, trace
from graph_passes.passes.recurrent.match import Direction, Joinable, Match, RecurrentNode, Unmatched
from graph_passes.refusals import Reason, Refusal

CUDNN = frozenset({"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"})

# What an op of these makes has the same numbers elsewhere.
MOVES = ("ReverseV2", "Transpose", "ReverseSequence")

# For each mode: cuDNN's gates in the order of the cell.
_GATES = {"lstm": (0, 1, 2, 3), "gru": (1, 0, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}


@dataclass(frozen=True)
class Sizes:
    """What a `CudnnRNN` computes.

    Attributes:
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        inputs, units: width of the input and of the state.
        dtype: of everything but the lengths.
        time_major: whether time is dimension 0 of input and output.
    """

    mode: str
    inputs: int
    units: int
    dtype: str
    time_major: bool

    @property
    def gates(self) -> tuple[int, ...]:
        """cuDNN's gates in the order of the cell."""
        return _GATES[self.mode]

    @property
    def pieces(self) -> tuple[int, ...]:
        """The sizes of the parts of the vector of all weights, in its order."""
        count = len(self.gates)
        return (self.units * self.inputs,) * count + (self.units**2,) * count + (self.units,) * (2 * count)

    def cell(self, masked: bool) -> Cell:
        """One step, input products left out."""
        mask: cells.Mask = "zero" if masked else None
        if self.mode == "lstm":
            return cells.lstm(mask=mask)
        if self.mode == "gru":
            return cells.gru(mask=mask)
        return cells.simple_rnn(self.mode.removeprefix("rnn_"), mask=mask)


def joinable_cudnn(graph: Graph, match: Match) -> Joinable:
    """The match of a `CudnnRNN`, with what decides whether another direction may share its launch."""
    node = graph[match.name]
    time, batch = (dimension_key(graph, node.inputs[0], axis) for axis in _time_and_batch(node))
    return Joinable(match, time, frozenset({batch}))


def _time_and_batch(node: Node) -> tuple[int, int]:
    """The axes of the input."""
    batch_major = node.op == "CudnnRNNV3" and not boolean(node.attrs.get("time_major", True))
    return (1, 0) if batch_major else (0, 1)


def match_cudnn(
    graph: Graph,
    name: str,
    names: Names,
    keep: Collection[str] = (),
    backwards: Collection[str] = (),
    opaque: bool = False,
) -> Match | Unmatched:
    """Read one op.

    Args:
        graph: the graph.
        name: the op, of a type in `CUDNN`.
        names: gives names to new nodes.
        keep: names of nodes that are fetched.
        backwards: its gradient ops, which will be removed too. They make gradients of the op's own inputs, so the match
            reads the initial states as they are.
        opaque: whether to read the vector of all weights, even if it could be traced back.
    """
    node = graph[name]
    sizes = _sizes(graph, node)
    if isinstance(sizes, Refusal):
        return Unmatched(name, node.op, sizes)
    if name in keep:
        return Unmatched(name, node.op, Reason.CUDNN_FETCHED())
    match = _Reader(graph, node, sizes, names, backwards, opaque).read()
    removed = dead_code(graph, {name, *backwards}, match.nodes, dict(match.rewired), keep)
    for tensor in graph.tensors(node):
        readers = [use.node for use in graph.uses(tensor) if use.node not in removed]
        if readers and tensor not in dict(match.rewired):
            return Unmatched(name, node.op, Reason.CUDNN_OUTPUT(reader=readers[0], index=tensor.index))
    # together with gradients, `plan.py` finds what is dead
    return match if backwards else replace(match, removed=tuple(sorted(removed)))


def _sizes(graph: Graph, node: Node) -> Sizes | Refusal:
    """What the op computes, or why it is not read."""
    mode, inputs, direction = (text(node.attrs.get(key)) for key in ("rnn_mode", "input_mode", "direction"))
    if (mode or "lstm") not in _GATES:
        return Reason.CUDNN_MODE(mode=mode, modes=", ".join(_GATES))
    if (inputs or "linear_input") != "linear_input":
        return Reason.CUDNN_INPUT(mode=inputs)
    if (direction or "unidirectional") != "unidirectional":
        return Reason.CUDNN_DIRECTION(direction=direction)
    if "dropout" in node.attrs and floating(node.attrs["dropout"]):
        return Reason.CUDNN_DROPOUT()
    if "num_proj" in node.attrs and integer(node.attrs["num_proj"]):
        return Reason.CUDNN_PROJECTION()
    time_major = _time_and_batch(node) == (0, 1)
    x, h = graph.specs.get(node.inputs[0]), graph.specs.get(node.inputs[1])
    if x is None or x.shape is None or len(x.shape) != 3 or x.shape[2] is None:
        return Reason.CUDNN_INPUT_WIDTH()
    if h is None or h.shape is None or len(h.shape) != 3 or h.shape[2] is None:
        return Reason.CUDNN_STATE_WIDTH()
    layers = h.shape[0 if time_major else 1]
    if layers != 1:
        return Reason.CUDNN_LAYERS(layers=layers or "an unknown number of")
    return Sizes(mode or "lstm", x.shape[2], h.shape[2], x.dtype, time_major)


class _Reader:
    def __init__(
        self, graph: Graph, node: Node, sizes: Sizes, names: Names, backwards: Collection[str], opaque: bool
    ) -> None:
        self.graph = graph
        self.backwards = backwards
        self.opaque = opaque
        self.node = node
        self.sizes = sizes
        self.dtype = sizes.dtype
        self.writer = Writer(names, node.name, node.device)

    def read(self) -> Match:
        write, sizes, node = self.writer, self.sizes, self.node
        turned = turns(self.graph, node.inputs[0].node, node)
        x = self.graph[node.inputs[0].node].inputs[0] if turned else node.inputs[0]
        mask = self.mask(x)
        kernel, recurrent, bias, recurrent_bias = self.weights()
        sequences = (self.products(x, kernel, bias), *((mask,) if mask else ()))
        count = 2 if sizes.mode == "lstm" else 1
        direction = Direction(
            sequences=sequences,
            invariants=(),
            vectors=(recurrent_bias,) if recurrent_bias else (),
            matrices=(recurrent,),
            states=tuple(self.state(node.inputs[1 + index]) for index in range(count)),
            reverse=turned,
        )
        cell = sizes.cell(mask is not None)
        rows = dimension_key(self.graph, node.inputs[0], _time_and_batch(node)[1])
        batch = rows if isinstance(rows, int) else None
        before = len(write.nodes)
        launch = RecurrentNode(
            write.name("recurrent"),
            cell,
            sizes.units,
            self.dtype,
            (direction,),
            node.device,
            batch=batch,
            batch_major=not sizes.time_major,
        )
        output = launch.output(0)
        layers = 0 if sizes.time_major else 1
        rewired = self.outputs(output) if turned else [(TensorId(node.name), output)]
        for index in range(count):
            final = write.expanded(launch.final(index), self.dtype, layers)
            rewired.append((TensorId(node.name, 1 + index), final))
        nodes: tuple[NewNode | RecurrentNode, ...] = (*write.nodes[:before], launch, *write.nodes[before:])
        return Match(node.name, node.op, nodes, tuple(rewired), (node.name,))

    def outputs(self, output: TensorId) -> list[tuple[TensorId, TensorId]]:
        """The output of a launch that walked backwards: a node that reverses it once more reads it unchanged."""
        old = TensorId(self.node.name)
        readers = [use.node for use in self.graph.uses(old) if use.node not in self.backwards]
        turning = [name for name in readers if turns(self.graph, name, self.node)]
        rewired = [(TensorId(name), output) for name in turning]
        for name in turning:  # Keras reverses once more, and Bidirectional reverses that
            rewired += [(TensorId(again), output) for again in self.reversed_twice(name)]
        if len(turning) < len(readers):
            again = self.graph[self.node.inputs[0].node]
            rewired.append((old, self.writer.again(again, output, again.inputs[1])))
        return rewired

    def reversed_twice(self, name: str) -> Iterator[str]:
        """Nodes whose output is that of the node `name`, for they take back a reversal of it."""
        for use in self.graph.uses(TensorId(name)):
            for inner in self.graph.uses(TensorId(use.node)):
                if undoes(self.graph, inner.node, use.node):
                    yield inner.node

    def state(self, tensor: TensorId) -> TensorId:
        """An initial state without the dimension of layers."""
        before = self.graph[tensor.node]
        if before.op == "ExpandDims" and not self.backwards:
            spec = self.graph.specs.get(before.inputs[0])
            if spec is not None and spec.shape is not None and len(spec.shape) == 2:
                return before.inputs[0]
        return self.writer.reshape(tensor, self.dtype, (-1, self.sizes.units))

    def products(self, x: TensorId, kernel: TensorId, bias: TensorId | None) -> TensorId:
        """The gates' input products of all steps, `gates * units` wide, in one GEMM."""
        write, sizes = self.writer, self.sizes
        columns = len(sizes.gates) * sizes.units
        flat = write.matmul(write.reshape(x, self.dtype, (-1, sizes.inputs)), kernel, self.dtype)
        if bias is not None:
            flat = write.emit("BiasAdd", [flat, bias], {"T": DataType(self.dtype), "data_format": "NHWC"})
        known = self.known_sizes()
        if known.count(-1) == 2:
            return write.reshape(
                flat, self.dtype, (*(write.scalar_of_shape(x, self.dtype, n) for n in (0, 1)), columns)
            )
        return write.reshape(flat, self.dtype, (*known, columns))

    def known_sizes(self) -> tuple[int, int]:
        """Time and batch, in the order of the input; -1 where they are not known."""
        spec = self.graph.specs.get(self.node.inputs[0])
        first, second = spec.shape[:2] if spec and spec.shape else (None, None)
        return first or -1, second or -1

    def mask(self, x: TensorId) -> TensorId | None:
        """1 before the end of each sequence, time and batch in the order of `x`; None if all go to the end."""
        if self.node.op != "CudnnRNNV3" or self.goes_to_the_end(self.node.inputs[4]):
            return None
        write, (time, batch) = self.writer, _time_and_batch(self.node)
        steps = write.expanded(write.counted(write.scalar_of_shape(x, self.dtype, time)), SHAPE_DTYPE, batch)
        lengths = write.expanded(self.node.inputs[4], SHAPE_DTYPE, time)
        return write.cast(write.emit("Less", [steps, lengths], {"T": DataType(SHAPE_DTYPE)}), "bool", self.dtype)

    def goes_to_the_end(self, lengths: TensorId) -> bool:
        """Whether all lengths are the number of steps."""
        time = dimension_key(self.graph, self.node.inputs[0], _time_and_batch(self.node)[0])
        source = self.graph[lengths.node]
        known = self.graph.constants.get(source.name)
        if known is not None:
            return isinstance(time, int) and bool(np.all(known == time))
        return source.op == "Fill" and scalar_key(self.graph, source.inputs[1]) == time

    def weights(self) -> tuple[TensorId, TensorId, TensorId | None, TensorId | None]:
        """Kernel, recurrent kernel, the bias of the hoisted products, and the bias that stays in the cell."""
        found = None if self.opaque else self.traced()
        kernel, recurrent, bias, recurrent_bias = found if found is not None else self.unpacked()
        if self.sizes.mode == "gru":
            return kernel, recurrent, bias, recurrent_bias
        if bias is None or recurrent_bias is None:
            return kernel, recurrent, bias or recurrent_bias, None
        both = self.writer.emit("AddV2", [bias, recurrent_bias], {"T": DataType(self.dtype)})
        return kernel, recurrent, both, None

    def unpacked(self) -> tuple[TensorId, TensorId, TensorId | None, TensorId | None]:
        """The vector of all weights taken apart."""
        write, sizes = self.writer, self.sizes
        pieces = write.split(self.node.inputs[3], self.dtype, sizes.pieces, 0)
        count = len(sizes.gates)
        parts = [pieces[first : first + count] for first in range(0, 4 * count, count)]
        kernel, recurrent, bias, recurrent_bias = (
            write.joined([part[gate] for gate in sizes.gates], self.dtype, 0) for part in parts
        )
        kernel, recurrent = (
            write.transposed(write.reshape(part, self.dtype, (-1, width)), self.dtype, (1, 0))
            for part, width in ((kernel, sizes.inputs), (recurrent, sizes.units))
        )
        return kernel, recurrent, bias, recurrent_bias

    def traced(self) -> tuple[TensorId, TensorId, TensorId | None, TensorId | None] | None:
        """The tensors that the vector was packed of, where they have the form that the cell wants."""
        packed = trace(self.graph, self.node.inputs[3])
        if packed is None or packed.places.shape != (sum(self.sizes.pieces),):
            return None
        kernel, recurrent, bias, recurrent_bias = canonical(packed.places, self.sizes)
        matrices = [self.whole(packed, part) for part in (kernel, recurrent)]
        vectors = [self.part(packed, part) for part in (bias, recurrent_bias)]
        if matrices[0] is None or matrices[1] is None or "no" in vectors:
            return None
        ready = [part if part is None or isinstance(part, TensorId) else self.cut(*part) for part in vectors]
        return matrices[0], matrices[1], ready[0], ready[1]

    def whole(self, packed: Traced, part: Places) -> TensorId | None:
        """The source whose elements are exactly these."""
        source = packed.source_of(int(part.flat[0]))
        return packed.sources[source] if np.array_equal(packed.numbered(source), part) else None

    def part(self, packed: Traced, part: Places) -> TensorId | tuple[TensorId, int] | str | None:
        """A vector of a source: all of it, from some element on, None if it is 0, "no" if it is something else."""
        first = int(part.flat[0])
        source = packed.source_of(first)
        tensor, start = packed.sources[source], packed.starts[source]
        size = prod(packed.shapes[source])
        if first + part.size > start + size or not np.array_equal(part, np.arange(first, first + part.size)):
            return "no"
        if self.sizes.mode != "gru" and is_zero(self.graph, tensor):
            return None
        return tensor if packed.shapes[source] == part.shape else (tensor, first - start)

    def cut(self, tensor: TensorId, first: int) -> TensorId:
        """`len(gates) * units` elements of a bias of any shape."""
        write = self.writer
        flat = write.reshape(tensor, self.dtype, (-1,))
        return write.slice(flat, self.dtype, (first,), (len(self.sizes.gates) * self.sizes.units,))


def turns(graph: Graph, name: str, node: Node) -> bool:
    """Whether the node `name` turns the sequences of the `CudnnRNNV3` around, each up to its length."""
    turning = graph[name]
    if turning.op != "ReverseSequence" or node.op != "CudnnRNNV3" or turning.inputs[1] != node.inputs[4]:
        return False
    return (integer(turning.attrs["seq_dim"]), integer(turning.attrs.get("batch_dim", 0))) == _time_and_batch(node)


def undoes(graph: Graph, name: str, move: str) -> bool:
    """Whether the node `name` takes back what `move` did, which only reordered something."""
    node, before = graph[name], graph[move]
    if node.op != before.op or node.op not in MOVES:
        return False
    if node.op == "ReverseSequence":
        dims = [(integer(n.attrs["seq_dim"]), integer(n.attrs.get("batch_dim", 0))) for n in (node, before)]
        return node.inputs[1] == before.inputs[1] and dims[0] == dims[1]
    how, done = integers(graph, node.inputs[1]), integers(graph, before.inputs[1])
    if how is None or done is None:
        return False
    return bool(np.array_equal(how, np.argsort(done) if node.op == "Transpose" else done))


def canonical(places: Places, sizes: Sizes) -> tuple[Places, Places, Places, Places]:
    """Kernel `[inputs, gates * units]`, recurrent kernel, bias and recurrent bias, gates in the order of the cell."""
    pieces = np.split(places, np.cumsum(sizes.pieces)[:-1])
    count = len(sizes.gates)
    parts = [[pieces[first + gate] for gate in sizes.gates] for first in range(0, 4 * count, count)]
    kernel, recurrent = (np.concatenate([piece.reshape(sizes.units, -1).T for piece in part], 1) for part in parts[:2])
    bias, recurrent_bias = (np.concatenate(part) for part in parts[2:])
    return kernel, recurrent, bias, recurrent_bias
