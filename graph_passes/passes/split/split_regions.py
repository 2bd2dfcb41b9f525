"""Regions of a step that run on pieces of the batch: the plan of the split pass, as data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from graph_passes.analysis.batch.separable import Separable
from graph_passes.graph.ir import TensorId, Use


class Exactness(StrEnum):
    """How near the results of a step are to those of the unmodified step; the value is what a report prints."""

    BITS = "equal to the bit, where TensorFlow picks the same kernels"
    SUMS = "equal to rounding: sums over the batch are added by piece, in a fixed order"


@dataclass(frozen=True)
class SplitRegion:
    """Ops of one device that run piece by piece.

    Attributes:
        name: of the region.
        pieces: how many examples each piece has, the larger ones first.
        members: names of its ops, which the pieces replace, in the schedule's order.
        again: names of ops that each piece runs again, in the schedule's order; the op itself stays.
        exits: tensors of members that other ops read, or that are fetched.
        separable: the rules of its ops.
    """

    name: str
    pieces: tuple[int, ...]
    members: tuple[str, ...]
    again: tuple[str, ...]
    exits: tuple[TensorId, ...]
    separable: Separable = field(repr=False, compare=False)


@dataclass(frozen=True)
class SplitPlan:
    """Which ops run on pieces of the batch.

    Attributes:
        regions: what runs piece by piece: of each device in the order in which it runs.
        fetched: tensors that the step returns.
    """

    regions: tuple[SplitRegion, ...]
    fetched: frozenset[TensorId]

    def ops(self, whole: int) -> int:
        """How many ops, roughly, a step of `whole` ops has once it runs so."""
        pieces = sum(len(each.pieces) * (len(each.members) + len(each.again)) for each in self.regions)
        return whole + pieces - sum(len(each.members) for each in self.regions)

    @property
    def exactness(self) -> Exactness:
        """The class of the results. A convolution or a product of fewer rows may run by another algorithm."""
        return Exactness.SUMS if self.regions else Exactness.BITS


@dataclass(frozen=True)
class Users:
    """What else reads tensors of a step, where the graph that it is part of stays.

    Attributes:
        held: names of ops whose results users fetch: they stay, and read what the pieces leave.
        read: tensors that ops beside the step read.
    """

    held: frozenset[str] = frozenset()
    read: frozenset[TensorId] = frozenset()


NO_USERS = Users()


@dataclass(frozen=True)
class BatchDivision:
    """What names a split plan of a device of a given graph: another process makes the same plan of it.

    Attributes:
        batch: how many examples there are.
        count: how many pieces.
        parts: of each region the names of its members, and of the ops that each piece runs again.
    """

    batch: int
    count: int
    parts: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    @classmethod
    def of(cls, plan: SplitPlan) -> tuple[BatchDivision, ...]:
        """The division of each device that a plan is of; one with regions."""
        devices: dict[int, list[SplitRegion]] = {}
        for region in plan.regions:
            devices.setdefault(id(region.separable), []).append(region)
        return tuple(
            cls(sum(first.pieces), len(first.pieces), tuple((each.members, each.again) for each in (first, *others)))
            for first, *others in devices.values()  # all have the same pieces
        )

    @classmethod
    def read(cls, found: Any) -> BatchDivision:
        """What `asdict` wrote, as JSON has it. Raises ValueError, TypeError or KeyError for other content."""
        batch, count = found["batch"], found["count"]
        parts = tuple((tuple(members), tuple(again)) for members, again in found["parts"])
        names = [name for part in parts for some in part for name in some]
        if type(batch) is not int or type(count) is not int or not all(type(name) is str for name in names):
            raise TypeError("a division of something else than names")
        if not 2 <= count <= batch or not parts or not all(members for members, _ in parts):
            raise ValueError("a division into impossible pieces")
        return cls(batch, count, parts)


def sizes_of_pieces(batch: int, count: int) -> tuple[int, ...]:
    """`batch` examples in `count` pieces that differ by at most one example."""
    each, more = divmod(batch, count)
    return (each + 1,) * more + (each,) * (count - more)


def plan_of(
    found: Separable,
    parts: Sequence[tuple[Collection[str], Collection[str]]],
    count: int,
    fetched: Collection[TensorId],
    users: Users = NO_USERS,
) -> SplitPlan:
    """The plan that runs `parts`, each of (members, ops that run again), in `count` pieces."""
    regions, pieces = [], sizes_of_pieces(found.batch, count)
    if users.held:  # each piece runs these again
        parts = [
            (left, frozenset(again) | frozenset(members) & users.held)
            for members, again in parts
            if (left := frozenset(members) - users.held)
        ]
    for number, (members, again) in enumerate(parts):
        exits = _exits(found, members, parts, users.read.union(fetched))
        ordered, more = (tuple(name for name in found.order if name in names) for names in (members, again))
        regions.append(SplitRegion(f"split_{number}", pieces, ordered, more, exits, found))
    return SplitPlan(tuple(regions), frozenset(fetched))


def plan_of_devices(plans: Sequence[SplitPlan]) -> SplitPlan:
    """One plan of those of several devices, of which none has ops of another's."""
    regions = [region for plan in plans for region in plan.regions]
    named = tuple(replace(region, name=f"split_{number}") for number, region in enumerate(regions))
    return SplitPlan(named, frozenset().union(*(plan.fetched for plan in plans)))


def _exits(
    found: Separable,
    members: Collection[str],
    parts: Sequence[tuple[Collection[str], Collection[str]]],
    fetched: Collection[TensorId],
) -> tuple[TensorId, ...]:
    """Tensors of members that are read where no piece makes them: by what runs once, or in another region."""
    replaced = frozenset().union(*(others for others, _ in parts))
    runs = [(others, frozenset((*others, *again))) for others, again in parts]

    def leaves(use: Use) -> bool:
        if use.node not in replaced:
            return True
        elsewhere = (ran for others, ran in runs if use.node in ran and others is not members)
        return any(not found.inside(use.node, use.index, ran) for ran in elsewhere)

    return tuple(
        tensor
        for name in found.order
        if name in members
        for tensor in found.graph.tensors(found.graph[name])
        if tensor in fetched or any(leaves(use) for use in found.graph.uses(tensor))
    )
