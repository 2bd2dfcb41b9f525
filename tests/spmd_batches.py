"""Random steps of several replicas that have a batch, as tf.distribute builds them, and what NumPy makes of them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from graph_passes.analysis.peers import is_collective, meetings
from graph_passes.graph.ir import Graph, Literal, Node, TensorId, TensorSpec, boolean
from tests.spmd_graphs import device


@dataclass(frozen=True)
class Batches:
    """A net, and the batches of its replicas.

    Attributes:
        widths: of the layers' outputs.
        skips: the earlier layer that each reads beside the one before.
        borders: layers whose mean over the batch is subtracted: of the replica's ("own"), or of all replicas ("all").
        batches: how many examples each replica has.
        packs: how many collectives the gradients are summed in.
    """

    widths: tuple[int, ...]
    skips: tuple[int, ...]
    borders: tuple[str, ...]
    batches: tuple[int, ...]
    packs: int = 1


@st.composite
def nets(draw: st.DrawFn) -> Batches:
    """Nets of 1 to 5 layers on 2 or 3 lanes, whose batches differ by at most one example."""
    count, lanes, batch = draw(st.integers(1, 5)), draw(st.integers(2, 3)), draw(st.integers(3, 9))
    return Batches(
        widths=tuple(draw(st.integers(1, 4)) for _ in range(count)),
        skips=tuple(draw(st.integers(-1, max(-1, index - 2))) for index in range(count)),
        borders=tuple(draw(st.sampled_from(["", "", "own", "all"])) for _ in range(count)),
        batches=tuple(batch - draw(st.integers(0, 1)) for _ in range(lanes)),
        packs=draw(st.integers(1, 3)),
    )


@dataclass
class _Builder:
    nodes: list[Node] = field(default_factory=list)
    specs: dict[TensorId, TensorSpec] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, inputs: Sequence[str], lane: int, shape: Sequence[int], **attrs: Any) -> str:
        where = "" if op in ("Placeholder", "VariableV2") else device(lane)
        self.nodes.append(Node(name, op, [TensorId(each) for each in inputs], attrs=attrs, device=where, outputs=1))
        self.specs[TensorId(name)] = TensorSpec("float32", 4, tuple(shape))
        return name

    def constant(self, name: str, lane: int, value: Any) -> str:
        self.constants[name] = np.array(value, np.int32)
        self.add(name, "Const", [], lane, self.constants[name].shape)
        self.specs[TensorId(name)] = TensorSpec("int32", 4, self.constants[name].shape)
        return name

    def collective(self, name: str, given: str, lane: int, lanes: int, shape: Sequence[int], after: str) -> str:
        numbers = {"size": lanes, "key": 1, "instance": 7, "token": 7}
        scalars = [self.constant(f"{what}/{name}", lane, value) for what, value in numbers.items()]
        self.add(name, "CollectiveReduceV2", [given, *scalars], lane, shape)
        self.nodes[-1].control += [after] if after else []
        return name


def batched_step(net: Batches, scale: int = 1) -> Graph:
    """Forward and backward of each replica; then pack, reduce and update. Widths are in units of `scale` numbers."""
    build, lanes = _Builder(), len(net.batches)
    last = [""] * lanes
    inner: list[list[tuple[str, int]]] = []
    for lane, batch in enumerate(net.batches):
        build.add(f"x/{lane}", "Placeholder", [], lane, (batch, scale))
        build.constant(f"rows/{lane}", lane, [0])
        build.constant(f"every/{lane}", lane, [0, 1])
        made, widths = [f"x/{lane}"], [scale, *(scale * width for width in net.widths)]
        for index, width in enumerate(widths[1:]):
            parts = []
            for place in dict.fromkeys((index, net.skips[index] + 1)):
                build.add(f"w{index}_{place}/{lane}", "VariableV2", [], lane, (widths[place], width))
                reads = [made[place], f"w{index}_{place}/{lane}"]
                parts.append(build.add(f"p{index}_{place}/{lane}", "MatMul", reads, lane, (batch, width)))
            sums = parts[0] if len(parts) == 1 else build.add(f"s{index}/{lane}", "AddV2", parts, lane, (batch, width))
            if net.borders[index]:
                mean = build.add(f"mean{index}/{lane}", "Mean", [sums, f"rows/{lane}"], lane, (width,))
                if net.borders[index] == "all":
                    mean = build.collective(f"means{index}/{lane}", mean, lane, lanes, (width,), last[lane])
                    last[lane] = mean
                build.nodes.append(
                    Node(f"moving{index}/{lane}", "AssignSubVariableOp", [TensorId(mean)], stateful=True)
                )
                build.nodes[-1].device = device(lane)
                sums = build.add(f"c{index}/{lane}", "Sub", [sums, mean], lane, (batch, width))
            made.append(build.add(f"f{index}/{lane}", "Relu", [sums], lane, (batch, width)))
        build.add(f"squares/{lane}", "Square", [made[-1]], lane, (batch, widths[-1]))
        build.add(f"loss/{lane}", "Mean", [f"squares/{lane}", f"every/{lane}"], lane, ())
        flows: dict[int, list[str]] = {
            len(net.widths): [build.add(f"d/{lane}", "Neg", [made[-1]], lane, (batch, widths[-1]))]
        }
        weights = []
        for index in reversed(range(len(net.widths))):
            width, flow = widths[index + 1], flows[index + 1]
            shape = (batch, width)
            flow_in = flow[0] if len(flow) == 1 else build.add(f"df{index}/{lane}", "AddV2", flow[:2], lane, shape)
            for more, extra in enumerate(flow[2:]):
                flow_in = build.add(f"df{index}_{more}/{lane}", "AddV2", [flow_in, extra], lane, shape)
            back = build.add(f"r{index}/{lane}", "ReluGrad", [flow_in, made[index + 1]], lane, shape)
            for place in dict.fromkeys((index, net.skips[index] + 1)):
                sizes = (widths[place], width)
                name = f"dw{index}_{place}/{lane}"
                build.add(name, "MatMul", [made[place], back], lane, sizes, transpose_a=True)
                weights.append((name, sizes[0] * sizes[1]))
                reads = [back, f"w{index}_{place}/{lane}"]
                name = f"dx{index}_{place}/{lane}"
                build.add(name, "MatMul", reads, lane, (batch, widths[place]), transpose_b=True)
                flows.setdefault(place, []).append(name)
        inner.append(weights)
    for pack in range(net.packs):
        for lane in range(lanes):
            packed = inner[lane][pack :: net.packs]
            if not packed:
                continue
            flat = []
            for name, size in packed:
                build.constant(f"flat/{name}", lane, [size])
                flat.append(build.add(f"1d/{name}", "Reshape", [name, f"flat/{name}"], lane, (size,)))
            axis, total = build.constant(f"axis{pack}/{lane}", lane, 0), sum(size for _, size in packed)
            whole = build.add(f"pack{pack}/{lane}", "ConcatV2", [*flat, axis], lane, (total,))
            last[lane] = build.collective(f"reduce{pack}/{lane}", whole, lane, lanes, (total,), last[lane])
            node = Node(f"train{pack}/{lane}", "AssignSubVariableOp", [TensorId(last[lane])], stateful=True)
            node.device = device(lane)
            build.nodes.append(node)
    losses = [f"loss/{lane}" for lane in range(lanes)]
    build.add("losses", "AddN", losses, 0, ())
    return Graph(build.nodes, build.specs, build.constants)


def fed(name: str, shape: Sequence[int | None]) -> np.ndarray:
    """What an input or a variable holds; a variable is the same in all lanes."""
    base = name if name.startswith("x/") else name.partition("/")[0]
    return np.random.default_rng(zlib.crc32(base.encode())).normal(size=[size or 0 for size in shape])


def execute(graph: Graph, seed: int = 0) -> tuple[dict[str, np.ndarray], list[str]]:
    """Run the graph: any op that is ready is next, and a collective ends once all that it meets have begun.

    Returns:
        What each update and each fetched loss is given, and the names of nodes that never end.
    """
    draw = random.Random(seed)
    together = {name: meeting.members for meeting in meetings(graph) for name in meeting.members}
    waiting = {node.name: len(set(graph.predecessors(node))) for node in graph}
    ready = [name for name, count in waiting.items() if not count]
    values: dict[TensorId, Any] = {}
    kept: dict[str, np.ndarray] = {}
    begun: set[str] = set()
    done: set[str] = set()

    def end(name: str) -> None:
        node = graph[name]
        given = [values[tensor] for tensor in node.inputs]
        if node.op == "AssignSubVariableOp" or name == "losses":
            kept[name] = sum(given)
        if node.outputs and node.op != "AssignSubVariableOp":
            values[TensorId(name)] = _computed(graph, node, given, [values[TensorId(m, 0)] for m in met[name]])
        done.add(name)
        for reader in dict.fromkeys(graph.successors(node)):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)

    met: dict[str, list[str]] = {}
    while ready:
        name = ready.pop(draw.randrange(len(ready)))
        members = together.get(name, (name,))
        begun.add(name)
        if is_collective(graph[name]) and not begun.issuperset(members):
            continue
        for member in members:
            met[member] = [graph[each].inputs[0].node for each in members] if is_collective(graph[member]) else []
            end(member)
    return kept, sorted(set(graph.nodes) - done)


def _computed(graph: Graph, node: Node, given: Sequence[Any], met: Sequence[Any]) -> Any:
    """What an op makes of its inputs; `met`: what a collective and those that it meets are given."""
    match node.op:
        case "Placeholder" | "VariableV2":
            return fed(node.name, graph.specs[TensorId(node.name)].shape or ())
        case "Const":
            literal = node.attrs.get("value")
            if node.name in graph.constants:
                return graph.constants[node.name]
            assert isinstance(literal, Literal)
            return np.array(literal.values).reshape(literal.shape)
        case "MatMul":
            left, right = given
            left = left.T if boolean(node.attrs.get("transpose_a", False)) else left
            return left @ (right.T if boolean(node.attrs.get("transpose_b", False)) else right)
        case "Slice":
            places = tuple(slice(first, first + size) for first, size in zip(given[1], given[2], strict=True))
            return given[0][places]
        case "DeepCopy":
            return given[0].copy()
        case "Empty":
            return np.full(given[0], np.nan)
        case "InplaceUpdate":
            given[0][given[1]] = given[2]
            return given[0]
        case "Mean":
            return given[0].mean(tuple(given[1]))
        case "Reshape":
            return given[0].reshape(given[1])
        case "ConcatV2":
            return np.concatenate(given[:-1], int(given[-1]))
        case "CollectiveReduceV2":
            return np.sum(met, axis=0)
        case "MemOpOffload" | "MemOpPrefetch" | "MemOpAwait":
            return given[0]
    return _ELEMENTWISE[node.op](*given)


_ELEMENTWISE: dict[str, Any] = {
    "AddV2": np.add,
    "AddN": lambda *given: sum(given),
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Square": np.square,
    "Relu": lambda x: np.maximum(x, 0),
    "ReluGrad": lambda dy, y: dy * (y > 0),
    "Identity": lambda x: x,
}
