"""Random steps of several replicas as tf.distribute builds them, and an executor that waits as collectives do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from graph_passes.analysis.peers import is_collective, meetings
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec

ELEMENTS = 1 << 14  # of 4 bytes: 64 KiB, the smallest that moves


@dataclass(frozen=True)
class Spmd:
    """Sizes of the layers' outputs, in units of 64 KiB; the layers each reads; lanes; gradients in each collective."""

    units: tuple[int, ...]
    skips: tuple[int, ...]
    lanes: int
    packs: int


@st.composite
def steps(draw: st.DrawFn) -> Spmd:
    """Nets of 2 to 9 layers, each of which reads the one before and perhaps an earlier one, on 2 to 4 lanes."""
    count = draw(st.integers(2, 9))
    units = tuple(draw(st.integers(1, 4)) for _ in range(count))
    skips = tuple(draw(st.integers(0, max(0, index - 1))) for index in range(count))
    return Spmd(units, skips, draw(st.integers(2, 4)), draw(st.integers(1, 3)))


def device(lane: int) -> str:
    """The name of a lane's device."""
    return f"/job:localhost/replica:0/task:0/device:GPU:{lane}"


@dataclass
class _Builder:
    nodes: list[Node] = field(default_factory=list)
    specs: dict[TensorId, TensorSpec] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, inputs: list[str], lane: int, units: int, after: str = "") -> str:
        control = [after] if after else []
        self.nodes.append(Node(name, op, [TensorId(i) for i in inputs], control, device=device(lane), outputs=1))
        self.specs[TensorId(name)] = TensorSpec("float32", 4, (units * ELEMENTS,))
        return name

    def constant(self, name: str, lane: int, value: int) -> str:
        self.nodes.append(Node(name, "Const", device=device(lane), outputs=1))
        self.specs[TensorId(name)] = TensorSpec("int32", 4, ())
        self.constants[name] = np.array(value, np.int32)
        return name


def training_step(net: Spmd) -> Graph:
    """Forward and backward of each replica, one replica after the other; then pack, reduce, unpack and update."""
    build = _Builder()
    weights: list[list[str]] = []
    for lane in range(net.lanes):
        for index, units in enumerate(net.units):
            reads = sorted({net.skips[index], index - 1} - {index, -1})
            build.add(f"f{index}/{lane}", "Conv2D", [f"f{i}/{lane}" for i in reads], lane, units)
        gradient, found = f"f{len(net.units) - 1}/{lane}", []
        for index in reversed(range(len(net.units))):
            found.append(build.add(f"w{index}/{lane}", "MatMul", [f"f{index}/{lane}", gradient], lane, 1))
            gradient = build.add(f"g{index}/{lane}", "Conv2DBackpropInput", [f"f{index}/{lane}", gradient], lane, units)
        weights.append(found)
    last = [""] * net.lanes
    for pack in range(net.packs):
        for lane in range(net.lanes):
            packed = weights[lane][pack :: net.packs]
            if not packed:
                continue
            whole = build.add(f"pack{pack}/{lane}", "ConcatV2", packed, lane, len(packed))
            given = {"size": net.lanes, "key": 1, "instance": 7, "token": 7}
            scalars = [build.constant(f"{what}{pack}/{lane}", lane, value) for what, value in given.items()]
            reduced = f"reduce{pack}/{lane}"
            build.add(reduced, "CollectiveReduceV2", [whole, *scalars], lane, len(packed), last[lane])
            last[lane] = reduced
            parts = build.add(f"unpack{pack}/{lane}", "SplitV", [reduced], lane, len(packed))
            build.add(f"scaled{pack}/{lane}", "Cumsum", [parts], lane, len(packed))
    losses = [f"f{len(net.units) - 1}/{lane}" for lane in range(net.lanes)]
    build.add("losses", "Pack", losses, 0, net.units[-1])
    return Graph(build.nodes, build.specs, build.constants)


@dataclass(frozen=True)
class Ran:
    """What came of a run: values by node, the peak of each lane in bytes, and what never ended."""

    values: dict[str, object]
    peaks: dict[str, int]
    stuck: frozenset[str]


def execute(graph: Graph, seed: int = 0) -> Ran:
    """Run the graph: any op that is ready is next, and a collective ends once all that it meets have begun."""
    draw = random.Random(seed)
    together = {name: meeting.members for meeting in meetings(graph) for name in meeting.members}
    waiting = {node.name: len(set(graph.predecessors(node))) for node in graph}
    ready = [name for name, count in waiting.items() if not count]
    values: dict[TensorId, object] = {}
    size: dict[TensorId, int] = {tensor: spec.nbytes or 0 for tensor, spec in graph.specs.items()}
    owner: dict[TensorId, TensorId] = {}
    held: dict[TensorId, int] = {}
    in_use: dict[str, int] = {}
    peaks: dict[str, int] = {}
    readers = {tensor: len(graph.uses(tensor)) for node in graph for tensor in graph.tensors(node)}
    begun: set[str] = set()
    done: set[str] = set()

    def hold(tensor: TensorId, buffer: TensorId) -> None:
        owner[tensor] = buffer
        if not held.get(buffer):
            where = graph[buffer.node].device
            in_use[where] = in_use.get(where, 0) + size[buffer]
            peaks[where] = max(peaks.get(where, 0), in_use[where])
        held[buffer] = held.get(buffer, 0) + 1

    def drop(tensor: TensorId) -> None:
        buffer = owner.pop(tensor, None)
        if buffer is not None:
            held[buffer] -= 1
            if not held[buffer]:
                in_use[graph[buffer.node].device] -= size[buffer]

    def end(name: str) -> None:
        node, output = graph[name], TensorId(name)
        inputs = [values[tensor] for tensor in node.inputs]
        if node.op == "MemOpOffload":
            values[output] = ("handle", inputs[0], node.inputs[0])
        elif node.op == "MemOpPrefetch":
            _, values[output], source = inputs[0]
            size[output] = size[source]
            hold(output, output)
        elif node.op == "MemOpAwait":
            values[output], size[output] = inputs[0], size[node.inputs[0]]
            hold(output, owner[node.inputs[0]])
        elif node.op == "Const":
            values[output] = name
        elif node.op != "MemOpRelease":
            original = name.removeprefix("tfmem/Recompute/")
            values[output] = hash((node.op, original, tuple(inputs)))
            size.setdefault(output, size.get(TensorId(original), 0))
            hold(output, output)
        for tensor in node.inputs:
            readers[tensor] -= 1
            if not readers[tensor]:
                drop(tensor)
        if node.outputs and not readers[output]:
            drop(output)
        done.add(name)
        for reader in dict.fromkeys(graph.successors(node)):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)

    while ready:
        name = ready.pop(draw.randrange(len(ready)))
        if is_collective(graph[name]):
            begun.add(name)
            if begun.issuperset(together[name]):
                for member in together[name]:
                    end(member)
        else:
            end(name)
    kept = {tensor.node: value for tensor, value in values.items() if not tensor.node.startswith("tfmem/")}
    return Ran(kept, peaks, frozenset(graph.nodes) - done)
