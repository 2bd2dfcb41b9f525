"""Mixed patterns: small products of matrices with what is computed of their operands and of their results.

Between large products the paper lets a pattern hold `gemm` and `batched-gemm` ops (FusionStitching, arXiv 1911.11576,
section 4.2.1). A kernel computes a product's result in tiles, each by one CTA, so that a pattern here is

    prologue    elementwise and layout ops that only the product reads: a transpose, a scale, a mask
    product     one, or several that read the same left operand: queries, keys and values
    epilogue    elementwise and layout ops behind it: a bias, an activation, the sum with a residual, a variable's
                update; and reductions of its rows, where these are short: the softmax of attention's scores

No product waits for a reduction or another product of its pattern, and no other reduction for a product: that would be
a barrier of the whole kernel, for which its tiles would have to lie in memory.

What the memory-intensive ops around products would be otherwise are patterns of substitution fusion. Where a product
takes some of them, what is left of such a pattern is a candidate, too, and the integer program chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from graph_passes.analysis.op_pattern import OpPattern
from graph_passes.passes.fuse.partition.candidate import RegionCandidate
from graph_passes.passes.fuse.partition.patterns import runs_among
from graph_passes.passes.fuse.partition.score import Candidate, Scorer

_BEFORE = frozenset({OpPattern.ELEMENTWISE, OpPattern.LAYOUT, OpPattern.VIEW, OpPattern.CONSTANT})
_SAME_PLACE = frozenset({OpPattern.ELEMENTWISE, OpPattern.VIEW, OpPattern.CONSTANT, OpPattern.UPDATE})
_AROUND = _SAME_PLACE | {OpPattern.LAYOUT}
_ROWS = _AROUND | {OpPattern.ROW_REDUCTION}  # of few columns, which a tile has all of


def mixed_patterns(scorer: Scorer, found: Sequence[Candidate]) -> list[Candidate]:
    """Patterns with products, and what they leave of others, each once, in a fixed order.

    Args:
        scorer: of the region.
        found: the patterns of substitution fusion.
    """
    region = scorer.region
    known = {candidate.members for candidate in found}
    results: dict[tuple[int, ...], Candidate] = {}

    def keep(members: Collection[int]) -> bool:
        candidate = scorer.candidate(members)
        if candidate and candidate.members not in known:
            results[candidate.members] = candidate
        return candidate is not None

    taken: set[int] = set()  # by the largest pattern of each product
    apart: list[set[int]] = []
    groups = list(_groups(region))
    given = {product: _around(region, product) for group in groups for product in group}
    scorer.prepare([*(members for each in given.values() for members in each), *_together(region, groups, given)])
    for group in groups:
        around = {product: [each for each in given[product] if keep(each)] for product in group}
        apart += [members for each in around.values() for members in each]
        largest = set[int]().union(*(max(each, key=len) for each in around.values() if each))
        together = [largest, set(group)] if len(group) > 1 else []
        kept = [members for members in together if members and _is_one(region, members) and keep(members)]
        apart += kept[:1]
        taken |= largest
    for run in _outermost(found):
        for members in [taken, *apart]:
            for part in _left(region, run, members):
                keep(part)
    return list(results.values())


def _groups(region: RegionCandidate) -> Iterator[list[int]]:
    """Products that read the same left operand, and do not wait for each other."""
    groups: dict[int, list[list[int]]] = {}
    for product in sorted(region.generated):
        alike = groups.setdefault(region.uses[product][0], [])
        beside = [group for group in alike if product not in region.net.behind(set(group), product + 1)]
        if beside:
            beside[-1].append(product)
        else:
            alike.append([product])
    for alike in groups.values():
        yield from alike


def _together(
    region: RegionCandidate, groups: Sequence[Sequence[int]], around: Mapping[int, Sequence[set[int]]]
) -> list[set[int]]:
    """The groups of several products, alone and with all that is around them."""
    several = [group for group in groups if len(group) > 1]
    found = [set(group) for group in several]
    found += [set[int]().union(*(max(around[product], key=len) for product in group)) for group in several]
    return [members for members in found if members and _is_one(region, members)]


def _outermost(found: Sequence[Candidate]) -> list[Candidate]:
    """The patterns that lie in no other one."""
    sets = [set(each.members) for each in found]
    return [each for each, own in zip(found, sets, strict=True) if not any(own < other for other in sets)]


def _around(region: RegionCandidate, product: int) -> list[set[int]]:
    """A product alone, with an epilogue, with a prologue, and with both."""
    behind = [_epilogue(region, product, kinds) for kinds in (_ROWS, _AROUND, _SAME_PLACE)]
    found = [{product}, *behind, *(_prologue(region, each) for each in ({product}, *behind))]
    return [each for number, each in enumerate(found) if each not in found[:number] and _is_one(region, each)]


def _epilogue(region: RegionCandidate, product: int, kinds: Collection[OpPattern]) -> set[int]:
    """The product, and the ops of some kinds behind it that its tiles can compute: they make no more than it does."""
    members, outside = {product}, set[int]()
    largest = _made(region, product)
    for number in range(product + 1, len(region.names)):
        if number in members:
            continue
        before = region.net.before[number]
        if any(other in outside for other in before):
            outside.add(number)
        elif any(other in members for other in before):
            fits = _fits(region, number, kinds) and _made(region, number) <= largest
            (members if fits else outside).add(number)
    return members


def _prologue(region: RegionCandidate, members: Collection[int]) -> set[int]:
    """The members, and the ops before that only they read, and that read no less than they make."""
    found = set(members)
    products = [number for number in members if number in region.generated]
    inputs = {memory for product in products for memory in region.uses[product]}
    for number in range(max(products) - 1, -1, -1):
        after = region.net.after[number]
        if not after or number in found or not set(after) <= found or not _fits(region, number, _BEFORE):
            continue
        if any(memory in region.live_outs for memory in region.defs[number]):
            continue
        if region.kinds[number] is OpPattern.VIEW or inputs.intersection(region.defs[number]):
            found.add(number)
            inputs |= set(region.uses[number])
    return found


def _fits(region: RegionCandidate, number: int, kinds: Collection[OpPattern]) -> bool:
    return region.fusible[number] and region.kinds[number] in kinds


def _made(region: RegionCandidate, number: int) -> int:
    memory = region.defs[number] or region.uses[number]
    return max((region.nbytes[each] for each in memory), default=0)


def _is_one(region: RegionCandidate, members: set[int]) -> bool:
    """Whether nodes could be one pattern: no cycle is closed, and no variable used that another of them writes."""
    never = frozenset[int]()
    apart = any(not region.partners.get(number, never).isdisjoint(members) for number in members)
    return not apart and region.net.is_convex(members)


def _left(region: RegionCandidate, run: Candidate, members: Collection[int]) -> Iterator[list[int]]:
    """What is left of a pattern of which others take some nodes."""
    left = set(run.members).difference(members)
    if left and len(left) < len(run.members):
        yield from runs_among(region, run.members, left)
