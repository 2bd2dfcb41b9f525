"""What stays on the chip: a pure choice, made once for a set of parameters (VPPS, sections III-A1 and III-A2).

Each output of a view is a sum over one row of weights, and rows are dealt round-robin, `rows` at a time, to the warps
of all processors: block b goes to processor (first + b) % processors, and there to one warp after the other. A matrix
that is multiplied forward and, transposed, backward, is two views, which lie on the chip twice; so what flows back
needs no sums across processors, and results are the same in each run. A product of few outputs lies on every
processor, which computes all of them for some of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from custom_ops.dynamic.codegen.segments import KindCode, MatrixView
from custom_ops.dynamic.sections import BACK_LEVEL, LEVEL

Home = Literal["registers", "shared", "L2"]
WARP = 32
STREAMED_ROWS = 8
NARROW = 16  # outputs of a product that every processor has: less work than to wait for others
MOST_STAGED = 64  # nodes
_FMA_WARPS = 4  # warps that multiply in a cycle
STAGING = 64 << 10  # bytes, within which a product reads the vectors of many nodes at a time


@dataclass(frozen=True)
class Chip:
    """What a plan may use.

    Attributes:
        processors: streaming multiprocessors, each a virtual processor.
        threads: of a processor.
        registers: of a thread that weights may have; the paper's 255 without 31 and 32 for everything else.
        shared: bytes of shared memory of a processor.
        l2_bytes: that a processor gets from L2 in a cycle while all ask.
    """

    processors: int = 132
    threads: int = 256
    registers: int = 176
    shared: int = 227 << 10
    l2_bytes: int = 24

    @property
    def warps(self) -> int:
        return self.threads // WARP


@dataclass(frozen=True)
class Residence:
    """The places of a view's weights, and which processor has which.

    Attributes:
        rows: outputs that follow each other in one warp.
        slots: such blocks in a warp.
        first: the processor that has the first block.
        everywhere: every processor has all outputs, and computes them for some of the nodes.
        staged: nodes whose vectors come into shared memory at a time.
    """

    view: MatrixView
    home: Home
    rows: int
    slots: int
    first: int
    everywhere: bool = False
    staged: int = 4

    @property
    def owned(self) -> int:
        """Outputs of a warp."""
        return self.rows * self.slots

    @property
    def blocks(self) -> int:
        return -(-self.view.outputs // self.rows)

    @property
    def registers(self) -> int:
        """Registers of a thread, if registers hold the block."""
        return self.owned * -(-self.view.depth // WARP)


@dataclass(frozen=True)
class ChipPlan:
    """All views of a net.

    Attributes:
        staging: bytes of shared memory through which vectors reach the warps.
        resident_bytes: of weights on chip, over all processors.
    """

    chip: Chip
    residences: tuple[Residence, ...]
    staging: int

    @property
    def registers(self) -> int:
        """Registers of a thread that hold weights."""
        return sum(r.registers for r in self.residences if r.home == "registers")

    @property
    def shared(self) -> int:
        """Bytes of a processor, for weights."""
        return sum(r.registers * 4 * self.chip.threads for r in self.residences if r.home == "shared")

    @property
    def resident_bytes(self) -> int:
        return 4 * sum(r.view.weights for r in self.residences if r.home != "L2")


def cycles_of_a_node(residence: Residence, chip: Chip) -> int:
    """About what a product takes its processors for one of many nodes, by what is slower: to bring the vector, or to
    multiply. It does not depend on how many rows a warp has at least, so that all kernels of a net choose alike."""
    view, steps = residence.view, -(-residence.view.depth // WARP)
    owned = _dealt(view, "registers", 1, chip, 0, residence.everywhere).owned
    cycles = max(50 + owned * steps * chip.warps // _FMA_WARPS, 4 * view.depth // chip.l2_bytes)
    if residence.home == "L2":
        cycles += 4 * owned * chip.warps * view.depth // (chip.l2_bytes * nodes_of(residence))
    return cycles


def nodes_of(residence: Residence) -> int:
    """Nodes whose products a warp computes at a time: so many as its sums find registers for."""
    group = min(residence.owned, 8)
    return 4 if group <= 4 else 2


def views_of(kinds: Sequence[KindCode]) -> dict[MatrixView, bool]:
    """All views, those that read the same block of a matrix as one; each with whether a level reads it."""
    widest: dict[tuple[int, bool, int, int], tuple[int, int, bool]] = {}
    for kind in kinds:
        for number, section in enumerate(kind.sections):
            for segment in section.segments:
                if segment.call is None:
                    continue
                view = segment.call.view
                key = (view.parameter, view.transposed, view.start, view.depth)
                first, end = view.first, view.first + view.outputs
                old = widest.get(key, (first, end, False))
                level = old[2] or number in (LEVEL, BACK_LEVEL)
                widest[key] = (min(first, old[0]), max(end, old[1]), level)
    return {MatrixView(*key, first, end - first): level for key, (first, end, level) in widest.items()}


def holder(plan: ChipPlan, view: MatrixView) -> int:
    """The number of the residence that has the weights of a call's view."""
    for number, residence in enumerate(plan.residences):
        whole = residence.view
        same = (whole.parameter, whole.transposed, whole.start, whole.depth) == (
            view.parameter, view.transposed, view.start, view.depth,
        )  # fmt: skip
        if same and whole.first <= view.first and view.first + view.outputs <= whole.first + whole.outputs:
            return number
    raise AssertionError(view)


def make_plan(
    kinds: Sequence[KindCode], chip: Chip, rows: int = 1, reserved: int = 0, least_staging: int = 0
) -> ChipPlan:
    """Largest matrices first among those that levels multiply by, then the others; what does not fit stays in L2.

    Args:
        rows: of a warp at least (III-A2), where weights are resident.
        reserved: bytes of shared memory that the kernel needs for other things.
        least_staging: bytes of staging memory that it needs in any case.
    """
    views = views_of(kinds)
    registers, residences, first = chip.registers, [], 0
    staging = max(least_staging, 4 * max((4 * view.depth for view in views), default=0))
    shared = chip.shared - reserved - staging
    for view, _ in sorted(views.items(), key=lambda item: (not item[1], -item[0].weights)):
        everywhere = view.outputs <= NARROW
        dealt = _dealt(view, "registers", rows, chip, first, everywhere)
        if dealt.registers <= registers and dealt.owned <= 64:
            registers -= dealt.registers
        elif dealt.registers * 4 * chip.threads <= shared:
            dealt = replace(dealt, home="shared")
            shared -= dealt.registers * 4 * chip.threads
        else:
            dealt = _dealt(view, "L2", STREAMED_ROWS, chip, first, everywhere)
        residences.append(dealt)
        if not everywhere:
            first = (first + dealt.blocks) % chip.processors
    room = min(max(staging, STAGING), staging + shared)
    staged = tuple(replace(dealt, staged=_staged(dealt, room)) for dealt in residences)
    staging = max((4 * dealt.staged * dealt.view.depth for dealt in staged), default=0)
    return ChipPlan(chip, staged, max(staging, least_staging))


def _staged(residence: Residence, room: int) -> int:
    """Nodes whose vectors fit in so many bytes; a multiple of those of a turn."""
    turn = nodes_of(residence)
    return max(turn, min(MOST_STAGED, room // (4 * residence.view.depth)) // turn * turn)


def _dealt(view: MatrixView, home: Home, rows: int, chip: Chip, first: int, everywhere: bool) -> Residence:
    warps = chip.warps * (1 if everywhere else chip.processors)
    blocks = -(-view.outputs // rows)
    return Residence(view, home, rows, -(-blocks // warps), first, everywhere)
