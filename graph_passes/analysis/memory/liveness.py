"""Graph + schedule + costs -> Timeline: which ops allocate what, and which ops read it until when."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.cost.region_costs import region_costs
from graph_passes.analysis.memory.chains import SMALLEST_MOVED, ChainSearch, read_across
from graph_passes.analysis.memory.lists import ListSize, list_sizes
from graph_passes.analysis.memory.loop_lists import handed, left_behind, lists_together, passed_on
from graph_passes.analysis.memory.timeline import Buffer, Holder, ScheduledOp, Timeline, turning_point
from graph_passes.errors import UnknownShapeError
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.merged import is_paired
from graph_passes.refusals import Reason, Refusal

SLICED = "TensorListFromTensor"  # its elements are parts of the tensor's buffer


def build_timeline(
    graph: Graph,
    order: Sequence[str],
    costs: CostModel | None,
    fetches: Collection[TensorId] = (),
    loss: TensorId | None = None,
    merging: bool = False,
    kept: Collection[str] = (),
    aliases: Container[str] = (),
) -> Timeline:
    """Find every buffer of a step and its uses.

    Args:
        graph: the graph, shapes inferred.
        order: its schedule.
        costs: op times, workspace and base memory; None for nothing, see `priced`.
        fetches: tensors the step returns; they outlive it.
        loss: the loss, if the caller knows it: the forward pass ends there. Otherwise the boundary is found from
            the uses (see `turning_point`).
        merging: whether oneDNN's layout pass runs after all others, which looks for pairs of ops.
        kept: ops that do not run in the step, for their results are in memory all the time (see `folded`).
        aliases: types of ops whose outputs are all in the memory of input 0; for graphs in which nothing moves.

    A tensor of unknown size that waits for a later use is a buffer of no bytes, pinned by `Reason.UNKNOWN_SIZE`. A list
    of which it is not known what a loop puts in is pinned by `Reason.LIST_UNKNOWN`.
    """
    position = {name: index for index, name in enumerate(order)}
    lists = list_sizes(graph, position)
    together = {found[0]: (found, size) for found, size in lists_together(graph, lists)}
    held = {result: root for root, (found, _) in together.items() for result in _left_behind(graph, root, found)}
    given = [each for name in order if graph[name].op in ops.LOOPS for each in handed(graph, graph[name])]
    still = {tensor for name in kept for tensor in graph.tensors(graph[name])}
    never = {*held, *(each.tensor for each in given), *still}
    owner, over_rows = _owners(graph, order, position, never, frozenset(fetches), aliases)
    owner.update((tensor, root) for root, (found, _) in together.items() for tensor in found)
    carried = passed_on(graph, lists, order)
    owner.update((tensor, first) for tensor, (first, _) in carried.items())
    grown = dict(carried.values())
    shared: dict[TensorId, list[TensorId]] = {}
    for tensor, root in owner.items():
        shared.setdefault(root, []).append(tensor)

    holders: dict[TensorId, list[Holder]] = {}
    for result, by in held.items():
        holders.setdefault(owner[result], []).append(Holder(owner[by], made=True))
    for each in given:
        holders.setdefault(owner[each.tensor], []).append(Holder(owner[each.list], made=False))
    firsts = {(owner[each.list], owner[each.tensor]) for each in given if each.counted}

    def uses_of(root: TensorId) -> set[int]:
        """Positions that read a buffer; while a slice that shares its memory lives, all of them."""
        found = set[int]()
        for use in (use for view in shared[root] for use in graph.uses(view)):
            found.add(position[use.node])
            if ops.shares_rows(graph[use.node]):
                rows = TensorId(use.node)
                inside = (owner[each] for each in over_rows.get(rows, ()))
                last = max((place for each in (rows, *inside) for place in uses_of(each)), default=position[use.node])
                found.update(range(position[use.node], last + 1))
        return found

    fetched = set(fetches)
    only_updates = frozenset(position[name] for name in update_only(graph, order))
    buffers, pauses = [], []
    for root, views in shared.items():
        node = graph[root.node]
        if node.op in ops.EXTERNAL or root in still:
            continue
        if ops.shares_rows(node):  # it is in the memory of its input
            continue
        holding = tuple(dict.fromkeys(holders.get(root, ())))
        uses = sorted(uses_of(root).union(*(uses_of(holder.list) for holder in holding)))
        start = position[root.node]
        if root in lists:
            size = together[root][1] if root in together else grown.get(root) or lists[root] or ListSize()
            again = sum(graph.nbytes(result) for result, by in held.items() if by == root)
            inside = (tensor for by, tensor in firsts if by == root and graph[tensor.node].op not in ops.EXTERNAL)
            again += sum(map(graph.nbytes, inside))
            size = replace(size, nbytes=max(0, size.nbytes - again))  # which count as themselves
            pauses += [(a, b) for a, b in pairwise((start, *uses)) if b - a > 1 and size.nbytes >= SMALLEST_MOVED]
            is_fetched = not fetched.isdisjoint(views)
            movable = root in together and size.element >= SMALLEST_MOVED and not is_fetched
            reason = Reason.LIST_UNKNOWN() if lists[root] is None else None if movable else Reason.LIST_FILLED()
            filled = Buffer(root, size.nbytes, start, tuple(uses), tuple(views), (start,), reason, is_fetched)
            buffers.append(replace(filled, element=size.element))
            continue
        # A view's op reads the buffer's address only, but holds a reference: it counts as a use.
        spec = graph.specs.get(root)
        nbytes = spec.nbytes if spec else None
        if nbytes is None:
            if _matters(graph, root, start, uses):
                buffers.append(Buffer(root, 0, start, tuple(uses), tuple(views), pinned_by=Reason.UNKNOWN_SIZE()))
            continue
        is_fetched = any(view in fetched for view in views)
        pinned = Reason.LIST_FILLED() if holding else _pinned(graph, position, views, tuple(uses), is_fetched)
        if not pinned and merging and is_paired(graph, root):
            pinned = Reason.PAIRED()
        reads = [use for use in uses if use not in only_updates]
        if reads and pinned != Reason.SMALL():
            pauses += [(a, b) for a, b in pairwise((start, *reads)) if b - a > 1]
        if nbytes:
            written = tuple(sorted(position[view.node] for view in views))
            buffer = Buffer(root, nbytes, start, tuple(uses), tuple(views), written, pinned, is_fetched)
            if node.op in ops.ALLOCATES_TWICE:
                buffer = replace(buffer, twice=True, between=graph.nbytes(node.inputs[ops.FILTER]))
            if holding:
                stays = (uses_of(holder.list) for holder in holding if holder.list not in together)
                read = max(uses_of(root).union(*stays), default=start)
                moving = tuple(holder for holder in holding if holder.list in together)
                buffer = replace(buffer, holders=moving, read=read)
            buffers.append(buffer)

    turn = position[graph[loss.node].name] if loss else turning_point(pauses, len(order))
    buffers.sort(key=lambda buffer: (buffer.start, buffer.tensor))
    known = ChainSearch(graph, order, owner, buffers, fetched, merging)
    steps = tuple(map(ScheduledOp, order))
    found = Timeline(steps, known.with_chains(), turn, updates=only_updates)
    return found if costs is None else priced(found, graph, costs)


def priced(timeline: Timeline, graph: Graph, costs: CostModel) -> Timeline:
    """Put costs on the steps of a timeline; its buffers, chains and turn do not depend on them."""
    steps = tuple(
        ScheduledOp(step.node, costs.seconds(graph, graph[step.node]), costs.workspace(graph, graph[step.node]))
        for step in timeline.steps
    )
    return replace(timeline, steps=steps, base=costs.base(graph))


def update_only(graph: Graph, order: Sequence[str]) -> set[str]:
    """The ops between a weight's gradient and its update: whatever they make reaches nothing but updates.

    Gradients wait for their update while the backward pass goes on, so they must not count as waiting activations.
    """
    found: set[str] = set()
    others = ops.PRODUCTS | ops.EXTERNAL
    for name in reversed(order):
        node = graph[name]
        readers = set(graph.readers(node))
        updates = ops.is_update(node.op) or (ops.writes(node) and readers <= found)
        if updates or (readers and node.op not in others and readers <= found):
            found.add(name)
    return found


def _left_behind(graph: Graph, root: TensorId, lists: Collection[TensorId]) -> tuple[TensorId, ...]:
    return left_behind(graph, graph[root.node], [tensor for tensor in lists if tensor.node == root.node])


def _owners(
    graph: Graph,
    order: Sequence[str],
    position: Mapping[str, int],
    held: Container[TensorId],
    fetched: Container[TensorId],
    aliases: Container[str],
) -> tuple[dict[TensorId, TensorId], dict[TensorId, list[TensorId]]]:
    """For each tensor, the output that allocated its buffer; nothing is written over what is `held`. And for each slice
    that shares memory, what TensorFlow writes over it once nothing else holds what it slices: all of that stays."""
    owner: dict[TensorId, TensorId] = {}
    over_rows: dict[TensorId, list[TensorId]] = {}
    last_use: dict[TensorId, int] = {}
    for name in order:
        for tensor in graph.tensors(graph[name]):
            read_last = max((position[use.node] for use in graph.uses(tensor)), default=position[name])
            last_use[tensor] = len(order) if tensor in fetched else read_last
    for name in order:
        node = graph[name]
        owner.update((tensor, tensor) for tensor in graph.tensors(node))
        if not node.inputs or not node.outputs:
            continue
        region = region_costs(node)
        for place, read in region.views if region else ():
            root = owner[TensorId(name, place)] = owner[node.inputs[read]]
            last_use[root] = max(last_use[root], last_use[TensorId(name, place)])
        if node.op in aliases:
            root = owner[node.inputs[0]]
            owner.update((tensor, root) for tensor in graph.tensors(node))
            last_use[root] = max(last_use[tensor] for tensor in (root, *graph.tensors(node)))
            continue
        output = TensorId(name, ops.REUSING_OUTPUT.get(node.op, 0))
        if ops.shares_rows(node):
            below = owner[node.inputs[0]]
            last_use[below] = max(last_use[below], last_use[output])
        if node.op in ops.VIEWS or node.op == SLICED:
            root = owner[output] = owner[node.inputs[0]]
            last_use[root] = max(last_use[root], last_use[output])
        elif node.op in ops.IN_PLACE_OVER_FIRST:
            for tensor in node.inputs:
                root = owner[tensor]
                kept = root in held or ops.passed(graph, tensor, ops.VIEWS) in held
                if ops.shares_rows(graph[root.node]):
                    below = owner[graph[root.node].inputs[0]]
                    is_last = max(last_use[root], last_use[below]) <= position[name]
                    if is_last and graph.nbytes(root) == graph.nbytes(output):
                        over_rows.setdefault(root, []).append(output)
                elif not kept and last_use[root] == position[name] and _reusable(graph, root, output, node):
                    owner[output] = root
                    last_use[root] = last_use[output]
                    break
    return owner, over_rows


def _reusable(graph: Graph, root: TensorId, output: TensorId, node: Node) -> bool:
    """Whether `output` may be written over the dying buffer of `root`."""
    source, target = graph.specs.get(root), graph.specs.get(output)
    return (
        source is not None
        and target is not None
        and source.dtype == target.dtype
        and source.nbytes == target.nbytes
        and source.nbytes is not None
        and graph[root.node].op not in ops.EXTERNAL
        and not ops.shares_rows(graph[root.node])
        and graph[root.node].device == node.device
    )


def _pinned(
    graph: Graph,
    position: Mapping[str, int],
    views: Sequence[TensorId],
    uses: Sequence[int],
    is_fetched: bool,
) -> Refusal | None:
    """Why the buffer cannot be moved, if it cannot."""
    root = views[0]
    spec, node = graph.specs[root], graph[root.node]
    if spec.dtype not in ops.FIXED_SIZE:
        return Reason.NO_SIZE(dtype=spec.dtype)
    if (spec.nbytes or 0) < SMALLEST_MOVED:
        return Reason.SMALL()
    if spec.dtype == "int32":
        return Reason.HOST_INT32()
    if is_fetched:
        return Reason.RETURNED()
    if any(graph[view.node].op == SLICED for view in views):
        return Reason.LIST_SHARES()
    if node.op in ops.COLLECTIVES:
        return Reason.COLLECTIVE(op=node.op)
    for last, following in pairwise((position[root.node], *uses)):
        if following - last > 1 and len({graph.specs[v].shape for v in read_across(graph, position, views, last)}) > 1:
            return Reason.SEVERAL_SHAPES()
    return None


def _matters(graph: Graph, root: TensorId, start: int, uses: Sequence[int]) -> bool:
    """Unknown sizes are harmless for tensors that die at once, and for those that MemOps would not move anyway."""
    spec = graph.specs.get(root)
    if spec is None or spec.dtype not in ops.FIXED_SIZE or len(uses) < 2 or uses[-1] - start < 2:
        return False
    return spec.shape is None or len(spec.shape) > 1


def refuse_open(graph: Graph, timeline: Timeline, of_data: Container[TensorId]) -> None:
    """Refuse a step of which more would be known if its caller had not left shapes open.

    Args:
        graph: the graph.
        timeline: of it.
        of_data: tensors whose size would not be known then either, for it depends on data: these are left alone.

    Raises:
        UnknownShapeError: a tensor that waits for a later use has an unknown dimension, as an input has.
    """
    given = open_inputs(graph)
    waiting = (buffer.tensor for buffer in timeline.buffers if buffer.pinned_by == Reason.UNKNOWN_SIZE())
    root = next((tensor for tensor in waiting if tensor not in of_data), None)
    if not given or root is None:
        return
    shape = graph.specs[root].shape
    if shape is None:
        found = "its rank is unknown"
    else:
        unknown = [index for index, dim in enumerate(shape) if dim is None]
        found = f"dimension {', '.join(map(str, unknown))} of shape {_text(shape)} is unknown"
    inputs = ", ".join(f"'{name}' {_text(shape)}" for name, shape in given.items())
    wanted = ", ".join(f"{name!r}: (...)" for name in given)
    raise UnknownShapeError(
        f"cannot plan memory for '{root}' ({graph[root.node].op}): {found}. Inputs with unknown dimensions: {inputs}. "
        f"Give their static shapes, optimize(..., input_shapes={{{wanted}}}), or an input signature without None"
    )


def open_inputs(graph: Graph) -> dict[str, tuple[int | None, ...]]:
    """The inputs whose caller left dimensions open, and their shapes."""
    shapes = {node.name: graph.specs[TensorId(node.name)].shape for node in graph if node.op in ("Placeholder", "_Arg")}
    return {name: shape for name, shape in shapes.items() if shape is not None and None in shape}


def _text(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("?" if dim is None else str(dim) for dim in shape) + ")"
