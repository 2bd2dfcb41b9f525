"""Which gaps end with a recomputation instead of a copy, when their sources then have to stay. Pure.

Chains of one kind cost the same and free the same, so they are decided together. Kinds are ranked by the seconds that
they take for a byte; each stretch of the best ones is planned once with the copies that are still needed, and the plan
that is predicted to be fastest is taken. The first stretch is empty: the plan without chains that need more to stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from graph_passes.analysis.memory.simulate import Link, are_there, by_position
from graph_passes.analysis.memory.timeline import Chain, Gap, Timeline
from graph_passes.graph.ops import REPEATABLE_PRODUCTS

MOST_PLANS = 8  # stretches that are planned, at most, beside the empty one


def chain_choices(timeline: Timeline, candidates: Sequence[Gap], link: Link) -> Iterator[tuple[list[Gap], list[Gap]]]:
    """Choices of (gaps that chains end, those that pay least first; gaps that copies may still end)."""
    yield [], list(candidates)
    for again in _stretches(timeline, _ranked(timeline, candidates, link)):
        needed = by_position((source, gap.next) for gap in again for source in _chain(timeline, gap).sources)
        taken = set(again)
        others = [
            gap
            for gap in candidates
            if gap not in taken and not any(gap.last < use <= gap.next for use in needed.get(gap.buffer, ()))
        ]
        yield again[::-1], others


def _stretches(timeline: Timeline, ranked: list[list[Gap]]) -> Iterator[list[Gap]]:
    """Gaps of the best kinds: first of those without products, then, if there are others, of all."""
    without = [kind for kind in ranked if not _multiplies(_chain(timeline, kind[0]))]
    for kinds in ([without] if len(without) < len(ranked) else []) + [ranked]:
        counts = sorted({-(-len(kinds) * part // MOST_PLANS) for part in range(1, MOST_PLANS + 1)})
        for count in counts if kinds else ():
            yield _together(timeline, [gap for kind in kinds[:count] for gap in kind])


def endings(
    timeline: Timeline, chosen: Sequence[Gap], again: Collection[Gap], link: Link
) -> Iterator[frozenset[Gap] | None]:
    """Which of the chosen gaps chains end: where a chain is faster than a copy, and then the same without the products
    that were not asked for (`again`), since a copy may hide where a product takes time."""
    yield None
    faster = [gap for gap in chosen if timeline.recomputing(gap) < timeline.nbytes(gap) / link.prefetch]
    wanted = [gap for gap in faster if gap in again or not _multiplies(_chain(timeline, gap))]
    if len(wanted) < len(faster):
        yield frozenset(wanted)


def _multiplies(chain: Chain) -> bool:
    """Whether a chain of several ops holds a product or a convolution: it needs fewer tensors, and takes longer."""
    return len(chain.ops) > 1 and any(op in REPEATABLE_PRODUCTS for op, _ in chain.kind)


def _ranked(timeline: Timeline, candidates: Sequence[Gap], link: Link) -> list[list[Gap]]:
    """Candidates that a chain ends in less time than a copy back, by kind, those first that pay most."""
    kinds: dict[object, list[Gap]] = {}
    for gap in candidates:
        if timeline.recomputing(gap) < timeline.nbytes(gap) / link.prefetch:
            kinds.setdefault(_chain(timeline, gap).kind, []).append(gap)

    def price(gaps: list[Gap]) -> float:
        return sum(map(timeline.recomputing, gaps)) / sum(map(timeline.nbytes, gaps))

    return sorted(kinds.values(), key=price)


def _together(timeline: Timeline, gaps: Sequence[Gap]) -> list[Gap]:
    """The gaps of `gaps` whose chains can all run: none takes away what one before it reads, nor the reverse."""
    found: list[Gap] = []
    away: dict[int, list[Gap]] = {}
    needed: dict[int, list[int]] = {}
    for gap in gaps:
        sources = _chain(timeline, gap).sources
        keeps = any(gap.last < use <= gap.next for use in needed.get(gap.buffer, ()))
        if not keeps and are_there(sources, gap.next, away):
            found.append(gap)
            away.setdefault(gap.buffer, []).append(gap)
            for source in sources:
                needed.setdefault(source, []).append(gap.next)
    return found


def _chain(timeline: Timeline, gap: Gap) -> Chain:
    chain = timeline.chain(gap)
    if chain is None:
        raise ValueError(f"buffer {gap.buffer} has no chain for the gap from {gap.last} to {gap.next}")
    return chain
