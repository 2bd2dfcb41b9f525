"""A split plan as rewrites: for each region, its ops once for each piece. Pure.

    x -> f -> y -> reader           slice(x, 0) -> f -> y0 -> |
    x -> g -> w, a sum              slice(x, 1) -> f -> y1 -> | rows of one buffer -> reader
                                    slice(x, 0) -> g -> w0,  slice(x, 1) -> g -> w1,  w0 + w1 -> w

A slice of whole rows shares its tensor's memory. Results by rows are written into one buffer. Sums are added in the
order of the pieces. The slices of a piece wait for all ops of the piece before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graph_passes.analysis.batch.labels import Label, Rows, Summed
from graph_passes.graph.ir import DataType, Graph, Literal, Node, TensorId, TensorSpec
from graph_passes.graph.merged import merged_pairs
from graph_passes.graph.ops import ROWS_ATTRIBUTE, WRITES_ROWS, copied
from graph_passes.graph.order import topological
from graph_passes.graph.rewrite import Names, NewNode, Rewrite, apply_rewrites
from graph_passes.passes.split.plan import SplitChoice
from graph_passes.passes.split.split_regions import SplitPlan, SplitRegion

_ALIGNED = 64  # TensorFlow shares the memory of a slice that begins at a multiple of this
_IN_PLACE = frozenset({"float32", "float64", "float16"})  # dtypes of InplaceUpdate on both devices


@dataclass
class _Written:
    """What a region becomes.

    Attributes:
        nodes: new nodes, in topological order.
        specs: of the tensors that they make.
        constants: values of new Const nodes.
        results: tensor of a member -> what its readers read now.
        end: the node that all ops of the last piece have run before.
    """

    nodes: list[NewNode] = field(default_factory=list)
    specs: dict[TensorId, TensorSpec] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[TensorId, TensorId] = field(default_factory=dict)
    end: str = ""


class _Writer:
    def __init__(self, region: SplitRegion, graph: Graph, names: Names) -> None:
        self.region, self.graph, self.names = region, graph, names
        self.rules, self.labels = region.separable.rules, region.separable.labels
        self.inside = frozenset((*region.members, *region.again))
        self.exits = frozenset(region.exits)
        # oneDNN merges no op that has a control input. Else moves would decide which of these it adds, in its order.
        self.apart = {goes for _, goes in merged_pairs(graph) if graph[goes].op == "BiasAddGrad"}
        place = {name: index for index, name in enumerate(region.separable.order)}
        self.ordered = sorted(self.inside, key=place.__getitem__)
        self.written = _Written()
        self.before = ""  # the end of the piece before
        self.made: dict[TensorId, TensorId] = {}  # tensor -> what this piece makes of it
        self.ran: dict[str, str] = {}  # op -> its run in this piece
        self.slices: dict[tuple[TensorId, Rows], TensorId] = {}
        self.known: dict[tuple[object, ...], TensorId] = {}
        self.parts: dict[TensorId, list[TensorId]] = {}

    def write(self) -> _Written:
        first = 0
        for number, count in enumerate(self.region.pieces):
            self.made, self.ran, self.slices = {}, {}, {}
            for name in self.ordered:
                self.run(self.graph[name], number, first, count)
                if name in self.ran:
                    self.leave(name, number, first, count)
            first += count
            self.finish(number)
        for name in self.region.members:  # or what reads the constant would wait for the last piece
            for waiting in self.graph.waiting(self.graph[name]):
                if self.graph[waiting].op == "Const":
                    self.written.results[TensorId(waiting)] = self.free(TensorId(waiting))
        self.written.end = self.before
        return self.written

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, object],
        specs: Sequence[TensorSpec],
        like: Node,
        control: Sequence[str] = (),
    ) -> TensorId:
        fresh = self.names.fresh(f"tfmem/{self.region.name}/{name}")
        node = NewNode(fresh, op, tuple(inputs), attrs, like.device, tuple(control), len(specs))
        self.written.nodes.append(node)
        self.written.specs.update((TensorId(fresh, index), spec) for index, spec in enumerate(specs))
        return TensorId(fresh)

    def run(self, node: Node, number: int, first: int, count: int) -> None:
        """The op on one piece."""
        rule = self.rules[node.name]
        changed = {index: (element, inner) for index, element, inner in rule.shapes}
        inputs = []
        for index, tensor in enumerate(node.inputs):
            rows = rule.inputs[index]
            if index in changed:
                element, inner = changed[index]
                inputs.append(self.shape(tensor, element, inner * count, node))
            elif rows is None:
                inputs.append(self.free(tensor))
            elif tensor in self.made and self.labels.get(tensor) == rows:
                inputs.append(self.made[tensor])
            else:
                inputs.append(self.slice(tensor, rows, number, first, count, node))
        specs = [
            self.part(self.graph.specs[tensor], label, count)
            for tensor, label in zip(self.graph.tensors(node), rule.outputs, strict=True)
        ]
        op, attrs = node.op, copied(node)
        if op == "EnsureShape":  # it held for all of the batch
            op, attrs = "Identity", {"T": DataType(specs[0].dtype)}
        waits = [self.ran.get(before, before) for before in node.control]
        if node.name in self.apart:
            waits.append(inputs[0].node)
        made = self.add(f"{number}/{node.name}", op, inputs, attrs, specs, node, waits)
        self.ran[node.name] = made.node
        for index, tensor in enumerate(self.graph.tensors(node)):
            self.made[tensor] = TensorId(made.node, index)

    def part(self, spec: TensorSpec, label: Label, count: int) -> TensorSpec:
        """What a piece makes of a tensor."""
        if not isinstance(label, Rows) or spec.shape is None:
            return spec
        shape = list(spec.shape)
        shape[label.axis] = label.inner * count
        return replace(spec, shape=tuple(shape))

    def constant(self, values: Sequence[int], dtype: str, like: Node, scalar: bool = False) -> TensorId:
        key = ("Const", tuple(values), dtype, like.device, scalar)
        if key not in self.known:
            shape = () if scalar else (len(values),)
            attrs = {"dtype": DataType(dtype), "value": Literal(dtype, shape, tuple(values))}
            itemsize = np.dtype(np.float32 if dtype == "bfloat16" else dtype).itemsize
            spec = TensorSpec(dtype, 2 if dtype == "bfloat16" else itemsize, shape)
            made = self.known[key] = self.add("Const", "Const", (), attrs, [spec], like)
            if dtype != "bfloat16":
                self.written.constants[made.node] = np.array(values, dtype).reshape(shape)
        return self.known[key]

    def free(self, tensor: TensorId) -> TensorId:
        """`tensor`; of a constant that waits for ops, which may be in the region, a copy that waits for none."""
        node = self.graph[tensor.node]
        if node.op != "Const" or not node.control:
            return tensor
        key = ("copy", tensor.node)
        if key not in self.known:
            self.known[key] = self.add(node.name, "Const", (), copied(node), [self.graph.specs[tensor]], node)
            if node.name in self.graph.constants:
                self.written.constants[self.known[key].node] = self.graph.constants[node.name]
        return self.known[key]

    def shape(self, tensor: TensorId, element: int, rows: int, like: Node) -> TensorId:
        """The constant shape `tensor` with another number of rows."""
        numbers = [int(number) for number in self.graph.constants[tensor.node].reshape(-1)]
        numbers[element] = rows
        return self.constant(numbers, self.graph.specs[tensor].dtype, like)

    def slice(self, tensor: TensorId, rows: Rows, number: int, first: int, count: int, like: Node) -> TensorId:
        """The rows of a piece of a tensor that is there as a whole."""
        if (tensor, rows) in self.slices:
            return self.slices[tensor, rows]
        spec = self.graph.specs[tensor]
        sizes = self.graph.sizes(tensor) or ()
        begin, size = [0] * len(sizes), list(sizes)
        begin[rows.axis], size[rows.axis] = first * rows.inner, count * rows.inner
        ends = [self.constant(numbers, "int32", like) for numbers in (begin, size)]
        attrs: dict[str, object] = {"T": DataType(spec.dtype), "Index": DataType("int32")}
        offset = begin[0] * spec.itemsize * int(np.prod(sizes[1:], dtype=np.int64))
        if rows.axis == 0 and offset % _ALIGNED == 0:
            attrs[ROWS_ATTRIBUTE] = True
        control = [self.before] if self.before else []
        name = f"{number}/Slice/{tensor.node}"
        part = self.part(spec, rows, count)
        made = self.add(name, "Slice", [self.free(tensor), *ends], attrs, [part], like, control)
        if ROWS_ATTRIBUTE in attrs and number == len(self.region.pieces) - 1 and spec.dtype in _IN_PLACE:
            # What is written over the last slice that there is keeps all of the tensor in memory.
            made = self.add(f"{name}/Own", "DeepCopy", [made], {"T": attrs["T"]}, [part], like)
        self.slices[tensor, rows] = made
        return made

    def leave(self, name: str, number: int, first: int, count: int) -> None:
        """What other ops read of the op: its rows go into one buffer, or what it makes is added."""
        node, rule = self.graph[name], self.rules[name]
        for index, tensor in enumerate(self.graph.tensors(node)):
            if tensor not in self.exits:
                continue
            label, made = rule.outputs[index], self.made[tensor]
            if isinstance(label, Summed):
                self.written.results[tensor] = self.sum(tensor, made, label, number, count, node)
            elif isinstance(label, Rows) and label.axis == 0 and self.graph.specs[tensor].dtype in _IN_PLACE:
                self.written.results[tensor] = self.put(tensor, made, label, number, first, count, node)
            elif isinstance(label, Rows):
                self.written.results[tensor] = self.join(tensor, made, label, node)
            else:
                self.written.results[tensor] = made

    def sum(self, tensor: TensorId, made: TensorId, label: Summed, number: int, count: int, node: Node) -> TensorId:
        spec = self.graph.specs[tensor]
        attrs = {"T": DataType(spec.dtype)}
        if label.weighted:
            share = self.constant_share(spec, count, node)
            made = self.add(f"{number}/Share/{node.name}", "Mul", [made, share], attrs, [spec], node)
        if number == 0:
            return made
        before = self.written.results[tensor]
        return self.add(f"{number}/Add/{node.name}", "AddV2", [before, made], attrs, [spec], node)

    def constant_share(self, spec: TensorSpec, count: int, like: Node) -> TensorId:
        key = ("share", spec.dtype, count, like.device)
        if key not in self.known:
            share = count / self.region.separable.batch
            attrs = {"dtype": DataType(spec.dtype), "value": Literal(spec.dtype, (), (share,))}
            self.known[key] = self.add("Share", "Const", (), attrs, [replace(spec, shape=())], like)
        return self.known[key]

    def put(
        self, tensor: TensorId, made: TensorId, label: Rows, number: int, first: int, count: int, node: Node
    ) -> TensorId:
        """The rows of one buffer, written in place."""
        spec = self.graph.specs[tensor]
        if number == 0:
            sizes = self.constant([size or 0 for size in spec.shape or ()], "int32", node)
            attrs: dict[str, object] = {"dtype": DataType(spec.dtype), "init": False}
            buffer = self.add(f"Rows/{node.name}", "Empty", [sizes], attrs, [spec], node, [made.node])
        else:
            buffer = self.written.results[tensor]
        rows = range(first * label.inner, (first + count) * label.inner)
        places = self.constant(list(rows), "int32", node)
        attrs = {"T": DataType(spec.dtype)}
        return self.add(f"{number}/Put/{node.name}", WRITES_ROWS, [buffer, places, made], attrs, [spec], node)

    def join(self, tensor: TensorId, made: TensorId, label: Rows, node: Node) -> TensorId:
        """The pieces one behind the other, once the last one is there."""
        parts = self.parts.setdefault(tensor, [])
        parts.append(made)
        if len(parts) < len(self.region.pieces):
            return made
        spec = self.graph.specs[tensor]
        axis = self.constant([label.axis], "int32", node, scalar=True)
        attrs = {"T": DataType(spec.dtype), "N": len(parts), "Tidx": DataType("int32")}
        return self.add(f"Join/{node.name}", "ConcatV2", [*parts, axis], attrs, [spec], node)

    def finish(self, number: int) -> None:
        """The node that every op of this piece has run before."""
        read = {tensor.node for node in self.written.nodes for tensor in node.inputs}
        waited = {name for node in self.written.nodes for name in node.control}
        ends = [
            node.name
            for node in self.written.nodes
            if node.name not in read and node.name not in waited and node.op not in ("Const", "NoOp")
        ]
        like = self.graph[self.ordered[0]]
        self.before = self.add(f"{number}/End", "NoOp", (), {}, (), like, ends).node


def split_rewrites(choice: SplitChoice, graph: Graph) -> list[Rewrite]:
    """The pieces of each region in place of its ops; the last region first, for it may make again what earlier ones
    make, and then no longer reads it."""
    return [rewrite for rewrite, _ in _rewrites(choice.plan, graph)] if choice.plan else []


def split_graph(plan: SplitPlan, graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A copy of `graph` that runs the plan, with the shapes of all tensors, and the order of its ops."""
    edited, order = graph.copy(), list(plan.regions[0].separable.order if plan.regions else topological(graph))
    rewrites = _rewrites(plan, graph)
    apply_rewrites([rewrite for rewrite, _ in rewrites], edited)
    for region, (rewrite, written) in zip(reversed(plan.regions), rewrites, strict=True):
        edited.specs.update(written.specs)
        edited.constants.update(written.constants)
        fetched = [name for name, _ in rewrite.renamed]
        edited.specs.update((TensorId(name), graph.specs[TensorId(name)]) for name in fetched)
        order = _placed(graph, order, region, [*(node.name for node in rewrite.nodes), *fetched])
    return edited, tuple(name for name in order if name in edited.nodes)


def _rewrites(plan: SplitPlan, graph: Graph) -> list[tuple[Rewrite, _Written]]:
    names = Names(graph)
    found = []
    for region in reversed(plan.regions):
        written = _Writer(region, graph, names).write()
        renamed = tuple(
            (tensor.node, written.results[tensor])
            for tensor in region.exits
            if graph[tensor.node].outputs == 1 and tensor in plan.fetched
        )
        rewrite = Rewrite(
            region.name,
            tuple(written.nodes),
            rewired=tuple(written.results.items()),
            replaced=region.members,
            successor=written.end,
            renamed=renamed,
        )
        found.append((rewrite, written))
    return found


def _placed(graph: Graph, order: Sequence[str], region: SplitRegion, block: Sequence[str]) -> list[str]:
    """`order` with the pieces where the last op of the region ran, and behind them what reads them."""
    members = frozenset(region.members)
    later = (
        graph.reached(members, lambda node: [name for name in graph.successors(node) if graph[name].op != "Const"])
        - members
    )
    last = max(index for index, name in enumerate(order) if name in members)
    before = [name for name in order[:last] if name not in members and name not in later]
    behind = [name for name in order[:last] if name in later]
    return [*before, *block, *behind, *order[last + 1 :]]
