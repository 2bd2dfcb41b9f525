"""Decides what runs on pieces of the batch, and on how many. Pure.

The hard case: a net whose first convolution alone, on all examples, exceeds the budget.

    whole batch      conv1 -> relu -> ... -> loss -> ... -> gradient of conv1       each tensor whole: over the budget
    pieces           conv1 ... gradient | conv1 ... gradient | ...                  tensors of a piece; gradients added

    candidates       stretches of the step that can run by piece: from a tensor that is kept to the gradients, and the
                     ops between batch norms, with what they read made again in each piece, or without
    plan_split       for 2, 4, 8, ... pieces, those candidates of which the cost model says that a memory plan meets the
                     budget; of these the fastest

Replicas are one program on several devices, so all devices run the same candidate in as many pieces, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graph_passes.analysis.batch.separable import Separable, again, batches, convex, levels, separable
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.split.split_regions import NO_USERS, BatchDivision, SplitPlan, Users, plan_of, plan_of_devices
from graph_passes.refusals import Reason, Refusal

MOST_PIECES = 32
MOST_TRIALS = 24  # graphs that are planned
LARGE = 1 << 62
MOST_OPS = 90_000  # of the divided graphs of all trials together, but for the first; 2,700 take about a second
FIRST_TRIALS = 4
_MARGIN = 0.9  # of the budget, which trials meet if any does: the measured step may need more than the predicted one
_HELPS = 0.98  # of the bytes that the largest op needs: twice as many pieces have to save more
_BATCHES = 3  # sizes of first dimensions that are tried
_CUTS = (0.25, 0.5, 0.75)  # shares of the forward pass, by the bytes that it makes, before a kept tensor
_MATTERS = 0.02  # of the budget: a region of fewer bytes stays whole

Part = tuple[frozenset[str], frozenset[str]]  # members, and ops that each piece runs again


@dataclass(frozen=True)
class SplitEstimate:
    """What the cost model says of a step that is split.

    Attributes:
        least: bytes that no memory plan goes below; `LARGE` where the step would wait for itself.
        seconds: under the memory plan; None if none meets the budget.
    """

    least: int
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class SplitLane:
    """The part of a step that runs on one device.

    Attributes:
        turn: the position of the last forward op.
        over: ops at whose positions no memory plan meets the budget.
        device: as the graph's nodes name it; "" where the step has no other.
        alone: bytes that are in memory while an op runs, by its name, however the step is divided around it.
    """

    turn: int
    over: Collection[str]
    device: str = ""
    alone: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SplitNeeds:
    """What planning takes.

    Attributes:
        order: the step's schedule.
        fetched: tensors that it returns.
        lanes: the devices that it runs on.
        budget: bytes.
        trial: plans the memory of a step that is split.
        faster_than: seconds that a split step has to stay below.
        known: of each lane the division that another process chose: it is taken where the step can run so within the
            budget. () to choose one.
        measured: whether the known one was measured to meet the budget: then it is not planned to find out.
        users: what else reads tensors of the step.
        only: whether no other division takes the place of the known one.
        default: the device of ops that name none.
    """

    order: Sequence[str]
    fetched: Collection[TensorId]
    lanes: Sequence[SplitLane]
    budget: int
    trial: Callable[[SplitPlan], SplitEstimate]
    faster_than: float = field(default=float("inf"))
    known: Sequence[BatchDivision] = ()
    measured: bool = False
    users: Users = NO_USERS
    only: bool = False
    default: str = ""


@dataclass(frozen=True)
class SplitChoice:
    """What the planner chose.

    Attributes:
        plan: what runs on pieces; None if nothing does.
        refused: why nothing does.
        least: bytes that the best trial needs; 0 if there was none.
    """

    plan: SplitPlan | None = None
    refused: Refusal | None = None
    least: int = 0


def plan_split(source: Readable, needs: SplitNeeds) -> tuple[SplitChoice, Graph]:
    """The fastest split that meets the budget, of those that were tried; or the known one, where that serves."""
    graph = source.read()
    if needs.known:
        choice = _as_known(graph, needs)
        if needs.measured or needs.only or choice.plan is not None:
            return choice, graph
    found: list[Separable] = []
    parts: list[dict[str, tuple[Part, ...]]] = []
    for lane in needs.lanes:
        one = _by_batch(graph, needs, lane)
        if one is None:
            return SplitChoice(refused=_refused(lane, Reason.SPLIT_NO_BATCH(count=2))), graph
        found.append(one)
        parts.append(dict(candidates(one, needs, lane)))
    kinds = [kind for kind in parts[0] if all(kind in each for each in parts)]
    if not kinds:  # a lane has none, or none of a kind that all others have
        none = next((place for place, each in enumerate(parts) if not each), -1)
        return SplitChoice(refused=_refused(needs.lanes[none], _little(found[none]))), graph
    return _fastest(found, [[each[kind] for each in parts] for kind in kinds], needs), graph


def _as_known(graph: Graph, needs: SplitNeeds) -> SplitChoice:
    """The plan of the known divisions, if the ops that they name can run so, and within the budget."""
    if len(needs.known) != len(needs.lanes):
        return SplitChoice(refused=Reason.SPLIT_KNOWN(count=needs.known[0].count))
    plans = []
    for lane, known in zip(needs.lanes, needs.known, strict=True):
        one = _carried_out(graph, needs, lane, known)
        if one is None:
            return SplitChoice(refused=_refused(lane, Reason.SPLIT_KNOWN(count=known.count)))
        plans.append(one)
    plan = plan_of_devices(plans)
    if needs.measured:
        return SplitChoice(plan)
    trial = needs.trial(plan)
    if trial.least == LARGE:
        return SplitChoice(refused=Reason.SPLIT_WAITS())
    if trial.seconds is None or trial.seconds >= needs.faster_than:
        count = needs.known[0].count
        return SplitChoice(refused=Reason.SPLIT_OVER(count=count, least=f"{trial.least:,}"), least=trial.least)
    return SplitChoice(plan, least=trial.least)


def _carried_out(graph: Graph, needs: SplitNeeds, lane: SplitLane, known: BatchDivision) -> SplitPlan | None:
    """The plan of a device that a known division is; None if its ops cannot run so. Another worker, which the division
    was made for, may have more or fewer examples."""
    fetched = {tensor.node for tensor in needs.fetched}
    parts = [(frozenset(members), frozenset(more)) for members, more in known.parts]
    if sum(len(members) for members, _ in parts) > len(frozenset().union(*(members for members, _ in parts))):
        return None  # an op in two parts

    def can_run(found: Separable) -> bool:
        return all(
            members <= found.rules.keys() and convex(found, members) == members and more <= again(found, members)
            for members, more in parts
        )

    sizes = (known.batch, *(batches(graph)[:_BATCHES] if needs.only else ()))
    for batch in dict.fromkeys(sizes):
        found = separable(graph, needs.order, batch, fetched, lane.device, needs.default)
        if known.count <= batch and can_run(found):
            return plan_of(found, parts, known.count, needs.fetched, needs.users)
    return None


def _refused(lane: SplitLane, why: Refusal) -> Refusal:
    return Reason.SPLIT_DEVICE(device=lane.device, why=str(why)) if lane.device else why


def _little(found: Separable) -> Refusal:
    """Why what can work on a piece is too little to be split, and the op that ends the most of it."""

    def ended(name: str) -> int:
        given = found.graph[name].inputs
        return sum(found.graph.nbytes(tensor) for tensor in given if tensor in found.labels)

    last = max(found.refused, key=ended, default=None)
    return Reason.SPLIT_NO_REGION() if last is None else Reason.SPLIT_ENDS(why=str(found.refused[last]))


def _by_batch(graph: Graph, needs: SplitNeeds, lane: SplitLane) -> Separable | None:
    """The ops that can work on a piece, for the size of inputs for which these make the most bytes."""
    fetched = {tensor.node for tensor in needs.fetched}
    every = [
        separable(graph, needs.order, batch, fetched, lane.device, needs.default) for batch in batches(graph)[:_BATCHES]
    ]
    every = [found for found in every if found.rules]
    return max(every, key=lambda found: found.nbytes(found.rules), default=None)


def _fastest(found: Sequence[Separable], parts: Sequence[Sequence[Sequence[Part]]], needs: SplitNeeds) -> SplitChoice:
    """The fastest plan, with a margin in memory where one has it; divisions into more pieces are tried once more after
    one was found, for they may spare moves.

    Args:
        found: of each device, the ops that can work on a piece.
        parts: of each candidate, what may run on pieces on each device.
        needs: what else decides.
    """
    met: list[tuple[SplitEstimate, SplitPlan]] = []
    least, tried, last, count, ops = LARGE, 0, 0, 2, 0
    most_pieces = min(MOST_PIECES, *(each.batch for each in found))
    while count <= most_pieces:
        before = least
        for each in parts[: MOST_TRIALS - tried]:
            if _least(each, needs) >= max(least, needs.budget + 1):  # it would change nothing
                tried += 1
                continue
            devices = zip(found, each, strict=True)
            plan = plan_of_devices(
                [plan_of(one, regions, count, needs.fetched, needs.users) for one, regions in devices]
            )
            size = plan.ops(len(needs.order))
            if tried >= FIRST_TRIALS and ops + size > MOST_OPS:
                continue
            trial, tried, ops = needs.trial(plan), tried + 1, ops + size
            least = min(least, trial.least)
            if trial.seconds is not None and trial.seconds < needs.faster_than:
                met.append((trial, plan))
                if trial.least <= _MARGIN * needs.budget:
                    last = last or count
        if (last and count > last) or tried == MOST_TRIALS or least > _HELPS * before:
            break
        count *= 2
    roomy = [each for each in met if each[0].least <= _MARGIN * needs.budget]
    if not met and least == LARGE:
        return SplitChoice(refused=Reason.SPLIT_WAITS())
    if not met:
        return SplitChoice(refused=Reason.SPLIT_OVER(count=min(count, most_pieces), least=f"{least:,}"), least=least)
    return SplitChoice(min(roomy or met, key=lambda each: each[0].seconds or 0.0)[1], least=least)


def _least(parts: Sequence[Sequence[Part]], needs: SplitNeeds) -> int:
    """Bytes that no memory plan goes below, however many pieces there are: what the ops outside of the parts need."""
    least = 0
    for lane, regions in zip(needs.lanes, parts, strict=True):
        inside = frozenset().union(*(members | more for members, more in regions))
        least = max([least, *(nbytes for name, nbytes in lane.alone.items() if name not in inside)])
    return least


def candidates(found: Separable, needs: SplitNeeds, lane: SplitLane) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """What may run on pieces on a device, each with its kind, and its regions in the order in which they run; what
    helps most comes first."""
    seen: set[tuple[Part, ...]] = set()
    sets = levels(found)
    heavy = [each for each in sets if found.nbytes(each) >= _MATTERS * needs.budget]
    urgent = [each for each in heavy if not each.isdisjoint(lane.over)]
    whole = convex(found, found.rules)
    largest = [("largest", ((whole, frozenset[str]()),))] if found.nbytes(whole) >= _MATTERS * needs.budget else []
    between = (("urgent", urgent), ("heavy", heavy)) if len(sets) > 1 else ()
    tails = _to_the_gradients(found, needs, lane, whole)
    borders = (part for name, some in between for part in _between_borders(found, name, some))
    for kind, each in (*largest, *tails, *borders):
        if each and each not in seen:
            seen.add(each)
            yield kind, each


def _to_the_gradients(
    found: Separable, needs: SplitNeeds, lane: SplitLane, whole: frozenset[str]
) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """The ops from a kept tensor to the loss and back to the gradients of what follows that tensor."""
    place = {name: index for index, name in enumerate(found.order)}
    forward = sorted(place[name] for name in whole if place[name] <= lane.turn)
    total = found.nbytes(found.order[position] for position in forward)
    for share in _CUTS:
        made, start = 0, None
        for position in forward:
            if made >= share * total:
                start = position
                break
            made += found.nbytes([found.order[position]])
        if start is None:
            continue
        inner = {found.order[position] for position in forward if position >= start}
        read = [place[use] for name in inner for use in found.graph.readers(found.graph[name]) if use in whole]
        end = max(read, default=start)
        tail = convex(found, [name for name in whole if start <= place[name] <= end])
        if found.nbytes(tail) >= _MATTERS * needs.budget:
            yield f"tail {share}", ((tail, frozenset()),)


def _between_borders(
    found: Separable, name: str, sets: Sequence[frozenset[str]]
) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """These sets between ops that need all of the batch, with what they read kept, partly made again, or made again."""
    yield name, tuple((each, frozenset[str]()) for each in sets)
    yield f"{name}, products kept", tuple((each, again(found, each, products=False)) for each in sets)
    yield f"{name}, again", tuple((each, again(found, each)) for each in sets)
