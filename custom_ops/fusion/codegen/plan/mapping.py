"""What the attributes of a schedule mean: which CTAs and threads look at which positions.

The axes with `GRID` are a root's *rows*: positions along them are shared out over the CTAs of the launch, and the
threads that *own* a row compute all of it. The other axes lie within a row.

    of the rows        a row is owned by
    GRID_c             a CTA
    GRID_c-WARP_w      a warp; w rows a CTA at once
    GRID_c-CTA_r       one of r parts of the CTA: a thread, if r is its size; else neighbouring lanes
    GRID_c-CTA_r-WARP_w  w threads that are r apart: neighbouring rows are neighbouring threads'
    (none)             the only CTA

    within a row
    CTA                shared out over the threads that own the row
    WARP               over the warps of the CTA that owns it, or over the threads r apart
    THREAD             gone through by each thread

c is the largest number of CTAs. With `CTA` for the kept axes and `THREAD` for the reduced ones each thread reduces on
its own; with `WARP` and `CTA` each warp does, with all its lanes: the results are an array in shared memory (`S`).

A reduction over rows (GRID at reduced axes) is summed up by each CTA. The readers of the result add the CTAs' parts,
after a barrier of the grid. Where kept axes have GRID, too, they are the rows, and what is reduced is split over so
many CTAs, as what an output has within such rows can be: `[GRID_16-WARP_8,GRID_64-CTA_32-WARP_8]` are sums of columns,
32 a CTA, in 16 slabs of rows.

Products of matrices are computed in tiles (`contraction.py`), whose attributes are others.

An output with `S` goes through shared memory in tiles of 32 times 32: it is read along the one axis with
GRID_c-CTA_32 and written along the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.plan.contraction import Tile, is_tiled, tile_of
from custom_ops.fusion.codegen.plan.pattern import Pattern, Root
from custom_ops.fusion.codegen.plan.template import Attribute, RootSchedule

WARP = 32
TILE = 32

Ownership: TypeAlias = Literal["thread", "lanes", "strided", "cta"]
Way: TypeAlias = Literal["flat", "serial", "warps", "tile", "product"]


@dataclass(frozen=True)
class Owner:
    """The threads of a CTA that compute a row together.

    Attributes:
        kind: one thread, neighbouring lanes of a warp, every `rows`-th thread, or all.
        rows: how many rows the CTA computes at once.
        threads: of one row.
    """

    kind: Ownership
    rows: int
    threads: int


@dataclass(frozen=True)
class Mapping:
    """One root's schedule.

    Attributes:
        rows: axes whose positions are shared out over CTAs.
        owner: of a row.
        most: CTAs that the rows are shared out over; 0: as many as there are rows for.
        within: axes within a row that threads share, innermost last.
        serial: axes within each of these positions, over which a thread or a warp reduces.
        way: "flat": `serial` is empty; "serial": a thread goes through them; "warps": a warp does; "tile": through
            shared memory, along the last of `rows` and along the one before; "product": in tiles of a product.
        over_rows: whether a reduction runs over the rows, so that CTAs have parts of it.
        slabs: CTAs that share what lies within a row.
        over_slabs: whether a reduction runs over what several CTAs share, so that they have parts of it.
        tile: of a product, of which batch, rows and columns are `rows`.
        group: the same for products, and what reads them, that one piece computes.
    """

    rows: tuple[int, ...]
    owner: Owner
    most: int
    within: tuple[int, ...] = ()
    serial: tuple[int, ...] = ()
    way: Way = "flat"
    over_rows: bool = False
    slabs: int = 1
    over_slabs: bool = False
    tile: Tile | None = None
    group: int = -1

    @property
    def partial(self) -> bool:
        """Whether a reduction is finished only after a barrier of the grid."""
        return self.over_rows or self.over_slabs


def mapping(pattern: Pattern, root: Root, schedule: RootSchedule, threads: int) -> Mapping:
    """The mapping of a schedule, in CTAs of so many threads.

    Raises:
        KernelError: the schedule does not fit the root, or means nothing here.
    """
    if schedule.root != root.name or len(schedule.attributes) != len(root.axes):
        raise KernelError(f"expected a schedule of {root.name} with {len(root.axes)} attributes, found '{schedule}'")
    attributes = dict(zip(root.axes, schedule.attributes, strict=True))
    if any(map(is_tiled, schedule.attributes)):
        return _product(pattern, root, attributes, threads, schedule)
    reduction = bool(root.reduced)
    on_grid = [axis for axis in root.axes if attributes[axis][0].kind == "GRID"]
    kept = [axis for axis in on_grid if axis in root.kept]
    split = [axis for axis in on_grid if axis in root.reduced] if kept else []
    if root.output is not None and len({attributes[axis] for axis in kept}) == 2:
        split = [axis for axis in kept if _is_split(attributes[axis])]
    rows = pattern.in_order(axis for axis in kept or on_grid if axis not in split)
    if root.output is not None and schedule.shared:
        return _tile(root, attributes, threads, schedule)
    inside = {axis: attributes[axis] for axis in root.axes if axis not in rows}
    owner, most = _owner([attributes[axis] for axis in rows], threads, schedule)
    if split:
        return _split(pattern, root, attributes, (rows, tuple(split)), owner, most, schedule)
    over_rows = reduction and bool(on_grid) and not kept
    if any(len(levels) != 1 or levels[0].kind == "GRID" for levels in inside.values()):
        raise _nonsense(schedule, "an axis within the rows with more than one level")
    kinds: dict[int, str] = {axis: levels[0].kind for axis, levels in inside.items()}
    if not over_rows and reduction and any(axis in inside for axis in root.kept):
        return _nested(pattern, root, kinds, rows, owner, most, schedule)
    plain = "THREAD" if owner.kind == "thread" else "WARP" if owner.kind == "strided" else "CTA"
    if set(kinds.values()) - {plain}:
        raise _nonsense(schedule, f"the axes within a row of {owner.kind}; expected {plain} for all")
    return Mapping(rows, owner, most, pattern.in_order(inside), over_rows=over_rows)


def _owner(rows: list[Attribute], threads: int, schedule: RootSchedule) -> tuple[Owner, int]:
    """The owner of the rows, and how many CTAs there are at most."""
    if not rows:
        return Owner("cta", 1, threads), 1
    if len(set(rows)) > 1:
        raise _nonsense(schedule, "rows along several axes have one attribute")
    grid, *rest = rows[0]
    if not rest:
        return Owner("cta", 1, threads), grid.size
    level = rest[0]
    if [other.kind for other in rest] == ["CTA", "WARP"] and level.size * rest[1].size == threads:
        return Owner("strided", level.size, rest[1].size), grid.size
    if len(rest) > 1:
        raise _nonsense(schedule, f"the rows in CTAs of {threads} threads")
    if level.kind == "WARP" and level.size * WARP == threads:
        return Owner("lanes", level.size, WARP), grid.size
    if level.kind == "CTA" and level.size == threads:
        return Owner("thread", threads, 1), grid.size
    if level.kind == "CTA" and level.size and threads % level.size == 0:
        share = threads // level.size
        if share <= WARP and WARP % share == 0:
            return Owner("lanes", level.size, share), grid.size
    raise _nonsense(schedule, f"the rows in CTAs of {threads} threads")


def _is_split(levels: Attribute) -> bool:
    """Whether the attribute is that of an output's axis within rows that several CTAs share.

    That is GRID_s-CTA_t beside rows of a CTA, and GRID_s-WARP_w beside rows of threads that lie apart. Rows have one
    level, or three.
    """
    return len(levels) == 2


def _split(
    pattern: Pattern,
    root: Root,
    attributes: dict[int, Attribute],
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    owner: Owner,
    most: int,
    schedule: RootSchedule,
) -> Mapping:
    """What lies within rows is shared out over CTAs, too: all that is reduced, or that an output has there."""
    rows, split = axes
    found = {attributes[axis] for axis in split}
    if {*rows, *split} != set(root.axes) or len(found) != 1 or owner.kind not in ("cta", "strided"):
        raise _nonsense(schedule, "all kept axes are rows of a CTA or of its warps, and all others are split")
    (levels,) = found
    if len(levels) != 2:
        raise _nonsense(schedule, "what is split over CTAs has two levels, GRID_s-CTA_t or GRID_s-WARP_w")
    grid, level = levels
    if level.kind != ("WARP" if owner.kind == "strided" else "CTA") or level.size != owner.threads:
        raise _nonsense(schedule, "what is split over CTAs, within one")
    return Mapping(rows, owner, most, pattern.in_order(split), slabs=grid.size, over_slabs=bool(root.reduced))


def _nested(
    pattern: Pattern,
    root: Root,
    kinds: dict[int, str],
    rows: tuple[int, ...],
    owner: Owner,
    most: int,
    schedule: RootSchedule,
) -> Mapping:
    """A reduction whose result is an array within each row."""
    kept, reduced = [axis for axis in root.kept if axis not in rows], root.reduced
    found = sorted({kinds[axis] for axis in kept}), sorted({kinds[axis] for axis in reduced})
    ways: dict[str, Way] = {"CTA THREAD": "serial", "WARP CTA": "warps"}
    way = ways.get(" ".join([*found[0], *found[1]]))
    if way is None or not schedule.shared or owner.kind == "thread" or (way == "warps" and owner.kind != "cta"):
        raise _nonsense(schedule, "an array within a row: [GRID,CTA,THREAD]S, or of a CTA's rows [GRID,WARP,CTA]S")
    return Mapping(rows, owner, most, pattern.in_order(kept), pattern.in_order(reduced), way)


def _tile(root: Root, attributes: dict[int, Attribute], threads: int, schedule: RootSchedule) -> Mapping:
    """The output is written along its last axis and read along another one."""
    tiled = [axis for axis in root.axes if len(attributes[axis]) == 2]
    others = [axis for axis in root.axes if axis not in tiled]
    levels = {attributes[axis][1:] for axis in tiled} | {attributes[axis][1:] for axis in others}
    grids = {attributes[axis][0] for axis in root.axes}
    plain = len(tiled) == 2 and tiled[-1] == root.axes[-1] and len(grids) == 1 and threads % TILE == 0
    if not plain or any(level and (level[0].kind, level[0].size) != ("CTA", TILE) for level in levels):
        raise _nonsense(schedule, "an output through shared memory: [GRID_c,GRID_c-CTA_32,GRID_c-CTA_32]S")
    (grid,) = grids
    return Mapping((*others, tiled[1], tiled[0]), Owner("cta", 1, threads), grid.size, way="tile")


def _product(
    pattern: Pattern, root: Root, attributes: dict[int, Attribute], threads: int, schedule: RootSchedule
) -> Mapping:
    """A contraction, or an output that reads one."""
    if root.name not in pattern.tiles:
        raise _nonsense(schedule, "it is no product of matrices, and reads none in its tiles")
    found, group = pattern.tiles[root.name]
    depth = root.reduced if root.node in pattern.products else ()
    if any([level.kind for level in attributes[axis]] != ["WARP"] for axis in depth):
        raise _nonsense(schedule, "the depth of a product is shared out over the warps: [...,WARP]")
    axes = (found.rows, found.columns, found.batch)
    tile, most = tile_of(*({attributes[axis] for axis in each} for each in axes))
    if root.reduced and not depth and (pattern.static(found.columns) or 0) > tile.columns:
        raise _nonsense(schedule, "a tile has not all of the columns that are reduced")
    rows = (*found.batch, *found.rows, *found.columns)
    return Mapping(rows, Owner("cta", 1, threads), most, way="product", tile=tile, group=group)


def _nonsense(schedule: RootSchedule, what: str) -> KernelError:
    return KernelError(f"'{schedule}' has no meaning: {what}")
