"""Shared-memory planning (FusionStitching, section 5.4 and Algorithm 4).

Arrays within rows, results of reductions or elementwise values, ask for shared memory in the order in which a piece's
loops write them. One that dominates an earlier one, so that whatever the earlier one is used for has gone into it,
takes over its space. The graph is that of the values within the piece, and dominance is seen from its exit.

Dominance says what is used no more after a value. It does not say that a thread has read an element before another one
overwrites it: a loop that reads an array and writes another one in its place has to do both at the same positions,
which `in_place` tells. Around a loop that writes an array there are barriers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from custom_ops.expr.cuda import C_TYPES
from custom_ops.expr.nodes import arguments_of
from custom_ops.fusion.codegen.plan.dominance import DominanceTree
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece, alike, counted
from custom_ops.fusion.codegen.plan.mapping import TILE, WARP, Mapping
from custom_ops.fusion.codegen.plan.pattern import Root

ALIGNMENT = 16
PITCH = 2  # numbers between the rows of a product's tile (`kernels/contraction.cuh`)
_EXIT = -1

SIZES = {"double": 8, "float": 4, "long long": 8, "int": 4, "bool": 1}


@dataclass(frozen=True)
class SharedPlan:
    """Where things lie in a CTA's shared memory while it computes a piece.

    Attributes:
        exchange: bytes at its beginning, for reductions.
        places: of each array, for all rows that the CTA computes at once.
        requested: bytes of each array.
        arrays: bytes that all arrays take.
    """

    exchange: int
    places: dict[int, int]
    requested: dict[int, int]
    arrays: int

    @property
    def bytes(self) -> int:
        return self.exchange + self.arrays


def shared_bytes(plan: KernelPlan) -> int:
    """Bytes of shared memory of a CTA, which computes one piece at a time."""
    once = plan.pattern.once
    return max(once(("shared", alike(plan, piece)), partial(_bytes, plan, piece)) for piece in plan.pieces)


def _bytes(plan: KernelPlan, piece: Piece) -> int:
    return shared_plan(plan, piece).bytes


def shared_plan(plan: KernelPlan, piece: Piece) -> SharedPlan:
    """Where a piece's arrays lie."""
    exchange = _aligned(_exchange(plan, piece))
    written = {root.node: number for number, loop in enumerate(piece.loops) for root in _kept(plan, loop.roots)}
    requests = {place: _aligned(_request(plan, piece, place)) for place in written}
    if not requests:
        return SharedPlan(exchange, {}, {}, 0)
    space = _Space()
    graph = _Graph(plan, piece, written)
    tree = DominanceTree(_EXIT, graph.operands)
    for place in sorted(requests, key=lambda place: (written[place], place)):
        _allocate(place, requests[place], written[place], space, graph, tree)
    return SharedPlan(
        exchange, {place: exchange + at for place, at in space.places.items()}, requests, _aligned(space.end)
    )


def _allocate(place: int, size: int, loop: int, space: _Space, graph: _Graph, tree: DominanceTree[int]) -> None:
    """The inner part of Algorithm 4: share, reclaim, allocate."""
    shared = False
    for earlier in sorted(graph.allocated_before(place, space.live)):
        if not tree.dominates(place, earlier) or graph.last_read(earlier) > loop:
            continue
        in_place = graph.last_read(earlier) < loop or graph.in_place(place, earlier)
        if not shared and in_place and size <= space.live[earlier]:
            space.share(place, earlier)
            shared = True
        else:
            space.reclaim(earlier, graph.last_read(earlier))
    if not shared:
        space.allocate(place, size, loop)


@dataclass
class _Space:
    """Shared memory as it is given out.

    Attributes:
        live: bytes that each array has that others may take over.
        places: of all arrays.
        free: reclaimed: place, bytes, and the last loop that still reads what was there.
    """

    live: dict[int, int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    free: list[tuple[int, int, int]] = field(default_factory=list)
    end: int = 0

    def share(self, place: int, earlier: int) -> None:
        self.places[place] = self.places[earlier]
        self.live[place] = self.live.pop(earlier)

    def reclaim(self, earlier: int, last_read: int) -> None:
        self.free.append((self.places[earlier], self.live.pop(earlier), last_read))

    def allocate(self, place: int, size: int, loop: int) -> None:
        fitting = [block for block in self.free if block[1] >= size and block[2] < loop]
        if fitting:
            block = min(fitting, key=lambda block: (block[1], block[0]))
            self.free.remove(block)
            self.places[place], self.live[place] = block[0], block[1]
        else:
            self.places[place], self.live[place] = self.end, size
            self.end += size


class _Graph:
    """The values of a piece, and their readers."""

    def __init__(self, plan: KernelPlan, piece: Piece, written: dict[int, int]) -> None:
        self._pattern, self._loops, self._written = plan.pattern, piece.loops, written
        leave = [root for root in piece.roots if root.output is not None or plan.mappings[root.name].partial]
        nodes = plan.pattern.program.nodes
        local = {
            root.node for root in piece.roots if root.output is None
        }  # what others make is read, and no value here
        self._operands: dict[int, list[int]] = {_EXIT: sorted({*map(plan.pattern.start, leave), *piece.saved})}
        waiting = list(self._operands[_EXIT])
        while waiting:
            place = waiting.pop()
            if place not in self._operands:
                looked_into = place in local or not plan.pattern.reduces(place)
                self._operands[place] = sorted(set(arguments_of(nodes[place]))) if looked_into else []
                waiting += self._operands[place]
        readers: dict[int, int] = {}
        for number, loop in enumerate(piece.loops):
            for root in loop.roots:
                for place in plan.pattern.needs(root, written):
                    if place in written and (place != root.node or root.output is not None):
                        readers[place] = number
        self._readers = {place: readers.get(place, at) for place, at in written.items()}
        for place in piece.saved:
            if place in written:
                self._readers[place] = len(piece.loops)

    def operands(self, place: int) -> list[int]:
        return self._operands[place]

    def last_read(self, place: int) -> int:
        """The last loop that reads an array."""
        return self._readers[place]

    def allocated_before(self, place: int, live: dict[int, int]) -> set[int]:
        """The arrays that `place` is computed from, at once or through others."""
        found, waiting = set[int](), list(self._operands.get(place, []))
        while waiting:
            other = waiting.pop()
            if other not in found:
                found.add(other)
                waiting += self._operands.get(other, [])
        return found & live.keys()

    def in_place(self, place: int, earlier: int) -> bool:
        """Whether a loop that reads `earlier` can write `place` over it: both at the same positions, of one size."""
        pattern = self._pattern
        types = pattern.program.types
        loop = self._loops[self._written[place]]
        readers = [root for root in loop.roots if earlier in pattern.needs(root, self._written)]
        return (
            loop.way == "flat"
            and set(types[place].axes) >= set(loop.axes)
            and types[place].axes == types[earlier].axes
            and SIZES[C_TYPES[types[place].dtype]] == SIZES[C_TYPES[types[earlier].dtype]]
            and all(set(loop.axes) <= set(types[root.node].axes) or root.reduced for root in readers)
        )


def _kept(plan: KernelPlan, roots: Iterable[Root]) -> list[Root]:
    """The roots whose result is an array in shared memory."""
    return [root for root in roots if is_array(root, plan.mappings[root.name])]


def is_array(root: Root, found: Mapping) -> bool:
    """Whether a root's result is an array within a row, in shared memory."""
    return root.output is None and not found.partial and (not root.reduced or found.way in ("serial", "warps"))


def array_axes(plan: KernelPlan, piece: Piece, place: int) -> tuple[int, ...]:
    """The axes of an array within a row."""
    axes = set(plan.pattern.program.types[place].axes)
    return plan.pattern.in_order(axes - set(piece.rows))


def array_size(plan: KernelPlan, piece: Piece, place: int) -> int:
    """Elements of an array within a row."""
    size = plan.pattern.static(array_axes(plan, piece, place))
    assert size is not None, "arrays in shared memory have known sizes"
    return size


def _request(plan: KernelPlan, piece: Piece, place: int) -> int:
    kind = C_TYPES[plan.pattern.program.types[place].dtype]
    return array_size(plan, piece, place) * SIZES[kind] * piece.owner.rows


def _exchange(plan: KernelPlan, piece: Piece) -> int:
    """What reductions take, for numbers of 8 bytes."""
    threads = plan.configuration.threads
    roots = [root for root in piece.roots if root.output is None]
    if piece.tile is not None:
        nodes = [root.node for root in piece.roots if root.reduced and root.node in plan.pattern.products]
        wide = max(SIZES[C_TYPES[plan.pattern.program.types[node].dtype]] for node in nodes)
        return wide * threads // WARP * piece.tile.rows * (piece.tile.columns + PITCH)
    if piece.tiled:
        kinds = [plan.pattern.program.types[root.node].dtype for root in piece.roots]
        return sum(SIZES[C_TYPES[kind]] * TILE * (TILE + 1) for kind in kinds)
    if any(plan.mappings[root.name].over_rows and root.kept for root in roots):
        return 8 * threads * max(loop.vector for loop in piece.loops)
    if piece.owner.kind == "strided" and (roots or piece.combined):
        return 8 * threads
    over_rows = any(plan.mappings[root.name].over_rows for root in roots)
    numbers = any(not plan.pattern.program.types[place].axes for place in piece.combined)
    by_cta = piece.owner.kind == "cta" and (piece.combined or any(root.reduced for root in roots))
    marked = any(counted(plan.pattern, piece, loop) for loop in piece.loops)
    return 8 * (threads // WARP) if over_rows or numbers or by_cta or marked else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
