"""Kernels of several regions are made at a time, or of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.fusion.region import Region
from graph_passes.passes.fuse.at_once import AtOnce
from graph_passes.passes.fuse.plan import Needs, plan_fusion
from graph_passes.refusals import Reason
from tests.fusion_graphs import UNIT
from tests.pure.test_fusion_replicas import Given, device, replicas

NEEDS = Needs(UNIT, device(0), lambda node: b"", at_once=4)
WAIT = 30.0  # seconds until a test that waits for others fails


def planned(programs: Any, at_once: int = 4) -> Any:
    needs = replace(NEEDS, programs=programs, at_once=at_once)
    return plan_fusion(Given(replicas(("Tanh", "Tanh"))), needs)[0]


def test_kernels_of_all_regions_are_made_at_a_time() -> None:
    """Each of four regions waits until those of all four have begun."""
    together = threading.Barrier(4)

    def programs(region: Region, place: str) -> Sequence[Any]:
        together.wait(WAIT)
        return ()

    alone = planned(lambda region, place: (), 1)
    assert [each.name for each in planned(programs).regions] == [each.name for each in alone.regions]
    assert len(alone.regions) == 4


def test_what_fails_costs_its_region_alone() -> None:
    def programs(region: Region, place: str) -> Sequence[Any]:
        if place == device(1):
            raise KernelError("a compiler died")
        return ()

    found = planned(programs)
    assert len(found.regions) == 2
    assert [each.reason for each in found.kept] == [Reason.NO_KERNEL(detail="a compiler died")] * 2


def test_with_room_for_one_the_thread_that_asks_runs_it() -> None:
    with AtOnce(1) as pool:
        assert pool.begin(threading.get_ident)() == threading.get_ident()
    with AtOnce(2) as pool:
        assert pool.begin(threading.get_ident)() != threading.get_ident()
