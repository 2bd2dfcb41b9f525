"""Patterns by exploratory fusion (FusionStitching, arXiv 1911.11576, section 4.2.2, Algorithm 2).

From a seed, an op with large tensors and few operands, patterns grow by one producer or consumer at a time, so that
they save as many bytes as can be. Substitution fusion finds the fewest kernels; these patterns cross its borders. What
they take from a run of it may still be a kernel without them, and a run may take them in: such patterns are given, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graph_passes.analysis.op_pattern import REDUCTIONS, OpPattern
from graph_passes.passes.fuse.partition.candidate import RegionCandidate
from graph_passes.passes.fuse.partition.patterns import runs_among
from graph_passes.passes.fuse.partition.score import Candidate, Scorer

_SEEDS = REDUCTIONS | {OpPattern.ELEMENTWISE, OpPattern.LAYOUT, OpPattern.BATCHED_PRODUCT}


@dataclass(frozen=True)
class Exploration:
    """How far patterns are explored; the same in every process, as no time limit would be.

    Attributes:
        operands: a seed reads no more.
        window: a pattern lies within twice so many nodes, half of which at least come before or behind its seed.
        each: patterns that grow from a seed.
        run: nodes of a run that a pattern may take some from, or join, at most. Of a larger run, as the updates of all
            of a net's variables are, a pattern changes little, and to look at what is left takes as long as the run is.
        all: patterns of a region.
    """

    operands: int = 10
    window: int = 1024
    each: int = 16
    run: int = 256
    all: int = 2000


def exploratory(scorer: Scorer, found: Sequence[Candidate], exploration: Exploration | None = None) -> list[Candidate]:
    """Patterns beside those of substitution fusion, each once, in a fixed order.

    Args:
        scorer: of the region.
        found: the patterns of substitution fusion.
        exploration: how far to go.
    """
    limits = exploration or Exploration()
    region, device = scorer.region, scorer.device
    # A pattern within a run that can be a kernel, and waits nowhere, saves no more than the run.
    whole = {n: run for run, each in enumerate(found) if each.score >= each.ideal for n in each.members}
    known = {candidate.members for candidate in found}
    results: dict[tuple[int, ...], Candidate] = {}
    beside = _Beside(scorer)
    window = _Window(region, 0, 0)
    tried: set[tuple[int, ...]] = set()  # in this window: neighbouring seeds grow to the same patterns
    for seed in range(len(region.names)):
        memory = (*region.uses[seed], *region.defs[seed])
        moved = max((region.nbytes[each] for each in memory), default=0)
        large = device.seconds(moved) - device.seconds(0) > device.launch
        if not large or region.kinds[seed] not in _SEEDS or not region.fusible[seed]:
            continue
        if len(region.uses[seed]) > limits.operands:
            continue
        first = max(seed - seed % limits.window - limits.window // 2, 0)
        if first != window.first or seed not in window:
            window, tried = _Window(region, first, 2 * limits.window), set()
        for pattern in _grown(scorer, window, seed, limits.each, whole):
            if pattern.members in tried:
                continue
            tried.add(pattern.members)
            touched = {whole.get(number, -1 - number) for number in pattern.members}
            runs = [found[run] for run in sorted(touched) if run >= 0 and len(found[run].members) <= limits.run]
            for candidate in (pattern, *beside(window, pattern, runs)):
                if candidate.members not in known:
                    results[candidate.members] = candidate
            if len(results) >= limits.all:
                return list(results.values())
    return list(results.values())


class _Window:
    """Some consecutive nodes. A path between two of them holds no other nodes, since these are in topological order."""

    def __init__(self, region: RegionCandidate, first: int, count: int) -> None:
        self._body = region
        self.first = first
        self._end = min(first + count, len(region.names))
        self._before: list[int] = []  # a bit for each node that a path leads from
        self._after: list[int] = [0] * (self._end - first)
        for number in range(first, self._end):
            reach = 0
            for other in region.net.before[number]:
                if other >= first:
                    reach |= self._before[other - first] | self._bit(other)
            self._before.append(reach)
        for number in reversed(range(first, self._end)):
            for other in region.net.after[number]:
                if other < self._end:
                    self._after[number - first] |= self._after[other - first] | self._bit(other)

    def _bit(self, number: int) -> int:
        return 1 << (number - self.first)

    def __contains__(self, number: int) -> bool:
        return self.first <= number < self._end

    def mask(self, members: Sequence[int]) -> int:
        """A bit for each of them."""
        return sum(self._bit(number) for number in set(members))

    def closes(self, pattern: int, number: int) -> bool:
        """Whether a path leads from the pattern to a node, or back, by way of nodes that are neither."""
        net = self._body.net
        come = any(
            not pattern & self._bit(other) and self._before[other - self.first] & pattern
            for other in net.before[number]
            if other in self
        )
        return come or any(
            not pattern & self._bit(other) and self._after[other - self.first] & pattern
            for other in net.after[number]
            if other in self
        )


def _grown(scorer: Scorer, window: _Window, seed: int, most: int, whole: Mapping[int, int]) -> Iterator[Candidate]:
    """Patterns around a seed, those that save the most first, until there are enough; those within one run only grow.

    Args:
        scorer, window, seed: where.
        most: so many patterns grow.
        whole: the run of a node, if it is in one that can be a kernel.
    """
    region = scorer.region
    seen: set[tuple[int, ...]] = {(seed,)}
    pending: list[tuple[float, tuple[int, ...]]] = [(0.0, (seed,))]
    count, never = 0, frozenset[int]()
    while pending:
        _, pattern = heapq.heappop(pending)
        mask = window.mask(pattern)
        around = {other for number in pattern for other in (*region.net.before[number], *region.net.after[number])}
        for other in sorted(around.difference(pattern)):
            if (
                other not in window
                or not region.fusible[other]
                or not region.partners.get(other, never).isdisjoint(pattern)
            ):
                continue
            grown = tuple(sorted((*pattern, other)))
            if grown in seen:
                continue
            seen.add(grown)
            if window.closes(mask, other):
                continue
            run = whole.get(other)
            if run is not None and all(whole.get(number) == run for number in pattern):
                score = scorer.score(grown)
            else:
                candidate = scorer.candidate(grown)
                score = candidate.score if candidate else 0.0
                if candidate:
                    yield candidate
            heapq.heappush(pending, (-score, grown))
            count += 1
            if count >= most:
                return


def _uses_after_write(region: RegionCandidate, members: Sequence[int]) -> bool:
    partners = region.partners
    return any(number in partners and not partners[number].isdisjoint(members) for number in members)


class _Beside:
    """For each run that a pattern takes nodes from: what is left of it, and the run with all of the pattern."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[int]]] = {}

    def __call__(self, window: _Window, pattern: Candidate, runs: Sequence[Candidate]) -> Iterator[Candidate]:
        region = self._scorer.region
        for run in runs:
            taken = set(pattern.members)
            left = tuple(number for number in run.members if number not in taken)
            for part in self._left(run, left):
                candidate = self._scorer.candidate(part)
                if candidate:
                    yield candidate
            union = sorted(taken.union(run.members))
            inside = union[0] in window and union[-1] in window
            if inside and region.net.is_convex(union) and not _uses_after_write(region, union):
                candidate = self._scorer.candidate(union)
                if candidate:
                    yield candidate

    def _left(self, run: Candidate, left: tuple[int, ...]) -> list[list[int]]:
        """What is left of a run, as runs; found once."""
        key = run.members, left
        if key not in self._parts:
            self._parts[key] = runs_among(self._scorer.region, run.members, set(left))
        return self._parts[key]
