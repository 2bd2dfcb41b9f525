"""Random graphs as fusion sees them, and what a plan makes of one: values as texts, of the graph and of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from graph_passes.analysis.cost.kernel_costs import KernelDevice
from graph_passes.analysis.dependences import read_by, waited
from graph_passes.analysis.op_pattern import NodePattern, OpPattern
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import topological
from graph_passes.passes.fuse.partition.partition import Partition
from graph_passes.refusals import Reason

# One byte takes a second to move, a launch a hundred, so that times can be checked by hand.
UNIT = KernelDevice(
    name="unit",
    copies=((0.0, 0.0), (1.0, 1.0)),
    launch=100.0,
    barrier=10.0,
    block=64,
    chip=1 << 20,
    dispatch=50.0,
    region=100.0,
)

KINDS = {
    "Elementwise": OpPattern.ELEMENTWISE,
    "Layout": OpPattern.LAYOUT,
    "Rows": OpPattern.ROW_REDUCTION,
    "Columns": OpPattern.COLUMN_REDUCTION,
    "Scalar": OpPattern.SCALAR_REDUCTION,
    "Product": OpPattern.PRODUCT,
    "Batched": OpPattern.BATCHED_PRODUCT,
    "View": OpPattern.VIEW,
    "Gather": OpPattern.GATHER,
    "Zeros": OpPattern.CONSTANT,
    "Opaque": OpPattern.OPAQUE,
    "Const": OpPattern.CONSTANT,
    "Handle": OpPattern.OPAQUE,
    "NoOp": OpPattern.OPAQUE,
    "Read": OpPattern.READ,
    "Update": OpPattern.UPDATE,
}


class Nodes:
    """Builds a graph node by node. A size is the number of bytes of what a node makes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.op_patterns: dict[str, NodePattern] = {}
        self.specs: dict[TensorId, TensorSpec] = {}

    def add(
        self, op: str, *inputs: str, name: str = "", size: int = 8, control: Sequence[str] = (), device: str = ""
    ) -> str:
        """A node; the name of a variable's handle, given to a `Read` or `Update`, comes first. Returns its name."""
        name = name or f"{op.lower()}_{len(self.nodes)}"
        kind = KINDS[op]
        outputs = 0 if kind is OpPattern.UPDATE or op == "NoOp" else 1
        self.nodes.append(Node(name, op, [TensorId(i) for i in inputs], list(control), device, {}, outputs))
        operands, reads, writes = tuple(range(len(inputs))), (), ()
        if kind is OpPattern.READ:
            operands, reads = (), (0,)
        elif kind is OpPattern.UPDATE:
            operands, reads, writes = operands[1:], (0,), (0,)
        elif kind in (OpPattern.VIEW, OpPattern.CONSTANT):
            operands = operands[:1] if kind is OpPattern.VIEW else ()
        reason = Reason.NO_KERNEL(detail="an opaque op") if kind is OpPattern.OPAQUE else None
        self.op_patterns[name] = NodePattern(kind, reason, operands, reads, writes)
        if outputs:
            behind = TensorSpec("float32", 1, (size,)) if op == "Handle" else None
            self.specs[TensorId(name)] = TensorSpec("resource" if behind else "float32", 1, (size,), behind)
        return name

    def graph(self) -> Graph:
        """The graph of all nodes so far."""
        return Graph(self.nodes, self.specs)


@st.composite
def graphs(draw: Any, most: int = 24) -> tuple[Graph, dict[str, NodePattern]]:
    """A graph in which accesses of a variable, one of which writes it, have an order by control edges."""
    made = Nodes()
    handles = [made.add("Handle", size=draw(st.sampled_from([4, 400]))) for _ in range(draw(st.integers(0, 2)))]
    values = [made.add("Opaque") for _ in range(draw(st.integers(1, 2)))]
    written: dict[str, list[str]] = {handle: [] for handle in handles}  # its last update, if there was one
    seen: dict[str, list[str]] = {handle: [] for handle in handles}  # its reads since
    plain = ["Elementwise"] * 4 + ["Rows", "Columns", "Scalar", "Product", "Batched", "View", "Layout", "Gather"]
    plain += ["Zeros", "Const", "Opaque", "NoOp"]
    for _ in range(draw(st.integers(1, most))):
        op = draw(st.sampled_from([*plain, *(["Read", "Read", "Update"] if handles else [])]))
        names = [node.name for node in made.nodes if node.op != "Handle"]
        control = draw(st.lists(st.sampled_from(names), max_size=1)) if draw(st.integers(0, 5)) == 0 else []
        size = draw(st.sampled_from([1, 8, 100, 3000]))
        if op == "NoOp":
            made.add(op, control=draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)))
            continue
        if op in ("Read", "Update"):
            handle = draw(st.sampled_from(handles))
            before = [*written[handle], *(seen[handle] if op == "Update" else [])]
            inputs = [draw(st.sampled_from(values))] if op == "Update" else []
            name = made.add(op, handle, *inputs, control=list(dict.fromkeys([*control, *before])))
            if op == "Update":
                written[handle], seen[handle] = [name], []
            else:
                seen[handle].append(name)
                values.append(name)
            continue
        inputs = [] if op == "Const" else draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        if op in ("View", "Zeros"):
            inputs = inputs[:2] if op == "View" else inputs[:1]
        values.append(made.add(op, *inputs, size=size, control=control))
    return made.graph(), made.op_patterns


def run_graph(graph: Graph, op_patterns: Mapping[str, NodePattern]) -> dict[str, str]:
    """What each node makes, and what each variable holds in the end, as a text that says how it was computed."""
    values: dict[str, str] = {}
    for name in topological(graph):
        _run(graph, op_patterns, name, values, values)
    return values


def run_plan(graph: Graph, op_patterns: Mapping[str, NodePattern], plan: Partition) -> dict[str, str]:
    """The results of a planned graph: each region runs as a whole, each kernel reads variables before it writes any.

    Raises:
        KeyError: something is read that was not made yet.
    """
    regions = {name: region for region in plan.regions for name in region.members}
    waiting = {name: _needs(graph, op_patterns, name, name in regions) for name in graph.nodes}
    values: dict[str, str] = {}
    done: set[str] = set()
    pending = list(graph.nodes)
    while pending:
        ready = []
        for name in pending:
            members = regions[name].members if name in regions else (name,)
            outside = {needed for member in members for needed in waiting[member]} - set(members)
            if outside <= done:
                ready = list(members)
                break
        if not ready:
            raise KeyError(f"a cycle: none of {pending} can run")
        if ready[0] in regions:
            for step in regions[ready[0]].steps:
                for member in step.members:
                    missing = waiting[member] - done - set(step.members)
                    if missing:
                        raise KeyError(f"{member} runs before {missing}")
                before = dict(values)
                for member in step.members:
                    _run(graph, op_patterns, member, values, before)
                done |= set(step.members)
        else:
            _run(graph, op_patterns, ready[0], values, values)
        done |= set(ready)
        pending = [name for name in pending if name not in done]
    return values


def _needs(graph: Graph, op_patterns: Mapping[str, NodePattern], name: str, inside: bool) -> set[str]:
    node = graph[name]
    constant = op_patterns[name].pattern is OpPattern.CONSTANT
    read = read_by(op_patterns, node) if inside and not constant else node.inputs
    return {tensor.node for tensor in read} | set(waited(graph, node) if inside else node.control)


def _run(
    graph: Graph, op_patterns: Mapping[str, NodePattern], name: str, values: dict[str, str], before: Mapping[str, str]
) -> None:
    """Adds what a node makes to `values`; variables are read as `before` has them."""
    node, op_pattern = graph[name], op_patterns[name]
    arguments = [
        f"{tensor.node}" if op_patterns[tensor.node].pattern is OpPattern.CONSTANT else values[tensor.node]
        for tensor in (node.inputs[index] for index in op_pattern.operands)
    ]
    if op_pattern.reads:
        handle = node.inputs[op_pattern.reads[0]].node
        arguments.insert(0, before.get(f"held {handle}", handle))
    text = arguments[0] if op_pattern.pattern is OpPattern.READ else f"{name}({', '.join(arguments)})"
    if op_pattern.writes:
        values[f"held {node.inputs[op_pattern.writes[0]].node}"] = str(hash(text))
    values[name] = text if len(text) < 200 else str(hash(text))
