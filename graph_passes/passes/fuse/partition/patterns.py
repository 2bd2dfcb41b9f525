"""Patterns by substitution fusion (FusionStitching, arXiv 1911.11576, section 4.2.1, Algorithm 1).

All ops between partition ops become one pattern. In the paper's words ops are sorted, and a pattern is what lies
between two neighbours among the partition ops; which ops those are depends on the order. Here a pattern is a run (see
`runs`): so many ops lie between partition ops as in the best of all orders, with or without data dependences.

Step by step, more ops become partition ops: products, batched products, views, layouts, column reductions, scalar
reductions, row reductions. A layout only begins its run. A reduction first only ends its run, since what it reduces may
be computed with it, and then stands alone as in the paper. Patterns of later steps lie within patterns of earlier ones.
So any choice of disjoint ones is acyclic, and what cannot be improved by dividing it is not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from graph_passes.analysis.dependences import Role, connected, runs, settled
from graph_passes.analysis.op_pattern import OpPattern
from graph_passes.passes.fuse.partition.candidate import RegionCandidate
from graph_passes.passes.fuse.partition.score import Candidate, Scorer

_COLUMNS = frozenset({OpPattern.COLUMN_REDUCTION, OpPattern.REDUCTION})
_SCALARS = frozenset({OpPattern.SCALAR_REDUCTION})
_ROWS = frozenset({OpPattern.ROW_REDUCTION})

# What further becomes a partition op, and how, step by step. Large products are from the start.
STEPS: tuple[tuple[frozenset[OpPattern], Role], ...] = (
    (frozenset({OpPattern.PRODUCT}), Role.BORDER),
    (frozenset({OpPattern.BATCHED_PRODUCT}), Role.BORDER),
    (frozenset({OpPattern.VIEW}), Role.BORDER),
    (frozenset({OpPattern.LAYOUT, OpPattern.GATHER}), Role.FIRST),
    (_COLUMNS, Role.LAST),
    (_SCALARS, Role.LAST),
    (_ROWS, Role.LAST),
    (_COLUMNS, Role.BORDER),
    (_SCALARS, Role.BORDER),
    (_ROWS, Role.BORDER),
)
_FREE = frozenset({OpPattern.VIEW, OpPattern.CONSTANT})


def substitution(scorer: Scorer) -> list[Candidate]:
    """Patterns of a region, each once, in a fixed order."""
    found: dict[tuple[int, ...], Candidate] = {}
    region = scorer.region
    every = range(len(region.names))
    roles = {number: _first_role(region, number) for number in every}
    for members in _sets(region, every, roles):
        for candidate in _divided(scorer, members, roles, 0):
            found[candidate.members] = candidate
    return list(found.values())


def runs_among(region: RegionCandidate, members: Sequence[int], fusible: Collection[int]) -> list[list[int]]:
    """The runs among some nodes of which only these may be in one."""
    roles = {number: _first_role(region, number) if number in fusible else Role.BORDER for number in members}
    return list(_sets(region, members, roles))


def _first_role(region: RegionCandidate, number: int) -> Role:
    if not region.fusible[number]:
        return Role.BORDER
    return Role.FREE if region.kinds[number] in _FREE else Role.WORK


def _sets(region: RegionCandidate, members: Sequence[int], roles: Mapping[int, Role]) -> Iterator[list[int]]:
    """The runs among `members`, without what is at their end and computes nothing; those that hold work."""
    net = region.net.among(members)
    place = {number: index for index, number in enumerate(members)}
    apart = {(place[p], place[n]) for p, n in region.incompatible if p in place and n in place}
    inside = [roles[number] for number in members]

    def waits(index: int, later: int, ranks: Sequence[int]) -> bool:
        return _moves_less(region, members[index], ranks[index], later, lambda n: ranks[place[n]] if n in place else 0)

    sets: dict[int, list[int]] = {}
    ranks = settled(net, runs(net, inside, apart=apart), inside, waits, apart=apart)
    for number, rank in zip(members, ranks, strict=True):
        if rank % 2:
            sets.setdefault(rank, []).append(number)
    for run in sets.values():
        kept: set[int] = set()
        for number in reversed(run):
            if region.works(number) or any(other in kept for other in region.net.after[number]):
                kept.add(number)
        if kept:
            yield sorted(kept)


def _moves_less(region: RegionCandidate, number: int, here: int, later: int, rank: Callable[[int], int]) -> bool:
    """Whether fewer bytes are moved if a node is computed where it is first read, in a later set."""
    saved = 0
    for memory in region.defs[number]:
        elsewhere = memory in region.live_outs or any(rank(reader) != later for reader in region.readers[memory])
        saved += region.nbytes[memory] * (1 if elsewhere else 2)
    for memory in region.uses[number]:
        others = [rank(reader) for reader in region.readers[memory] if reader != number]
        if later in others:
            continue
        made_here = memory in region.makers and rank(region.makers[memory]) == here
        if made_here:
            saved -= region.nbytes[memory] * (1 if memory in region.live_outs or {here, *others} > {here} else 2)
        elif here in others:
            saved -= region.nbytes[memory]
    return saved > 0 and region.kinds[number] is not OpPattern.UPDATE


def _divided(scorer: Scorer, members: list[int], roles: Mapping[int, Role], step: int) -> Iterator[Candidate]:
    """A run as one pattern, its parts where it could be better, and so on."""
    region = scorer.region
    whole = scorer.candidate(members)
    if whole:
        yield whole
        if whole.score >= whole.ideal:
            return
    parts = scorer.loose(members) if scorer.too_long(members) else connected(region.net, members)
    if len(parts) > 1:
        yield from _packed(scorer, parts)
    for number in range(step, len(STEPS)):
        kinds, role = STEPS[number]
        if any(region.kinds[member] in kinds for member in members):
            changed = {member: role if region.kinds[member] in kinds else roles[member] for member in members}
            for run in _sets(region, members, changed):
                yield from _divided(scorer, run, changed, number + 1)
            return


def _packed(scorer: Scorer, parts: Sequence[list[int]]) -> Iterator[Candidate]:
    """Parts with no dependences among them, alone and several together: those that work on tensors of one size first,
    in as few patterns as can be kernels."""
    region = scorer.region
    sizes: dict[int, list[list[int]]] = {}
    for part in parts:
        candidate = scorer.candidate(part)
        if candidate:
            yield candidate
        touched = (memory for number in part for memory in (*region.uses[number], *region.defs[number]))
        largest = max(map(region.nbytes.__getitem__, touched))
        sizes.setdefault(largest, []).append(part)
    for group in sizes.values():
        yield from _halved(scorer, group)
    if len(sizes) > 1:
        yield from _halved(scorer, parts)


def _halved(scorer: Scorer, parts: Sequence[list[int]]) -> Iterator[Candidate]:
    if len(parts) < 2:
        return
    candidate = scorer.candidate(number for part in parts for number in part)
    if candidate:
        yield candidate
        return
    middle = len(parts) // 2
    yield from _halved(scorer, parts[:middle])
    yield from _halved(scorer, parts[middle:])
