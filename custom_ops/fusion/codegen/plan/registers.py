"""Register planning: values of a row that a later loop needs again stay in registers (FusionStitching, section 5.3).

A thread sees the same positions of a row in each loop over the same axes. What it computed in one of them, and needs in
a later one, is kept if it fits: it is then computed once, and what it is computed from is read once. What does not fit
is computed again, inputs first. If there is room left, a row is loaded while the one before is computed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import partial

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Constant, Elementwise, Input, Position, Random, arguments_of
from custom_ops.expr.table import TABLE
from custom_ops.fusion.codegen.plan.addresses import is_packed
from custom_ops.fusion.codegen.plan.contraction import CHUNK, LANES, Contraction, Tile
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece, RowLoop, alike, counted, own_values
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.machine import REGISTERS, REGISTERS_PER_THREAD, WARP

MOST_KEPT = 96  # registers of a thread for values that are kept
UNROLLED = 64  # elements of a row that one thread sees, at most, for a loop to be unrolled

AHEAD = 4  # chunks of a product's depth that a warp loads before it multiplies them, at most
LOADED = 96  # registers of a thread for them
ADDRESS = 2  # registers of one

OTHERS = 64  # registers for all else
RESIDENT = 2048  # threads that a multiprocessor runs at once

_WIDE = ("float64", "int64")


@dataclass(frozen=True)
class KeptRegisters:
    """What stays in registers from loop to loop of a row.

    Attributes:
        elements: for each loop how many elements of a row a thread sees, if the loop is unrolled; else 0.
        values: for each loop what it finds in registers.
        made: for each loop what it leaves there.
        ahead: inputs of the first loop that are loaded while the row before is computed.
    """

    elements: tuple[int, ...]
    values: tuple[frozenset[int], ...]
    made: tuple[frozenset[int], ...]
    ahead: tuple[int, ...] = ()


def keep(pattern: Pattern, piece: Piece, own: Set[int]) -> KeptRegisters:
    """What to keep, found once for equal pieces; `own` are values that the piece has at hand anyway.

    Raises:
        KernelError: what is added up over rows does not fit.
    """
    key = ("kept", piece.rows, piece.owner, piece.slabs, piece.loops, frozenset(own))
    return pattern.once(key, lambda: _kept(pattern, piece, own))


def _kept(pattern: Pattern, piece: Piece, own: Set[int]) -> KeptRegisters:
    banned: set[int] = set()
    elements = [_elements(pattern, piece, loop) for loop in piece.loops]
    sums = _sums(pattern, piece, elements)
    while True:
        found = [_found(pattern, piece, number, elements, own, banned) for number in range(len(piece.loops))]
        kept = frozenset[int]().union(*found)
        total = sum(max(elements) * _registers(pattern, place) for place in kept)
        if total + sums <= _budget(piece) or not kept:
            break
        banned.add(min(kept, key=lambda place: (_cost(pattern, place, own), -place)))
    made: list[frozenset[int]] = []
    for number, loop in enumerate(piece.loops):
        later = frozenset[int]().union(
            *(found[i] for i in range(number + 1, len(found)) if piece.loops[i].axes == loop.axes)
        )
        earlier = frozenset[int]().union(*made)
        made.append(
            (later & _computed(pattern, loop, own, found[number])) - earlier if elements[number] else frozenset()
        )
    loads = _loads(pattern, piece, elements)
    # Where warps share no row and add up none, others that run at once hide what one waits for, with fewer registers.
    worth = piece.owner.kind == "cta" or sums > 0
    threads = piece.owner.rows * piece.owner.threads
    fits = _needed(total + sums, _registers_ahead(pattern, elements, loads)) <= min(
        REGISTERS // threads, REGISTERS_PER_THREAD
    )
    return KeptRegisters(tuple(elements), tuple(found), tuple(made), loads if worth and fits else ())


def _registers_ahead(pattern: Pattern, elements: list[int], loads: tuple[int, ...]) -> int:
    """Registers for the loads of a row, and for those of the next one."""
    return 2 * sum(elements[0] * _registers(pattern, place) for place in loads)


def _needed(kept: int, ahead: int) -> int:
    """Registers of a thread that keeps so many from loop to loop, and has so many for rows that are loaded ahead: half
    as many as it keeps again for all else, or, as compilers were seen to take beside loads, a constant."""
    return max(OTHERS, OTHERS // 2 + kept * 3 // 2, OTHERS * 3 // 4 + kept + ahead if ahead else 0)


def _loads(pattern: Pattern, piece: Piece, elements: list[int]) -> tuple[int, ...]:
    """What the first loop over a row loads of it, where a thread does so at the same positions of each row."""
    if not piece.rows or not elements or not elements[0]:
        return ()
    loop = piece.loops[0]
    size = pattern.static(loop.axes)
    if size is None or size % loop.vector:
        return ()
    nodes, types, rows = pattern.program.nodes, pattern.program.types, set(piece.rows)
    places = sorted({place for root in loop.roots for place in pattern.needs(root)})
    return tuple(
        place
        for place in places
        if isinstance(node := nodes[place], Input)
        and set(types[place].axes) & rows
        and is_packed(pattern, node, loop.axes[-1], loop.vector)
    )


def ctas_at_once(plan: KernelPlan) -> int:
    """CTAs that a multiprocessor should run at once, which bounds a thread's registers: as many as leave room for what
    threads keep, and half as much again for all else."""
    threads, once = plan.configuration.threads, plan.pattern.once
    needed = max(once(("needed", alike(plan, piece)), partial(_needed_by, plan, piece)) for piece in plan.pieces)
    needed = min(max(OTHERS, needed), REGISTERS_PER_THREAD)
    return max(1, min(RESIDENT // threads, REGISTERS // (threads * needed)))


def _needed_by(plan: KernelPlan, piece: Piece) -> int:
    """Registers of a thread that computes a piece."""
    count = loads = 0
    if piece.tile is not None:
        count = registers_of(plan, piece)
    elif piece.looped:
        own = own_values(plan, piece)
        kept, elements = keep(plan.pattern, piece, own), [_elements(plan.pattern, piece, x) for x in piece.loops]
        places = frozenset[int]().union(*kept.values)
        count = max(elements, default=0) * sum(_registers(plan.pattern, place) for place in places)
        count += _sums(plan.pattern, piece, elements)
        loads = _registers_ahead(plan.pattern, elements, kept.ahead)
    elif piece.flat:
        count = piece.vector * len(_streamed(plan.pattern, piece))
    return _needed(count, loads)


def _streamed(pattern: Pattern, piece: Piece) -> set[int]:
    """The inputs that a thread of an elementwise piece loads for its positions, all of them before it computes."""
    places = {place for root in piece.roots for place in pattern.needs(root)}
    nodes, types = pattern.program.nodes, pattern.program.types
    return {place for place in places if isinstance(nodes[place], Input) and set(types[place].axes) & set(piece.rows)}


def ahead(pattern: Pattern, found: Contraction, tile: Tile, warps: int) -> int:
    """Chunks of a contraction's depth that a warp loads before it multiplies them: as many as it has, and registers."""
    wide, rows, columns = _registers(pattern, found.node), lane_rows(tile), tile.columns // LANES
    left = min(LOADED, REGISTERS // (warps * WARP) - OTHERS // 2 - wide * rows * columns)
    depth, most = pattern.static(found.depth), max(1, min(AHEAD, left // (4 * wide * (columns + rows))))
    if depth is None:
        return most
    chunks = -(-depth // (CHUNK * warps))
    return max(count for count in range(1, most + 1) if chunks % count == 0)  # so that there is none left in the end


def is_exact(pattern: Pattern, found: Contraction, tile: Tile, warps: int) -> bool:
    """Whether all warps have as many chunks, and load `ahead` of them each time."""
    depth = pattern.static(found.depth)
    return depth is not None and depth % (CHUNK * warps * ahead(pattern, found, tile, warps)) == 0


def registers_of(plan: KernelPlan, piece: Piece) -> int:
    """Registers of a thread for all products' sums, and for what it loads of the factors of one, with addresses."""
    tile, warps, sums, most = piece.tile, plan.configuration.threads // WARP, 0, 0
    assert tile is not None
    columns, rows = tile.columns // LANES, lane_rows(tile)
    for found, _ in plan.pattern.tiles.values():
        wide = _registers(plan.pattern, found.node)
        sums += wide * columns * rows
        most = max(most, (4 * wide * ahead(plan.pattern, found, tile, warps) + ADDRESS) * (columns + rows))
    return sums + most


def lane_rows(tile: Tile) -> int:
    """Rows of a tile that a lane loads at once."""
    return tile.rows // LANES if tile.tensor else tile.rows


def repeated(pattern: Pattern, piece: Piece) -> list[int]:
    """The values that later loops over a row need again, where registers do not hold them: candidates for shared
    memory. Inputs are read again instead."""
    own = {root.node for root in piece.roots if root.output is None}
    elements = [_elements(pattern, piece, loop) for loop in piece.loops]
    if any(elements):
        return []
    known = [int(pattern.static(loop.axes) is not None and loop.way == "flat") for loop in piece.loops]
    found = {place for number in range(len(piece.loops)) for place in _found(pattern, piece, number, known, own, set())}
    return sorted(place for place in found if not isinstance(pattern.program.nodes[place], Input))


def _budget(piece: Piece) -> int:
    """Registers of a thread for what it keeps: half of `OTHERS` at least remain."""
    threads = piece.owner.rows * piece.owner.threads
    return min(MOST_KEPT, REGISTERS // threads - OTHERS // 2)


def _sums(pattern: Pattern, piece: Piece, elements: list[int]) -> int:
    """Registers for what a thread adds up over rows, for each element of a row that it sees."""
    total = 0
    for loop, count in zip(piece.loops, elements, strict=True):
        for root in loop.roots:
            if piece.rows and root.kept and set(root.reduced) >= set(piece.rows):
                total += count * _registers(pattern, root.node)
                if not count or total > _budget(piece):
                    size, threads = pattern.static(loop.axes), piece.owner.threads
                    raise KernelError(f"{root.name} adds up {size} numbers, too many for {threads} threads' registers")
    return total


def _elements(pattern: Pattern, piece: Piece, loop: RowLoop) -> int:
    size = pattern.static(loop.axes)
    if size is None or not loop.axes or loop.way != "flat" or piece.slabs > 1 or counted(pattern, piece, loop):
        return 0
    at_once = piece.owner.threads * loop.vector
    count = -(-size // at_once) * loop.vector
    return count if count <= UNROLLED else 0


def _found(
    pattern: Pattern, piece: Piece, number: int, elements: list[int], own: Set[int], banned: Set[int]
) -> frozenset[int]:
    """What a loop can find in registers, left by earlier loops over the same positions."""
    loop = piece.loops[number]
    alike = [
        other
        for i, other in enumerate(piece.loops[:number])
        if (other.axes, other.vector, other.way) == (loop.axes, loop.vector, loop.way) and elements[i]
    ]
    if not elements[number] or not alike:
        return frozenset()
    there = {place for other in alike for place in _computed(pattern, other, own, frozenset())}
    kept, waiting, seen = (
        set(),
        [pattern.start(root) for root in loop.roots if pattern.start(root) not in own],
        set(),
    )
    while waiting:
        place = waiting.pop()
        if place in seen or place in own or pattern.reduces(place):
            continue
        if isinstance(pattern.program.nodes[place], Constant | Position):
            continue
        seen.add(place)
        axes = set(pattern.program.types[place].axes)
        in_row, of_rows = axes & set(loop.axes), axes & set(piece.rows) or not piece.rows
        if place in there and in_row and of_rows and place not in banned:
            kept.add(place)
        else:
            waiting += arguments_of(pattern.program.nodes[place])
    return frozenset(kept)


def _computed(pattern: Pattern, loop: RowLoop, own: Set[int], registers: frozenset[int]) -> set[int]:
    return {place for root in loop.roots for place in pattern.needs(root, own | registers)}


def _registers(pattern: Pattern, place: int) -> int:
    return 2 if pattern.program.types[place].dtype in _WIDE else 1


def _cost(pattern: Pattern, place: int, own: Set[int]) -> int:
    """What it takes to compute a value again; an input is the least, which lies in the cache of the first level."""
    nodes, total = pattern.program.nodes, 0
    for other in pattern.closure([place], lambda found: found in own):
        node = nodes[other]
        if isinstance(node, Elementwise):
            total += 20 if TABLE[node.op].cost == "activation" else 2
        elif isinstance(node, Random):
            total += 20
        elif isinstance(node, Input):
            total += 1
    return total
