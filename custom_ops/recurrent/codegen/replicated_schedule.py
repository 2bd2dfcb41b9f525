"""A schedule in which CTAs compute some values for all units, each for itself, so that they need not send them.

What a later stage's products read is exchanged, because each CTA has its own units of it only. Where it follows from
values that every CTA can have, states that were exchanged for products of the first stage and tensors, every CTA can
make all of it: the products that it follows from are then *replicated*. A canonical GRU exchanges its state alone, and
every CTA computes the whole reset gate.

Replicated products of states need no weights of other CTAs (GRNN, section 5): as soon as a CTA has its own units of a
new state, it multiplies them with their rows of the weights, for all units of the result, and sends these partial sums
along with the state; every CTA adds up those of all. Other replicated products have all of their weights in every
CTA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Elementwise, live_nodes
from custom_ops.recurrent.cell import Cell, Product, RowSum, State, arguments_of
from custom_ops.recurrent.codegen.schedule import RESULTS, CellSchedule, Gemm, StageBuffer, carried, schedule


@cache
def replicated_schedule(cell: Cell) -> CellSchedule:
    """`schedule(cell)` without the exchanges that replicas save.

    Args:
        cell: of one step.

    Raises:
        KernelError: there are none.
    """
    plan = schedule(cell)
    stages = _local_stages(plan)
    if not stages:
        raise KernelError("replicated: every exchange of this cell sends a value that only its CTA can compute")
    buffers = [replace(buffer, kind="local") if buffer.stage in stages else buffer for buffer in plan.buffers]
    local = [place for buffer in buffers if buffer.kind == "local" for place in buffer.operands]
    everywhere = _needed(cell, local, stages | {0})
    gemms: list[Gemm] = []
    for gemm in plan.gemms:
        for copied in (False, True):
            chosen = [i for i, place in enumerate(gemm.products) if everywhere[place] == copied]
            if chosen:
                products = tuple(gemm.products[i] for i in chosen)
                terms = tuple(gemm.terms[i] for i in chosen)
                gemms.append(Gemm(gemm.stage, gemm.buffer, products, terms, copied))
    gemms = [_in_parts(plan, gemm, buffers) if gemm.replicated and gemm.stage == 0 else gemm for gemm in gemms]
    own = _needed(cell, [*cell.states, *(place for output in cell.outputs for place in output)], stages)
    ends = dict.fromkeys(cell.states, plan.stages - 1)
    replica = replace(
        plan,
        live=everywhere,
        gemms=tuple(gemms),
        buffers=tuple(buffers),
        carried=carried(cell, everywhere, {}, (*RESULTS, State)),
    )
    return replace(replica, live=own, carried=carried(cell, own, ends), replica=replica)


def _in_parts(plan: CellSchedule, gemm: Gemm, buffers: list[StageBuffer]) -> Gemm:
    """`gemm` of a CTA's own units of its operands, which are states; adds what it reads and what it sends."""
    operands = plan.buffers[gemm.buffer].operands
    buffers += [StageBuffer(0, operands, "own"), StageBuffer(0, gemm.products, "parts")]
    return replace(gemm, buffer=len(buffers) - 2, parts=len(buffers) - 1)


@cache
def can_replicate(cell: Cell) -> bool:
    """Whether `replicated_schedule` saves an exchange."""
    return bool(_local_stages(schedule(cell)))


def _local_stages(plan: CellSchedule) -> frozenset[int]:
    """Stages that need not wait for other CTAs, since all that they wait for can be computed everywhere."""
    cell = plan.cell
    given = {place for buffer in plan.buffers if buffer.stage == 0 for place in buffer.operands}
    states = {node.index for place in given if isinstance(node := cell.nodes[place], State)}
    local: set[int] = set()

    def everywhere(place: int) -> bool:
        match cell.nodes[place]:
            case State(index=index):
                return index in states
            case Product():
                return cell.stages[place] == 0 or cell.stages[place] in local
            case RowSum():
                return False
            case Elementwise(arguments=arguments):
                return all(map(everywhere, arguments))
        return True

    for stage in range(1, plan.stages):
        operands = [
            [buffer.kind != "sums" and everywhere(place) for place in buffer.operands]
            for buffer in plan.buffers
            if buffer.stage == stage
        ]
        if operands and all(map(all, operands)):
            local.add(stage)
    return frozenset(local)


def _needed(cell: Cell, pending: list[int], given: frozenset[int]) -> tuple[bool, ...]:
    """What `pending` needs; the operands of products of the stages `given` are there without it."""

    def arguments(place: int) -> Iterable[int]:
        is_given = isinstance(cell.nodes[place], Product) and cell.stages[place] in given
        return () if is_given else arguments_of(cell.nodes[place])

    return live_nodes(len(cell.nodes), pending, arguments)
