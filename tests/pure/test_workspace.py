"""Steps that are short of workspace: what is left of it, and what that costs."""

from __future__ import annotations

from graph_passes.analysis.memory.simulate import Link, Move, usage_under
from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline
from graph_passes.analysis.memory.workspace import SLOWER, squeezed
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import plan_offload


def step(*workspaces: int) -> Timeline:
    """Ops of a second, and 10 bytes that the first makes and the last reads."""
    steps = tuple(ScheduledOp(f"s{index}", 1.0, nbytes) for index, nbytes in enumerate(workspaces))
    buffers = (
        Buffer(TensorId("s0"), 10, 0, (len(steps) - 1,), (TensorId("s0"),), (0,), chains=(Chain(0, (0,), (), (10,)),)),
    )
    return Timeline(steps, buffers, turn=len(steps) // 2, base=5)


def test_what_fits_stays_as_it_is() -> None:
    generous = step(0, 3, 0)
    assert squeezed(generous, step(0, 0, 0), (), 18).steps == generous.steps


def test_an_op_takes_what_is_left_and_runs_more_slowly() -> None:
    found = squeezed(step(0, 8, 1, 0), step(0, 0, 0, 0), (), 20)
    assert [each.workspace for each in found.steps] == [0, 5, 1, 0]
    assert [each.seconds for each in found.steps] == [1.0, 1.0 + SLOWER, 1.0, 1.0]
    assert found.peak == 20


def test_what_an_op_cannot_do_without_is_left_to_it() -> None:
    found = squeezed(step(0, 8, 0), step(0, 6, 0), (), 20)
    assert [each.workspace for each in found.steps] == [0, 6, 0]  # over the budget: no plan for `least` is that


def test_moves_leave_more() -> None:
    generous, least = step(0, 8, 0), step(0, 0, 0)
    move = Move(buffer=0, last=0, copy_after=0, release=1, prefetch=2, next=2)
    assert squeezed(generous, least, [move], 15).steps == generous.steps


def test_an_op_that_runs_again_may_be_short_of_workspace_only_then() -> None:
    generous, least = step(6, 0, 0, 0), step(0, 0, 0, 0)
    again = Move(buffer=0, last=0, copy_after=0, release=1, prefetch=3, next=3, recomputed=True)
    assert usage_under(generous, [again]).max() == 21
    found = squeezed(generous, least, [again], 18)
    assert usage_under(found, [again]).max() <= 18
    assert found.steps[0].seconds == 1.0 + SLOWER


def test_a_plan_is_predicted_anew() -> None:
    generous, least, link = step(0, 8, 0), step(0, 0, 0), Link(1.0, 1.0)
    moving = plan_offload(generous, link, 20, OffloadOptions(policy="autovm", reuse_distance=1))
    leaving = plan_offload(least, link, 20, OffloadOptions(policy="autovm", reuse_distance=1))
    short = leaving.under(squeezed(generous, least, leaving.moves, 20))
    assert len(moving.moves) == 1
    assert moving.after.seconds > 20  # 10 bytes out and back, a byte a second
    assert not short.moves
    assert (short.after.seconds, short.after.peak) == (3.0 + SLOWER, 20)
