"""Templates of a pattern: how roots can be stitched together, and laid out over CTAs and threads (FusionStitching's
TemplatesGeneration, section 5.3).

A *stitching* says for each component, roots that depend on each other, whose rows its roots share. What fits these rows
is computed within them; the rest has other rows, and runs in phases before and after. Another stitching leaves all
roots apart, and one computes everything in one CTA. A *layout* says how many threads own a row, and how many CTAs there
are. A template is a stitching in a layout; those that no kernel can be written for are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TypeAlias

from custom_ops.errors import KernelError
from custom_ops.expr.cuda import C_TYPES, HALF_TYPES
from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.kernel import FusionKernel, make
from custom_ops.fusion.codegen.plan.addresses import lies_along
from custom_ops.fusion.codegen.plan.contraction import CHUNK, EACH, LANES, TENSOR_ROWS, Tile
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.mapping import TILE, WARP
from custom_ops.fusion.codegen.plan.pattern import Pattern, Root
from custom_ops.fusion.codegen.plan.registers import UNROLLED, repeated
from custom_ops.fusion.codegen.plan.shared import PITCH, SIZES
from custom_ops.fusion.codegen.plan.template import parse
from custom_ops.pow2 import round_up_pow2

ONE_CTA = 1 << 16  # positions, at most, that one CTA goes through
IN_SHARED = 96 << 10  # bytes of arrays within rows, at most

Rows: TypeAlias = frozenset[int] | None  # of a component; None: each root has its own
Stitching: TypeAlias = tuple[Rows, ...]  # of each component


@dataclass(frozen=True)
class RowLayout:
    """How rows are laid out.

    Attributes:
        threads: of a CTA.
        vector: elements that are loaded at once.
        each: elements of a row that a thread should see, at least.
        ctas: of a launch, at most.
        split: whether what is reduced may be split over CTAs, which costs a barrier of the grid.
        cache: whether values that do not fit registers are kept in shared memory.
    """

    threads: int
    vector: int
    each: int
    ctas: int
    split: bool
    cache: bool


def kernels(pattern: Pattern, sizes: Sequence[int], laid_out: Iterable[RowLayout]) -> Iterator[FusionKernel]:
    """All kernels that there are for a pattern, for axes of these sizes."""
    seen: set[PatternConfiguration] = set()
    groups = components(pattern)
    writers = [Templates(pattern, sizes, groups, layout) for layout in laid_out]
    for stitching, templates in product(_stitchings(sizes, groups), writers):
        layout = templates.layout
        for tile in tiles(pattern, sizes, layout.threads) if pattern.tiles else [None]:
            template = templates.text(stitching, tile)
            configuration = PatternConfiguration(template, layout.threads, layout.vector if stitching else 1)
            if configuration in seen:
                continue
            seen.add(configuration)
            try:
                kernel = make(pattern, configuration)
            except KernelError:
                continue
            yield kernel
            if layout.cache and (cached := with_caches(kernel)):
                yield cached


def tiles(pattern: Pattern, sizes: Sequence[int], threads: int) -> list[Tile]:
    """The tiles for a pattern's products in CTAs of so many threads; none where there is no product.

    Few rows are each thread's, which has no use for tensor cores; tiles are no larger than the results, and there are
    no more warps than the depth has chunks.
    """
    if not pattern.tiles:
        return []
    products = [found for found, _ in pattern.tiles.values()]
    rows, columns, depth = (
        max(prod(sizes[axis] for axis in axes) for axes in each)
        for each in zip(*((found.rows, found.columns, found.depth) for found in products), strict=True)
    )
    reduced = any(
        root.reduced and root.node not in pattern.products for root in pattern.roots if root.name in pattern.tiles
    )
    wide = any(pattern.program.types[found.node].dtype == "float64" for found in products)
    fits = threads // WARP <= max(4, -(-depth // CHUNK))
    shapes = [(min(8, round_up_pow2(rows)), False)] if rows <= 16 or wide else []
    shapes += [(each * LANES, True) for each in TENSOR_ROWS if not wide and each * LANES // 2 < rows and rows > 4]
    found = [
        Tile(height, width * LANES, tensor)
        for height, tensor in shapes
        for width in EACH
        if (width * LANES >= columns if reduced else width <= 4) and (width == 1 or width * LANES // 2 < columns)
    ]
    size = 8 if wide else 4
    return [tile for tile in found if fits and size * threads // WARP * tile.rows * (tile.columns + PITCH) <= IN_SHARED]


def with_caches(kernel: FusionKernel) -> FusionKernel | None:
    """The kernel with values in shared memory that several loops over a row need and registers do not hold; None if
    there are none, or they do not fit."""
    plan, schedules = kernel.plan, []
    for piece in plan.pieces:
        if piece.owner.kind == "cta" and not piece.tiled and piece.slabs == 1:
            for place in repeated(plan.pattern, piece):
                root = plan.pattern.cached(place)
                grid = f"GRID_{piece.most}" if piece.most else "GRID"
                attributes = ",".join(grid if axis in piece.rows else "CTA" for axis in root.axes)
                schedules.append(f"{root.name}[{attributes}]S;")
    if not schedules:
        return None
    configuration = replace(plan.configuration, template=plan.configuration.template + "".join(schedules))
    try:
        return make(plan.pattern, configuration)
    except KernelError:
        return None


def components(pattern: Pattern) -> list[list[Root]]:
    """Roots that depend on each other's reductions, or read the same input at all of their positions, together; those
    that are computed in tiles of a product are in none."""
    found: list[list[Root]] = []
    inputs = {root.name: _whole_inputs(pattern, root) for root in pattern.roots}
    for root in pattern.roots:
        if root.name in pattern.tiles:
            continue
        reads = set(pattern.reads(root))
        near = [
            group
            for group in found
            if any(
                (other.output is None and other.node in reads) or inputs[other.name] & inputs[root.name]
                for other in group
            )
        ]
        merged = [other for group in near for other in group] + [root]
        found = [group for group in found if group not in near] + [merged]
    return found


def _whole_inputs(pattern: Pattern, root: Root) -> set[int]:
    """The inputs of a root that vary along all of its axes."""
    program = pattern.program
    return {
        place
        for place in pattern.needs(root)
        if isinstance(program.nodes[place], Input) and root.axes and set(program.types[place].axes) == set(root.axes)
    }


def _stitchings(sizes: Sequence[int], groups: Sequence[Sequence[Root]]) -> list[Stitching]:
    candidates = [_candidates(sizes, group) for group in groups]
    best = tuple(found[0] for found in candidates)
    others = [
        (*best[:number], rows, *best[number + 1 :]) for number, found in enumerate(candidates) for rows in found[1:]
    ]
    last = tuple(found[-1] for found in candidates)
    return list(dict.fromkeys([best, *others, last]))


def _positions(group: Sequence[Root], sizes: Sequence[int]) -> int:
    return sum(prod(sizes[axis] for axis in root.axes) for root in group)


def _candidates(sizes: Sequence[int], group: Sequence[Root]) -> list[Rows]:
    """The rows that a component's roots can share, those first that fit the most positions."""

    def fitting(rows: Rows) -> tuple[int, int]:
        fits = [root for root in group if _kind(root, rows) != "own"]
        return _positions(fits, sizes), prod(sizes[axis] for axis in rows or ())

    found = {frozenset(axes) for root in group if root.reduced and root.kept for axes in (root.kept, root.reduced)}
    small = any(root.reduced for root in group) and _positions(group, sizes) <= ONE_CTA
    one_cta: list[Rows] = [frozenset()] * small
    return [*sorted(found, key=lambda rows: (fitting(rows), sorted(rows)), reverse=True), None, *one_cta]


def _kind(root: Root, rows: Rows) -> str:
    """How a root fits rows: "row", "nested" (its result is an array within one), "over" (it adds up rows), "own"."""
    if rows is None:
        return "own"
    kept, reduced = set(root.kept), set(root.reduced)
    if rows <= kept:
        return "row" if not reduced or kept == rows else "nested"
    return "over" if rows and rows <= reduced and (not kept or reduced == rows) else "own"


def layouts(pattern: Pattern, processors: int) -> Iterator[RowLayout]:
    """Layouts worth a try on a device of so many multiprocessors."""
    dtypes = {tensor.dtype for tensor in pattern.program.tensors}
    widest = 8 if dtypes & HALF_TYPES.keys() else 4 if dtypes & {"float32", "int32"} else 2
    for threads, vector, each in product((256, 128, 512, 1024), (widest, 1), (1, 4, 8)):
        for split in (False, True):
            yield RowLayout(threads, vector, each * vector, processors * 2048 // threads, split, each == 1)


@dataclass(frozen=True)
class Templates:
    """Writes the templates of stitchings in a layout. It keeps schedules of a component's roots, whatever the others
    are: a stitching differs from another in few."""

    pattern: Pattern
    sizes: Sequence[int]
    groups: Sequence[Sequence[Root]]
    layout: RowLayout
    _written: dict[tuple[int, Rows], dict[str, str]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def text(self, stitching: Stitching, tile: Tile | None = None) -> str:
        """The template of a stitching; `tile` is that of products, if there are any."""
        found: dict[str, str] = {}
        for number, rows in enumerate(stitching):
            if (number, rows) not in self._written:
                self._written[number, rows] = self._component(self.groups[number], rows)
            found |= self._written[number, rows]
        if tile is not None:
            tiled = [root for root in self.pattern.roots if root.name in self.pattern.tiles]
            found |= {root.name: self._product(root, tile) for root in tiled}
        return "".join(found[root.name] for root in self.pattern.roots)

    def _component(self, group: Sequence[Root], rows: Rows) -> dict[str, str]:
        """The schedules of roots that share these rows. They read no reduction of another component."""
        found: dict[str, str] = {}
        attributes = self._rows(group, rows) if rows is not None else None
        for root in sorted(group, key=lambda root: root.output is not None):
            kind = _kind(root, rows)
            if attributes is None or kind == "own" or not self._fits(root, kind, rows or frozenset(), attributes):
                found[root.name] = self._own(root, found)
            else:
                found[root.name] = self._within(root, kind, rows or frozenset(), *attributes)
        return found

    def _count(self, axes: Iterable[int]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def _rows(self, group: Sequence[Root], rows: frozenset[int]) -> tuple[str, str]:
        """The attributes of rows, and of axes within them."""
        if not rows:
            return "", "CTA"
        inside = [root for root in group if _kind(root, rows) == "row"]
        if self._marked(inside):
            return self._by_threads()
        axes = {axis for root in inside for axis in root.axes}
        longest = max((self._count(set(root.axes) - rows) for root in inside), default=1)
        last = self.pattern.in_order(axes | rows)[-1]
        nested = any(_kind(root, rows) == "nested" for root in group)
        row, within = self._owner(rows, longest, strided=last in rows and longest > 1, alone=not nested)
        return row, self._split(rows, longest, row, within)

    def _marked(self, roots: Sequence[Root]) -> bool:
        """Whether threads of this layout go through the marked numbers of sums of segments (`plan/segment_ids.py`)."""
        few = not self.layout.split and self.layout.each == self.layout.vector
        return few and any(root.reduced and root.node in self.pattern.segments for root in roots)

    def _by_threads(self) -> tuple[str, str]:
        return f"GRID_{self.layout.ctas}-CTA_{self.layout.threads}", "THREAD"

    def _owner(self, rows: frozenset[int], longest: int, strided: bool, alone: bool) -> tuple[str, str]:
        threads, ctas = self.layout.threads, self.layout.ctas
        if strided and alone:
            at_once = min(WARP, round_up_pow2(self._count(rows)))
            return f"GRID_{ctas}-CTA_{at_once}-WARP_{threads // at_once}", "WARP"
        share = round_up_pow2(-(-longest // self.layout.each))
        if share == 1 and alone:
            return self._by_threads()
        if share < WARP:
            return f"GRID_{ctas}-CTA_{threads // max(share, 4)}", "CTA"
        return (f"GRID_{ctas}-WARP_{threads // WARP}" if share == WARP else f"GRID_{ctas}"), "CTA"

    def _split(self, rows: frozenset[int], longest: int, row: str, within: str) -> str:
        """The attribute of axes within rows, split over several CTAs where there are fewer rows than CTAs."""
        parts = row.split("-")
        by_cta = within == "CTA" and len(parts) == 1
        if not self.layout.split or not (by_cta or within == "WARP"):
            return within
        at_once = 1 if by_cta else int(parts[1].partition("_")[2])
        share = self.layout.threads // at_once
        slabs = min(self.layout.ctas * at_once // max(self._count(rows), 1), longest // (share * 4))
        return f"GRID_{round_up_pow2(slabs + 1) // 2}-{within}_{share}" if slabs > 1 else within

    def _fits(self, root: Root, kind: str, rows: frozenset[int], attributes: tuple[str, str]) -> bool:
        """Whether an array within rows is of known size, and fits shared memory, or registers where it adds up rows."""
        array = [axis for axis in root.kept if axis not in rows]
        if kind == "row" or not array:
            return True
        if self.pattern.static(array) is None or attributes[1] in ("WARP", "THREAD"):
            return False
        if kind == "over":
            at_once = int(attributes[0].rpartition("_")[2]) if "-" in attributes[0] else 1
            return attributes[1] == "CTA" and self._count(array) * at_once <= UNROLLED * self.layout.threads
        return self._count(array) * SIZES[C_TYPES[self.pattern.program.types[root.node].dtype]] <= IN_SHARED

    def _within(self, root: Root, kind: str, rows: frozenset[int], row: str, inside: str) -> str:
        if kind != "nested":
            return self._schedule(root, lambda axis: row if axis in rows else inside)
        # A warp for each number where what it adds up is contiguous, else a thread.
        last = self.pattern.in_order(root.axes)[-1]
        by_warps = last in root.reduced and "-" not in row and self._count(root.reduced) >= WARP
        kept, reduced = ("WARP", "CTA") if by_warps else ("CTA", "THREAD")
        return self._schedule(
            root, lambda axis: row if axis in rows else reduced if axis in root.reduced else kept, shared=True
        )

    def _own(self, root: Root, found: Mapping[str, str]) -> str:
        """The schedule of a root that shares no rows; the schedules of reductions that it may read are in `found`."""
        threads, ctas = self.layout.threads, self.layout.ctas
        flat = f"GRID_{ctas}-CTA_{threads}"
        if not root.reduced:
            tiled = self._tiled(root)
            if tiled is not None:
                return self._schedule(root, lambda axis: f"GRID_{ctas}" + f"-CTA_{TILE}" * (axis in tiled), shared=True)
            if self._combines(root, found):
                by_several, _ = self._owner(frozenset(root.axes), 2, strided=True, alone=True)
                return self._schedule(root, lambda axis: by_several)
            return self._schedule(root, lambda axis: flat)
        if not root.kept:
            return self._schedule(root, lambda axis: flat if self.layout.split else "CTA")
        if self._marked([root]):
            row, inside = self._by_threads()
            return self._schedule(root, lambda axis: row if axis in root.kept else inside)
        rows, columns = frozenset(root.kept), self.pattern.in_order(root.axes)[-1] in root.kept
        longest = self._count(root.reduced)
        row, inside = self._owner(rows, longest, strided=columns, alone=True)
        inside = self._split(rows, longest, row, inside)
        return self._schedule(root, lambda axis: row if axis in rows else inside)

    def _combines(self, root: Root, found: Mapping[str, str]) -> bool:
        """Whether an output puts together, for each of its positions, the parts of a reduction that CTAs leave."""
        reads = set(self.pattern.reads(root))
        for other in self.pattern.roots:
            same = other.node in reads and set(other.kept) == set(root.axes)
            if other.output is None and same and other.name in found:
                (schedule,) = parse(found[other.name]).schedules
                for axis, levels in zip(other.axes, schedule.attributes, strict=True):
                    if axis in other.reduced and levels[0].kind == "GRID":
                        return True
        return False

    def _product(self, root: Root, tile: Tile) -> str:
        """The schedule of a contraction, or of an output that reads one."""
        product, _ = self.pattern.tiles[root.name]
        rows, columns = tile.attributes(self.layout.ctas)

        def attribute(axis: int) -> str:
            if axis in product.rows or axis in product.columns:
                return rows if axis in product.rows else columns
            return "WARP" if axis in product.depth else f"GRID_{self.layout.ctas}"

        return self._schedule(root, attribute)

    def _tiled(self, root: Root) -> tuple[int, int] | None:
        """The two axes of an output's tiles, if it is read along one and written along another."""
        if len(root.axes) < 2:
            return None
        nodes = (self.pattern.program.nodes[place] for place in self.pattern.needs(root))
        inputs = [node for node in nodes if isinstance(node, Input)]
        counts = {axis: sum(lies_along(self.pattern, node, axis) for node in inputs) for axis in root.axes}
        along = max(counts, key=lambda axis: counts[axis])
        last = root.axes[-1]
        large = min(self.sizes[along], self.sizes[last]) >= TILE // 2
        return (along, last) if counts[along] > counts[last] and large else None

    def _schedule(self, root: Root, attribute: Callable[[int], str], shared: bool = False) -> str:
        return f"{root.name}[{','.join(attribute(axis) for axis in root.axes)}]{'S' * shared};"
