"""Which ops could make a buffer's content again, and from what: candidates for recomputing. Pure.

    x -> Mul -> AddV2 -> Relu -> y ... y's gradient      Mul, AddV2 and Relu share one buffer, and x waits even longer:
                                                         the chain of y is these three ops, its source is x

A chain goes back from the content to tensors that are there anyway when it is read. It passes in-place writers, and
ends at variables, constants and inputs. Small tensors are kept for it: a batch norm's mean, a random op's counter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from graph_passes.analysis.cost.region_costs import region_costs
from graph_passes.analysis.memory.loop_lists import EMPTY, VARIANT, only_reads
from graph_passes.analysis.memory.timeline import Buffer, Chain
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.merged import merged_pairs

SMALLEST_MOVED = 1 << 16  # a copy's fixed cost (about 10 us) moves this much
LONGEST = 8  # ops of a chain, at most; views are not counted


class ChainSearch:
    """What finding chains takes: one step, its buffers and their uses."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[str],
        owner: Mapping[TensorId, TensorId],
        buffers: Sequence[Buffer],
        fetched: Collection[TensorId],
        merging: bool,
    ) -> None:
        """Args: see `liveness.build_timeline`; `owner` is the output that allocated each tensor's buffer."""
        self.graph, self.owner, self.buffers, self.fetched = graph, owner, buffers, fetched
        self.order = order
        self.position = {name: index for index, name in enumerate(order)}
        self.index = {buffer.tensor: place for place, buffer in enumerate(buffers)}
        self.merged = {name for pair in merged_pairs(graph) for name in pair} if merging else set[str]()
        self.written = self._written()

    def with_chains(self) -> tuple[Buffer, ...]:
        """The buffers, each with the chains of its gaps."""
        return tuple(replace(buffer, chains=self._chains(buffer)) for buffer in self.buffers)

    def _chains(self, buffer: Buffer) -> tuple[Chain, ...]:
        if not buffer.movable:
            return ()
        gaps = [(last, use) for last, use in pairwise((buffer.start, *buffer.uses)) if use - last > 1]
        return tuple(self._chain(buffer, last, use) or Chain(last) for last, use in gaps)

    def _chain(self, buffer: Buffer, last: int, use: int) -> Chain | None:
        target = read_across(self.graph, self.position, buffer.views, last)[0]
        found: set[str] = set()
        sources: set[TensorId] = set()
        pending = [target.node]
        while pending:
            node = self.graph[pending.pop()]
            if node.name in found:
                continue
            found.add(node.name)
            longer = [name for name in found if self.graph[name].op not in ops.VIEWS]
            if len(longer) > LONGEST or not self._runs_again(node, self.graph[target.node].device):
                return None
            for tensor in node.inputs:
                if self._there_until(tensor, buffer.tensor) >= use:
                    sources.add(tensor)
                else:
                    pending.append(tensor.node)
        if len(longer) > 1 and not all(self._repeats(self.graph[name]) for name in found):
            return None
        names = sorted(found, key=self.position.__getitem__)
        held = self._held(names, target)
        if held is None:
            return None
        read = sorted({self.index[root] for root in map(self.owner.__getitem__, sources) if root in self.index})
        kind = tuple((self.graph[name].op, self.graph.nbytes(TensorId(name))) for name in names)
        return Chain(last, tuple(self.position[name] for name in names), tuple(read), held, kind)

    def _runs_again(self, node: Node, device: str) -> bool:
        outside = ops.EXTERNAL | ops.COLLECTIVES
        effects = node.stateful and not _is_repeatable_region(node) and not only_reads(self.graph, node)
        return (
            not effects
            and not ops.shares_rows(node)
            and node.op not in outside
            and node.device == device
            and bool(node.outputs)
        )

    def _repeats(self, node: Node) -> bool:
        """Whether the op can be one of several; one that a kernel library merges might run by another kernel."""
        repeats = node.op in ops.REPEATABLE | ops.REPEATABLE_PRODUCTS or _is_repeatable_region(node)
        return repeats and node.name not in self.merged

    def _there_until(self, tensor: TensorId, root: TensorId) -> int:
        """The last position before which a chain for the buffer of `root` can read `tensor`; -1 if it cannot."""
        end, owner = len(self.order), self.owner[tensor]
        node = self.graph[owner.node]
        if node.op == EMPTY:  # of lists: it holds nothing
            return end
        if node.op in ops.EXTERNAL:  # a variable's value is the same until the variable is written
            return min(self.written.get(ops.passed(self.graph, each), end) for each in (owner, *node.inputs))
        spec = self.graph.specs.get(tensor)
        if owner == root or spec is None or spec.nbytes is None or spec.dtype not in ops.FIXED_SIZE:
            return -1
        if tensor in self.fetched:
            return end
        last = max((self.position[use.node] for use in self.graph.uses(tensor)), default=-1)
        if owner not in self.index:  # of no bytes
            return last if ops.shares_rows(node) else end
        buffer = self.buffers[self.index[owner]]
        if buffer.holders:
            return max(last, buffer.uses[-1])  # lists hold it until then
        is_last = not buffer.uses or last == buffer.uses[-1]  # no other op writes over it later
        return end if is_last and buffer.nbytes < SMALLEST_MOVED else last

    def _written(self) -> dict[TensorId, int]:
        """The position of the first op that may write each variable."""
        found: dict[TensorId, int] = {}
        for place, name in enumerate(self.order):
            node = self.graph[name]
            harmless = node.op in ops.READS | ops.EXTERNAL | {ops.FUSION_OP}
            stateful = node.stateful and not harmless and not only_reads(self.graph, node)
            written = node.inputs if ops.is_update(node.op) or stateful else ops.taken_by(node)
            for tensor in written:
                found.setdefault(ops.passed(self.graph, tensor), place)
        return found

    def _held(self, names: Sequence[str], target: TensorId) -> tuple[int, ...] | None:
        """Bytes of the chain's tensors that are in memory while each of its ops runs."""
        last = {tensor: place for place, name in enumerate(names) for tensor in self.graph[name].inputs}
        last[target] = len(names)
        root: dict[TensorId, TensorId] = {}
        size: dict[TensorId, int] = {}
        until: dict[TensorId, int] = {}
        found = []
        for place, name in enumerate(names):
            node = self.graph[name]
            for tensor in self.graph.tensors(node):
                spec = self.graph.specs.get(tensor)
                if spec is not None and spec.dtype == VARIANT and node.op in ops.LOOPS:
                    if self.owner[tensor] == tensor:  # a list, or several that move together
                        size[tensor] = self.buffers[self.index[tensor]].nbytes if tensor in self.index else 0
                        root[tensor], until[tensor] = tensor, last.get(tensor, place)
                    continue
                if spec is None or spec.nbytes is None:
                    return None
                over = self._over(node, tensor, root, size, until, place)
                root[tensor] = over or tensor
                if over is None and not (node.op in ops.VIEWS and tensor.index == 0):
                    size[tensor] = spec.nbytes
                until[root[tensor]] = max(until.get(root[tensor], place), last.get(tensor, place))
            found.append(sum(size.values()))
            size = {tensor: nbytes for tensor, nbytes in size.items() if until[tensor] > place}
        return tuple(found)

    def _over(
        self,
        node: Node,
        tensor: TensorId,
        root: Mapping[TensorId, TensorId],
        size: Mapping[TensorId, int],
        until: Mapping[TensorId, int],
        place: int,
    ) -> TensorId | None:
        """The buffer of an earlier op of the chain that `tensor` is in."""
        if node.op in ops.VIEWS:
            return root.get(node.inputs[0])
        if node.op not in ops.IN_PLACE or tensor.index != ops.REUSING_OUTPUT.get(node.op, 0):
            return None
        specs = self.graph.specs
        for read in node.inputs:
            over = root.get(read)
            if over is None or over not in size or until[over] != place:
                continue
            if size[over] == specs[tensor].nbytes and specs[over].dtype == specs[tensor].dtype:
                return over
        return None


def _is_repeatable_region(node: Node) -> bool:
    region = region_costs(node)
    return region is not None and region.repeats


def read_across(graph: Graph, position: Mapping[str, int], views: Sequence[TensorId], last: int) -> list[TensorId]:
    """The tensors of a buffer that exist at position `last` and are read after it."""
    return [
        view
        for view in views
        if position[view.node] <= last and any(position[use.node] > last for use in graph.uses(view))
    ]
