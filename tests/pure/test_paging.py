"""Demand paging as `benchmarks.offload.paging` simulates it, by hand; and the thesis's tables from results."""

from __future__ import annotations

import pytest

from benchmarks.offload import thesis
from benchmarks.offload.paging import Rates, paged
from graph_passes.analysis.memory.timeline import Buffer, ScheduledOp, Timeline
from graph_passes.graph.ir import TensorId

UNIT = Rates(1.0, 1.0)


def step(workspace: int = 0) -> Timeline:
    """Three ops make a, b and c of four bytes each; the next reads b and c, the last reads a."""
    steps = tuple(ScheduledOp(name, 1.0, workspace if name == "c" else 0) for name in ("a", "b", "c", "bc", "last"))
    buffers = (
        Buffer(TensorId("a"), 4, 0, (4,)),
        Buffer(TensorId("b"), 4, 1, (3,)),
        Buffer(TensorId("c"), 4, 2, (3,)),
    )
    return Timeline(steps, buffers, turn=2, base=2)


def test_what_fits_is_not_paged() -> None:
    assert paged(step(), 14, UNIT) == (found := paged(step(), 100, UNIT))
    assert (found.seconds, found.bytes_in, found.bytes_out) == (5.0, 0, 0)


def test_the_pages_used_longest_ago_leave_and_come_back_by_faults() -> None:
    found = paged(step(), 10, Rates(2.0, 4.0))  # variables and two buffers: c takes the pages of a
    assert (found.bytes_out, found.bytes_in) == (4, 4)
    assert found.seconds == 5.0 + 4 / 4.0 + 4 / 2.0


def test_pages_leave_in_part() -> None:
    found = paged(step(), 13, UNIT)
    assert (found.bytes_out, found.bytes_in) == (1, 1)


def test_workspace_takes_pages_too() -> None:
    found = paged(step(workspace=2), 14, UNIT)
    assert (found.bytes_out, found.bytes_in) == (2, 2)


def test_an_op_that_exceeds_the_memory_pages_what_exceeds_it() -> None:
    found = paged(step(), 8, UNIT)  # six bytes beside the variables: b and c take eight
    assert found.bytes_in > 4
    assert found.seconds > paged(step(), 10, UNIT).seconds
    times = [paged(step(), memory, UNIT).seconds for memory in range(2, 16)]
    assert times == sorted(times, reverse=True)


def test_the_rates_are_the_thesis_s_shares_of_the_link() -> None:
    assert Rates.of_link(12e9, 12e9) == Rates(pytest.approx(4.295e9), pytest.approx(9e9))


def test_the_tables_have_a_row_for_each_policy_and_net() -> None:
    rows = [
        {"normalised": each, "paging": 100.0 * each, "autovm": 80.0, "optimal": None if each > 2 else 50.0}
        for each in thesis.NORMALISED
    ]
    case = {
        "commit": "abc",
        "device": "h100",
        "batch": 8,
        "milliseconds": 50.0,
        "policies": ["autovm", "optimal"],
        "rows": rows,
        "convolution": {"own": 1 << 30, "workspace": 0, "others": 3 << 30},
        "thresholds": dict.fromkeys(map(str, thesis.THRESHOLDS), 60.0),
        "parts": dict.fromkeys(thesis.PARTS, 70.0) | {"no solver": None},
    }
    text = "\n".join(thesis.tables({"alexnet": case}))
    assert "| AlexNet, batch of 8 (h100, abc) | `autovm` | -38 | +25 | +88 | +150 | +212 |" in text
    assert "| AlexNet, batch of 8 (h100, abc) | `optimal` | +0 | +100 | +200 | +300 | refused |" in text
    assert "| AlexNet | 1.00 | 0.00 | 3.00 |" in text
    assert "| AlexNet | 70 | refused | 70 | 70 | 70 | 125 |" in text
