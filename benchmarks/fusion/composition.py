"""How a kernel puts its ops together: over which threads results are passed on, and what has nothing to do with the
rest of it (FusionStitching, sections 3 and 5.1); and what kernels take of shared memory (section 6.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from custom_ops.expr.nodes import Constant, Input, Position, Random, arguments_of
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.shared import shared_plan
from custom_ops.ordering import DisjointSets

Scope: TypeAlias = Literal["thread", "warp", "block", "grid"]
SCOPES: tuple[Scope, ...] = ("thread", "warp", "block", "grid")


def composition(plan: KernelPlan) -> Scope:
    """The most threads among which a value of the kernel is passed on: none, so that each thread computes on its own; a
    warp's, by shuffles or its part of shared memory; a CTA's; or those of several CTAs, by device memory."""
    if plan.phases > 1 and not plan.single:
        return "grid"
    if plan.phases > 1:
        return "block"
    return max((_scope(plan, piece) for piece in plan.pieces), key=SCOPES.index)


def packed(pattern: Pattern) -> int:
    """How many parts a kernel has that pass no value to each other: more than one are kernel packing. An input that
    several parts read does not join them."""
    nodes = pattern.program.nodes
    parts = DisjointSets(len(nodes))
    made = {place for place, node in enumerate(nodes) if not isinstance(node, Input | Constant | Position | Random)}
    for place in made:
        for argument in made.intersection(arguments_of(nodes[place])):
            parts.join(argument, place)
    return len({parts.root(output.node) for output in pattern.program.outputs})


def _scope(plan: KernelPlan, piece: Piece) -> Scope:
    exchanged = any(root.reduced for root in piece.roots) or bool(piece.combined)
    if piece.owner.kind in ("cta", "strided") and (exchanged or shared_plan(plan, piece).bytes):
        return "block"
    if piece.tile is not None or any(plan.mappings[root.name].over_rows for root in piece.roots):
        return "block"
    return "warp" if piece.owner.kind == "lanes" and exchanged else "thread"


@dataclass(frozen=True)
class Statistics:
    """Shared memory of some kernels, a row of the paper's Table 4.

    Attributes:
        patterns: the share of kernels that exchange data through shared memory.
        average, largest: bytes, of those kernels.
        unshared: bytes that the kernel of the largest request would take, if nothing took over another's place.
        allocated: bytes allocated over bytes requested.
    """

    patterns: float
    average: float
    largest: int
    unshared: int
    allocated: float


def statistics(plans: Sequence[KernelPlan]) -> Statistics:
    """What kernels take of shared memory."""
    found = [[shared_plan(plan, piece) for piece in plan.pieces] for plan in plans]
    sizes = [size for pieces in found if (size := max(piece.bytes for piece in pieces))]
    requests = [[piece.exchange + sum(piece.requested.values()) for piece in pieces] for pieces in found]
    requested = sum(map(sum, requests))
    allocated = sum(piece.bytes for pieces in found for piece in pieces)
    return Statistics(
        len(sizes) / len(plans) if plans else 0.0,
        sum(sizes) / len(sizes) if sizes else 0.0,
        max(sizes, default=0),
        max(map(max, requests), default=0),
        allocated / requested if requested else 1.0,
    )
