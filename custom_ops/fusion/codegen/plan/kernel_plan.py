"""From a template to what its kernel does: phases with barriers of the grid between them, pieces side by side in each,
loops within a piece.

A *piece* shares out rows over CTAs. All roots with the same rows, of the same owners, that can run in one phase are in
one piece, so that what they read is read once. Pieces of a phase do not depend on each other: they are packed into one
launch, each with separate CTAs. What a piece needs of another one is stored in device memory and read in a later
phase; elementwise values are computed again.

Within a row, roots run in *levels*: what needs a reduction's result comes after it. Roots of a level that look at the
same positions share a loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.plan.addresses import vector_width
from custom_ops.fusion.codegen.plan.contraction import Tile
from custom_ops.fusion.codegen.plan.mapping import WARP, Mapping, Owner, Way, mapping
from custom_ops.fusion.codegen.plan.pattern import Pattern, Root
from custom_ops.fusion.codegen.plan.segment_ids import Segments
from custom_ops.fusion.codegen.plan.template import RootSchedule, parse

MOST_THREADS = 1024


@dataclass(frozen=True)
class PatternConfiguration:
    """One way to compute a pattern, as the tuner keeps it.

    Attributes:
        template: a schedule for each root (`template.py`).
        threads: of a CTA.
        vector: elements that a thread loads and stores at once, where they are contiguous.
    """

    template: str
    threads: int = 256
    vector: int = 1


@dataclass(frozen=True)
class RowLoop:
    """One pass over positions within a row.

    Attributes:
        axes: of the positions, innermost last; none: once for each row.
        serial: within each position, what a thread or a warp reduces over.
        way: see `Mapping`.
        vector: elements at once.
        roots: what it computes.
    """

    axes: tuple[int, ...]
    serial: tuple[int, ...]
    way: Way
    vector: int
    roots: tuple[Root, ...]


@dataclass(frozen=True)
class Piece:
    """Rows that are shared out over some CTAs in one phase.

    Attributes:
        phase: the barriers before it.
        rows: axes, innermost last.
        owner: the threads of a row.
        most: CTAs that the rows are shared out over; 0: as many as there are rows for.
        slabs: CTAs that share what lies within a row.
        loops: in order.
        vector: rows that a thread computes at once.
        combined: reductions over other CTAs' rows, whose parts every row, or every CTA, puts together first.
        saved: reductions that a later phase reads, stored in device memory.
        tile: of the product that it computes, if it does.
    """

    phase: int
    rows: tuple[int, ...]
    owner: Owner
    most: int
    slabs: int
    loops: tuple[RowLoop, ...]
    vector: int = 1
    combined: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    tile: Tile | None = None

    @property
    def roots(self) -> list[Root]:
        return [root for loop in self.loops for root in loop.roots]

    @property
    def flat(self) -> bool:
        """Whether each thread computes separate rows without a loop in them: the elementwise pieces."""
        return self.owner.kind == "thread" and not any(loop.axes for loop in self.loops)

    @property
    def looped(self) -> bool:
        """Whether it has loops within its rows."""
        return not self.flat and not self.tiled and self.tile is None

    @property
    def tiled(self) -> bool:
        """Whether its outputs go through shared memory in tiles."""
        return any(loop.way == "tile" for loop in self.loops)


@dataclass(frozen=True)
class KernelPlan:
    """What a kernel does.

    Attributes:
        pattern: what it computes.
        configuration: how.
        pieces: by phase.
        mappings: of each root, by its name.
    """

    pattern: Pattern
    configuration: PatternConfiguration
    pieces: tuple[Piece, ...]
    mappings: dict[str, Mapping]

    @property
    def phases(self) -> int:
        return 1 + max(piece.phase for piece in self.pieces)

    @cached_property
    def parts(self) -> dict[int, int]:
        """The piece that makes the parts of each reduction of which CTAs have parts."""
        return {
            root.node: number
            for number, piece in enumerate(self.pieces)
            for root in piece.roots
            if root.output is None and self.mappings[root.name].partial
        }

    @property
    def single(self) -> bool:
        """Whether one CTA does all, so that a barrier of the grid is one of its threads."""
        return all(piece.most == 1 and piece.slabs == 1 for piece in self.pieces)

    @property
    def cooperative(self) -> bool:
        """Whether all CTAs have to run at once."""
        return self.phases > 1 and not self.single


def plan(pattern: Pattern, configuration: PatternConfiguration) -> KernelPlan:
    """What a kernel of this configuration does.

    Raises:
        KernelError: the configuration does not fit the pattern, or asks for what cannot be.
    """
    threads = configuration.threads
    if not 32 <= threads <= MOST_THREADS or threads & (threads - 1):
        raise KernelError(f"{threads} threads; expected a power of two from 32 to {MOST_THREADS}")
    if configuration.vector not in (1, 2, 4, 8):
        raise KernelError(f"{configuration.vector} elements at once; expected 1, 2, 4 or 8")
    roots, mappings = _mapped(pattern, configuration)
    reductions = {root.node: root for root in roots if root.reduced}
    phases = _phases(pattern, roots, mappings, reductions)
    members: dict[tuple[object, ...], list[Root]] = {}
    for root in roots:
        members.setdefault((phases[root.name], *_key(mappings[root.name])), []).append(root)
    pieces = [_piece(pattern, configuration, phases, mappings, group) for group in members.values()]
    pieces = _connected(pattern, pieces, mappings, reductions)
    made = KernelPlan(pattern, configuration, tuple(sorted(pieces, key=lambda piece: piece.phase)), mappings)
    _check(made)
    return made


def _mapped(pattern: Pattern, configuration: PatternConfiguration) -> tuple[list[Root], dict[str, Mapping]]:
    """All roots, with the elementwise values that the template keeps, and what the template says of them."""
    schedules = {schedule.root: schedule for schedule in parse(configuration.template).schedules}
    roots = list(pattern.roots)
    names = {root.name for root in roots}
    for name, schedule in schedules.items():
        if name not in names:
            place = name.rpartition("_")[2]
            cached = pattern.cached(int(place)) if place.isdigit() and int(place) < len(pattern.program.nodes) else None
            if cached is None or cached.name != name or not schedule.shared:
                raise KernelError(f"a schedule of {name}, which is no root of the pattern: {sorted(names)}")
            roots.append(cached)
    missing = names - schedules.keys()
    if missing:
        raise KernelError(f"the template has no schedule of {sorted(missing)}")
    roots.sort(key=_order)
    return roots, {root.name: _mapping(pattern, root, schedules[root.name], configuration.threads) for root in roots}


def _mapping(pattern: Pattern, root: Root, schedule: RootSchedule, threads: int) -> Mapping:
    """See `mapping`; found once for equal schedules."""
    return pattern.once(("mapping", schedule, threads), lambda: mapping(pattern, root, schedule, threads))


def _order(root: Root) -> tuple[bool, int]:
    """Outputs last."""
    return (False, root.node) if root.output is None else (True, root.output)


def _key(found: Mapping) -> tuple[object, ...]:
    """A key that is equal for roots that one piece can compute."""
    return (found.rows, found.owner, found.most, found.slabs, found.way == "tile", found.tile, found.group)


def _phases(
    pattern: Pattern, roots: Sequence[Root], mappings: dict[str, Mapping], reductions: dict[int, Root]
) -> dict[str, int]:
    """The first phase of each root in which all that it reads is there."""
    phases: dict[str, int] = {}
    for root in roots:
        own, phase = mappings[root.name], 0
        for place in pattern.reads(root):
            read = reductions[place]
            other, before = mappings[read.name], phases[read.name]
            if not other.partial:
                phase = max(phase, before + (_key(own) != _key(other)))
            else:
                phase = max(phase, before + (1 if _combines(own, read) else 2))
        phases[root.name] = phase
    return phases


def _combines(own: Mapping, read: Root) -> bool:
    """Whether the owners of a row add a reduction's parts themselves: it has one result for each row of
    theirs, or one alone."""
    return not read.kept or (set(own.rows) == set(read.kept) and own.way not in ("tile", "product"))


def _piece(
    pattern: Pattern,
    configuration: PatternConfiguration,
    phases: dict[str, int],
    mappings: dict[str, Mapping],
    roots: Sequence[Root],
) -> Piece:
    """The roots that one piece computes; found once for equal ones."""
    of = tuple(mappings[root.name] for root in roots)
    key = ("piece", configuration.vector, phases[roots[0].name], tuple(roots), of)
    return pattern.once(key, lambda: _piece_of(pattern, configuration, phases, mappings, roots))


def _piece_of(
    pattern: Pattern,
    configuration: PatternConfiguration,
    phases: dict[str, int],
    mappings: dict[str, Mapping],
    roots: Sequence[Root],
) -> Piece:
    first = mappings[roots[0].name]
    own = {root.node for root in roots if root.output is None and not mappings[root.name].partial}
    levels: dict[int, int] = {}  # of the values that the piece keeps
    loops: dict[tuple[int, tuple[int, ...], tuple[int, ...], Way], list[Root]] = {}
    for root in sorted(roots, key=_order):
        level = max((levels[place] + 1 for place in pattern.needs(root, own) if place in levels), default=0)
        if root.output is None and root.node in own:
            levels[root.node] = level
        found = mappings[root.name]
        loops.setdefault((level, found.within, found.serial, found.way), []).append(root)
    made = []
    for (_, axes, serial, way), members in sorted(loops.items(), key=lambda item: item[0][0]):
        wide = first.owner.kind != "strided" and way == "flat" and bool(axes)
        vector = vector_width(pattern, members, axes, configuration.vector) if wide else 1
        made.append(RowLoop(axes, serial, way, vector, tuple(members)))
    piece = Piece(phases[roots[0].name], first.rows, first.owner, first.most, first.slabs, tuple(made))
    if first.tile is not None:
        piece = replace(piece, tile=first.tile)
    elif piece.flat:
        piece = replace(piece, vector=vector_width(pattern, roots, piece.rows, configuration.vector))
    return piece


def _connected(
    pattern: Pattern, pieces: list[Piece], mappings: dict[str, Mapping], reductions: dict[int, Root]
) -> list[Piece]:
    """The pieces with what they read of each other: parts put together, and results stored."""
    made_by = {root.node: number for number, piece in enumerate(pieces) for root in piece.roots if root.output is None}
    combined: list[set[int]] = [set() for _ in pieces]
    saved: list[set[int]] = [set() for _ in pieces]
    apart: set[int] = set()  # reductions whose parts need a piece that does nothing else
    for number, piece in enumerate(pieces):
        for root in piece.roots:
            for place in pattern.reads(root):
                read = reductions[place]
                if not mappings[read.name].partial:
                    if made_by[place] != number:
                        saved[made_by[place]].add(place)
                elif _combines(mappings[root.name], read):
                    combined[number].add(place)
                else:
                    apart.add(place)
    found = [
        replace(piece, combined=tuple(sorted(combined[number])), saved=tuple(sorted(saved[number])))
        for number, piece in enumerate(pieces)
    ]
    for place in sorted(apart):
        source = pieces[made_by[place]]
        rows, phase = pattern.in_order(reductions[place].kept), source.phase + 1
        owner = _combiners(source.owner.rows * source.owner.threads)
        same = [i for i, piece in enumerate(found) if (piece.phase, piece.rows) == (phase, rows) and not piece.loops]
        if same:
            piece = found[same[0]]
            places = (*piece.combined, place)
            found[same[0]] = replace(piece, combined=places, saved=places)
        else:
            found.append(Piece(phase, rows, owner, source.most, 1, (), 1, (place,), (place,)))
    return found


def _combiners(threads: int) -> Owner:
    """The threads of a CTA that add parts: neighbouring threads have neighbouring results, and several have one."""
    return Owner("strided", WARP, threads // WARP) if threads > WARP else Owner("thread", threads, 1)


def own_values(plan: KernelPlan, piece: Piece) -> set[int]:
    """What a piece makes for itself and keeps: results of reductions, elementwise values in shared memory."""
    return {root.node for root in piece.roots if root.output is None and not plan.mappings[root.name].partial}


def alike(plan: KernelPlan, piece: Piece) -> Hashable:
    """A key that is equal for pieces that threads compute in the same way, in whichever kernel of a pattern."""
    return piece, plan.configuration.threads, tuple(plan.mappings[root.name] for root in piece.roots)


def counted(pattern: Pattern, piece: Piece, loop: RowLoop) -> Segments | None:
    """What a loop counts whose threads go through marked numbers alone; None: they go through all."""
    if piece.owner.kind != "thread" or piece.slabs > 1 or not piece.rows or not loop.axes or loop.serial:
        return None
    found = {pattern.segments.get(root.node) if root.output is None else None for root in loop.roots}
    only = found.pop() if len(found) == 1 else None
    if only is None or not set(pattern.program.types[only.ids].axes) <= set(loop.axes):
        return None
    return only if all(set(root.kept) == set(piece.rows) for root in loop.roots) else None


def tile_axes(plan: KernelPlan, piece: Piece) -> tuple[tuple[int, ...], ...]:
    """Batch, rows and columns of the products of a piece."""
    return plan.pattern.tiles[piece.roots[0].name][0].form


def _check(made: KernelPlan) -> None:
    """Raises KernelError for what no kernel can do."""
    for piece in made.pieces:
        for loop in piece.loops:
            for root in loop.roots:
                found = made.mappings[root.name]
                if found.over_rows and root.kept:
                    if root.kept != loop.axes or made.pattern.static(loop.axes) is None:
                        raise KernelError(
                            f"{root.name} adds up rows: the sums that a CTA has are along axes {root.kept}; expected "
                            f"all axes within the row, {loop.axes}, in this order and of known sizes"
                        )
                    if piece.owner.kind == "strided":
                        raise KernelError(f"{root.name}: rows that lie across warps are not added up")
                cached = root.output is None and not root.reduced
                if cached and (piece.owner.kind == "thread" or not loop.axes):
                    raise KernelError(f"{root.name} is no array within a row that several threads share")
                if (cached or loop.serial) and made.pattern.static(loop.axes) is None:
                    raise KernelError(f"{root.name} is an array in shared memory, of unknown size")
