"""What a recurrent kernel does in each stage of a step, read off a cell. No sizes yet, and no device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Elementwise, live_nodes
from custom_ops.recurrent.cell import (
    Cell,
    Invariant,
    Node,
    Product,
    RowSum,
    Sequence,
    State,
    Term,
    Vector,
    arguments_of,
)

MOST_OPERANDS = 30  # of a buffer: `BufferShape::states` of kernels/exchange.cuh is an int
RESULTS = (Elementwise, Product, RowSum)  # what a CTA computes; all else it reads


@dataclass(frozen=True)
class Gemm:
    """Products of one stage with the same operands: `[rows, operands * units] @ [operands * units, products * units]`.

    Attributes:
        stage: when it can run.
        buffer: the exchange buffer with its operands.
        products: their nodes.
        terms: for each product one term for each operand of the buffer.
        replicated: whether every CTA has all units of its results, not only its own.
        parts: the exchange buffer of its results, if a CTA multiplies its own units of the operands only, and every CTA
            adds up the partial sums of all.
    """

    stage: int
    buffer: int
    products: tuple[int, ...]
    terms: tuple[tuple[Term, ...], ...]
    replicated: bool = False
    parts: int | None = None


@dataclass(frozen=True)
class StageBuffer:
    """What is put down for one stage, by all CTAs of a group for each other or by a CTA for itself.

    Attributes:
        stage: the stage that waits for it.
        operands: nodes.
        kind: which part of them lies there, and which CTA sends it.
            "units": whole rows of units, for products; each CTA sends its own units.
            "local": the same, but every CTA makes all of it itself.
            "own": a CTA's own units, for products in parts; they are not sent.
            "parts": of products in parts, a whole row of partial sums of each CTA, which it sends.
            "sums": of row sums, one partial sum of each CTA, which it sends.
    """

    stage: int
    operands: tuple[int, ...]
    kind: Literal["units", "local", "own", "parts", "sums"] = "units"

    @property
    def exchanged(self) -> bool:
        """Whether CTAs send it to each other."""
        return self.kind not in ("local", "own")


@dataclass(frozen=True)
class CellSchedule:
    """A cell, in the order in which a kernel computes it.

    Attributes:
        live: for each node, whether anything needs it, for the units of a CTA.
        stages: how many a step has.
        carried: nodes that a later stage than their own reads.
        replica: the same with what every CTA needs for all units (replicated_schedule.py), or None.
    """

    cell: Cell
    live: tuple[bool, ...]
    stages: int
    gemms: tuple[Gemm, ...]
    buffers: tuple[StageBuffer, ...]
    carried: tuple[int, ...]
    replica: CellSchedule | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        """What a thread keeps of a (row, unit) from one stage or step to the next, besides states."""
        kinds = (Sequence, Invariant, Vector)
        leaves = (place for place, node in enumerate(self.cell.nodes) if self.live[place] and isinstance(node, kinds))
        return (*leaves, *self.carried)

    @property
    def kept_between_launches(self) -> int:
        """The numbers of a (row, unit) that a kernel of one stage leaves for that of the next: `CellWriter.kept`."""
        return len(self.cell.states) + len(self.carried)

    @cached_property
    def state_masks(self) -> tuple[int, ...]:
        """A mask for each buffer: bit o is set when its operand o is a state.

        Raises:
            KernelError: a buffer has more operands than an int of the kernels has room for.
        """
        most = max((len(buffer.operands) for buffer in self.buffers), default=0)
        if most > MOST_OPERANDS:
            raise KernelError(f"{most} values are exchanged in one stage; a kernel takes at most {MOST_OPERANDS}")
        return tuple(
            sum(self.is_state(operand) << place for place, operand in enumerate(buffer.operands))
            for buffer in self.buffers
        )

    def place_of_sum(self, node: int) -> tuple[int, int]:
        """The buffer of row sum `node` and its place in it."""
        for index, buffer in enumerate(self.buffers):
            if buffer.kind == "sums" and node in buffer.operands:
                return index, buffer.operands.index(node)
        raise KeyError(node)

    def place_of_product(self, node: int) -> tuple[int, int]:
        """The gemm of product `node` and its place in it."""
        for index, gemm in enumerate(self.gemms):
            if node in gemm.products:
                return index, gemm.products.index(node)
        raise KeyError(node)

    def is_state(self, operand: int) -> bool:
        return isinstance(self.cell.nodes[operand], State)


@cache
def schedule(cell: Cell) -> CellSchedule:
    """Group the products and row sums of `cell` by what they wait for."""
    roots = [*cell.states, *(place for output in cell.outputs for place in output)]
    live = live_nodes(len(cell.nodes), roots, lambda place: arguments_of(cell.nodes[place]))
    first_of_state: dict[int, int] = {}
    canonical = list(range(len(cell.nodes)))
    for place, node in enumerate(cell.nodes):
        if isinstance(node, State):
            canonical[place] = first_of_state.setdefault(node.index, place)

    grouped: dict[tuple[int, tuple[int, ...]], list[tuple[int, tuple[Term, ...]]]] = {}
    sums: dict[int, list[int]] = {}
    for place, node in enumerate(cell.nodes):
        if live[place] and isinstance(node, Product):
            terms = tuple(sorted(node.terms, key=lambda term: canonical[term.operand]))
            key = (cell.stages[place], tuple(canonical[term.operand] for term in terms))
            grouped.setdefault(key, []).append((place, terms))
        elif live[place] and isinstance(node, RowSum):
            sums.setdefault(cell.stages[place], []).append(place)

    gemms: list[Gemm] = []
    buffers: list[StageBuffer] = []
    for (stage, operands), products in sorted(grouped.items()):
        gemms.append(
            Gemm(stage, len(buffers), tuple(place for place, _ in products), tuple(terms for _, terms in products))
        )
        buffers.append(StageBuffer(stage, operands))
    buffers += [StageBuffer(stage, tuple(nodes), "sums") for stage, nodes in sorted(sums.items())]
    stages = 1 + max((stage for place, stage in enumerate(cell.stages) if live[place]), default=0)
    ends = dict.fromkeys(cell.states, stages - 1)
    return CellSchedule(cell, live, stages, tuple(gemms), tuple(buffers), carried(cell, live, ends))


def carried(
    cell: Cell, live: tuple[bool, ...], ends: dict[int, int], kinds: tuple[type[Node], ...] = RESULTS
) -> tuple[int, ...]:
    """Results that live in registers from one stage to a later one, up to a stage of `ends` or to an elementwise op;
    leaves are there in any stage."""
    last = dict.fromkeys(range(len(cell.nodes)), -1)
    for place, node in enumerate(cell.nodes):
        if live[place] and isinstance(node, Elementwise):
            for argument in node.arguments:
                last[argument] = max(last[argument], cell.stages[place])
    for place, stage in ends.items():
        last[place] = max(last[place], stage)
    return tuple(
        place
        for place, node in enumerate(cell.nodes)
        if live[place] and isinstance(node, kinds) and last[place] > cell.stages[place]
    )
