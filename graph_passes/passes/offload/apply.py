"""The MemOps of a `StepPlan` for each device, as rewrites of the graph. Pure.

    a -> f ... b          becomes          a -> f, Offload(a) ... Release(a) ... Prefetch -> Await -> b

One chain of control edges, the *control chain*, runs through the MemOps and through every op whose memory matters,
in the planned order. What a plan, which has positions, does not say follows from the graph: a buffer moves as the view
of it that is read after the gap, and an op that a kernel library merges with one of these waits for
what that one waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.analysis.memory.chains import SMALLEST_MOVED, read_across
from graph_passes.analysis.memory.loop_lists import VARIANT
from graph_passes.analysis.memory.simulate import Move, by_position
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import GraphError
from graph_passes.graph.ir import AttrValue, DataType, Graph, Shape, TensorId, Use
from graph_passes.graph.ops import writes
from graph_passes.graph.rewrite import Names, NewNode, Rewrite
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import OffloadPlan, Probing, StepPlan
from graph_passes.refusals import Reason


class _Writer:
    def __init__(
        self,
        graph: Graph,
        names: Names,
        timeline: Timeline,
        plan: OffloadPlan,
        options: OffloadOptions,
        spill_key: str,
    ) -> None:
        self.graph, self.names, self.timeline, self.plan = graph, names, timeline, plan
        self.options, self.spill_key = options, spill_key
        self.nodes: list[NewNode] = []
        self.rewired: list[tuple[Use, TensorId]] = []
        self.order: list[tuple[str, str]] = []
        self.position = {step.node: index for index, step in enumerate(timeline.steps)}
        self.previous = ""
        self.in_order = frozenset(plan.ordered)
        self.moved: dict[int, TensorId] = {}  # move -> the tensor it moves
        self.across: dict[int, list[TensorId]] = {}  # move -> all views that are read after it
        self.handles: dict[int, TensorId] = {}
        self.fetched: dict[int, TensorId] = {}
        self.current: dict[TensorId, TensorId] = {}  # tensor -> the Await that stands for it by now

    def insert(
        self, index: int, op: str, inputs: Sequence[TensorId], attrs: Mapping[str, AttrValue], outputs: int = 1
    ) -> TensorId:
        moved = self.moved[index]
        op += "Lists" if self.is_list(moved) else ""
        return self.next(f"tfmem/{op}/{moved.node}", op, inputs, attrs, self.graph[moved.node].device, outputs)

    def next(
        self, name: str, op: str, inputs: Sequence[TensorId], attrs: Mapping[str, object], device: str, outputs: int = 1
    ) -> TensorId:
        """A node that becomes the next one of the control chain."""
        control = (self.previous,) if self.previous else ()
        self.previous = self.names.fresh(name)
        self.nodes.append(NewNode(self.previous, op, tuple(inputs), attrs, device, control, outputs))
        return TensorId(self.previous)

    def offload(self, index: int) -> None:
        move = self.plan.moves[index]
        views = self.timeline.buffers[move.buffer].views
        across = self.across[index] = read_across(self.graph, self.position, views, move.last)
        moved = self.moved[index] = across[0]
        attrs: dict[str, AttrValue] = {
            **self.kind(index),
            "mechanism": self.options.mechanism,
            "label": str(moved),
            "spill_key": self.spill_key,
            "spill_budget": self.options.spill_budget,
            "host_budget": self.options.host_budget,
        }
        self.handles[index] = self.insert(index, "MemOpOffload", self.sources(index), attrs)

    def release(self, index: int) -> None:
        self.insert(index, "MemOpRelease", [*self.sources(index), self.handles[index]], self.kind(index), outputs=0)

    def prefetch(self, index: int) -> None:
        moved = self.moved[index]
        attrs = self.kind(index)
        if not self.is_list(moved):
            attrs["shape"] = Shape(self.graph.specs[moved].shape)
        self.fetched[index] = self.insert(index, "MemOpPrefetch", [self.handles[index]], attrs, self.count(index))

    def arrive(self, index: int) -> None:
        move = self.plan.moves[index]
        arrived = self.recompute(move) if move.recomputed else self.awaited(index)
        across = read_across(self.graph, self.position, self.timeline.buffers[move.buffer].views, move.last)
        for place, view in enumerate(across):
            there = arrived
            if self.is_list(view):  # each is a separate output
                there = TensorId(arrived.node, view.index if move.recomputed else place)
            self.current[view] = there
            for use in list(self.graph.uses(view)):
                if self.position.get(use.node, -1) >= move.next:
                    self.rewired.append((use, there))

    def awaited(self, index: int) -> TensorId:
        fetched = [TensorId(self.fetched[index].node, place) for place in range(self.count(index))]
        inputs = [*fetched, self.handles[index]]
        return self.insert(index, "MemOpAwait", inputs, self.kind(index), self.count(index))

    def is_list(self, tensor: TensorId) -> bool:
        return self.graph.specs[tensor].dtype == VARIANT

    def count(self, index: int) -> int:
        """How many tensors a MemOp of the move takes: the views of a buffer are one, but lists are several."""
        return len(self.across[index]) if self.is_list(self.moved[index]) else 1

    def sources(self, index: int) -> list[TensorId]:
        return [self.current.get(view, view) for view in self.across[index][: self.count(index)]]

    def kind(self, index: int) -> dict[str, AttrValue]:
        moved = self.moved[index]
        return {"N": self.count(index)} if self.is_list(moved) else {"T": self.dtype(moved)}

    def recompute(self, move: Move) -> TensorId:
        """A second run of the ops that made the buffer's content, from the same tensors."""
        chain = self.timeline.chain(move.gap)
        if chain is None:
            raise GraphError(f"buffer {move.buffer} is to be recomputed, and has no chain; please report this")
        made: dict[str, str] = {}  # op of the chain -> its second run
        for position in chain.ops:
            node = self.graph[self.timeline.steps[position].node]
            inputs = [
                TensorId(made[tensor.node], tensor.index) if tensor.node in made else self.current.get(tensor, tensor)
                for tensor in node.inputs
            ]
            again = self.next(f"tfmem/Recompute/{node.name}", node.op, inputs, node.attrs, node.device, node.outputs)
            made[node.name] = again.node
        views = self.timeline.buffers[move.buffer].views
        target = read_across(self.graph, self.position, views, move.last)[0]
        return TensorId(made[target.node], target.index)

    def dtype(self, tensor: TensorId) -> DataType:
        return DataType(self.graph.specs[tensor].dtype)

    def rewrite(self, probing: Probing | None) -> Rewrite:
        moves = list(enumerate(self.plan.moves))
        copies = [(index, move) for index, move in moves if not move.recomputed]
        releases = by_position((move.release, index) for index, move in copies)
        prefetches = by_position((move.prefetch, index) for index, move in copies)
        arrivals = by_position((move.next, index) for index, move in moves)
        copies_out = by_position((move.copy_after, index) for index, move in copies)
        paddings = by_position(self.plan.paddings)
        accessed = by_position(self.accessed())
        for position in self.plan.ordered:
            for index in releases.get(position, ()):
                self.release(index)
            full = [self.fill(position, nbytes) for nbytes in paddings.get(position, ())]
            for index in prefetches.get(position, ()):
                self.prefetch(index)
            for index in arrivals.get(position, ()):
                self.arrive(index)
            for nbytes in accessed.get(position, ()):
                self.preaccess(position, nbytes)
            if probing and any(position in due for due in (releases, prefetches, arrivals)):
                self.probe(probing, 2 * position)
            self.control(self.timeline.steps[position].node)
            for taken in full:
                self.empty(taken)  # before the probe, or the next one would count it too
            if probing:
                self.probe(probing, 2 * position + 1)
            for index in copies_out.get(position, ()):
                self.offload(index)
        if probing and probing.holds and self.plan.ordered:
            last = self.timeline.steps[self.plan.ordered[-1]].node
            self.order += [(name, last) for name in updates_to_hold(self.graph, self.position, self.plan.ordered)]
        return Rewrite("offload", tuple(self.nodes), inputs=tuple(self.rewired), order=tuple(self.order))

    def accessed(self) -> list[tuple[int, int]]:
        """Where mechanism "managed" maps the pages of which buffers, before an op writes them (thesis 4.2.3, 5.4)."""
        if self.options.mechanism != "managed":
            return []
        on_host = Reason.HOST_INT32()
        return [
            (buffer.start, buffer.nbytes)
            for buffer in self.timeline.buffers
            if buffer.nbytes >= SMALLEST_MOVED and buffer.pinned_by != on_host
        ]

    def preaccess(self, position: int, nbytes: int) -> None:
        node = self.graph[self.timeline.steps[position].node]
        name = f"tfmem/MemOpPreaccess/{node.name}"
        self.next(name, "MemOpPreaccess", [], {"bytes": nbytes}, node.device, outputs=0)

    def fill(self, position: int, nbytes: int) -> TensorId:
        node = self.graph[self.timeline.steps[position].node]
        return self.next(f"tfmem/MemOpFill/{node.name}", "MemOpFill", [], {"bytes": nbytes}, node.device)

    def empty(self, padding: TensorId) -> None:
        """What reads the padding last lets it go."""
        self.next(f"{padding.node}/Emptied", "Identity", [padding], {"T": DataType("uint8")}, "")

    def probe(self, probing: Probing, index: int) -> None:
        attrs: dict[str, AttrValue] = {"run": probing.run, "index": index}
        self.next(f"tfmem/MemOpProbe/{index}", "MemOpProbe", [], attrs, probing.device, outputs=0)

    def control(self, node: str) -> None:
        reads = {tensor.node for tensor in self.graph[node].inputs}
        if self.previous and self.previous != node and self.previous not in reads:
            for waiting in (node, *self.merged_with(node)):
                self.order.append((waiting, self.previous))
        self.previous = node

    def merged_with(self, node: str) -> list[str]:
        """Ops outside the control chain that a kernel library merges with `node`, if both wait for the same ops only.

        oneDNN computes a filter's and a bias's gradient at once; apart, the bias's gradient is rounded otherwise.
        """
        if self.graph[node].op != "Conv2DBackpropFilter":
            return []
        readers = [use.node for use in self.graph.uses(self.graph[node].inputs[2])]
        biases = {self.position[name]: name for name in readers if self.graph[name].op == "BiasAddGrad"}
        return [name for place, name in biases.items() if place > self.position[node] and place not in self.in_order]


def offload_rewrites(plans: Sequence[StepPlan], graph: Graph) -> list[Rewrite]:
    """The MemOps of `plans`: a rewrite for each device.

    Raises:
        GraphError: a plan is none for its timeline.
    """
    names, found = Names(graph), []
    for plan in plans:
        wrong = faults(plan.timeline, plan.moves)
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise GraphError(f"the plan cannot be put into the graph: {wrong[0]}{more}; please report this")
        writer = _Writer(graph, names, plan.timeline, plan.moves, plan.options, plan.spill_key)
        found.append(writer.rewrite(plan.probing))
    return found


def updates_to_hold(graph: Graph, position: Mapping[str, int], ordered: Sequence[int]) -> list[str]:
    """The ops outside the control chain that write a variable, and that no op in it waits for."""
    chained = set(ordered)
    waited_for = graph.reached((name for name, place in position.items() if place in chained), graph.predecessors)
    return [node.name for node in graph if writes(node) and node.name not in waited_for]


def transfers(graph: Graph, timeline: Timeline, plan: OffloadPlan) -> list[tuple[Move, TensorId]]:
    """The moves of `plan`, each with the tensor that it moves."""
    position = {step.node: index for index, step in enumerate(timeline.steps)}
    return [
        (move, read_across(graph, position, timeline.buffers[move.buffer].views, move.last)[0]) for move in plan.moves
    ]
