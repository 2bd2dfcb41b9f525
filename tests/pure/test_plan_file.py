"""Plans as files: read back, compared, refused; and the search for the largest batch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from graph_passes.decision import Decision
from graph_passes.errors import StalePlanError
from graph_passes.plan_diff import PlanDiff
from graph_passes.plan_file import CurvePoint, Plan, PlannedMove
from graph_passes.report import Report
from tfmem.search_batch import MOST, largest_batch, largest_divided_batch

MIB = 1 << 20
PLAN = Plan(
    subject="net.fit",
    device="CPU:0, CPU",
    budget=60 * MIB,
    feasible=True,
    fits=False,
    peak_before=71 * MIB,
    peak=55 * MIB,
    seconds_before=0.5,
    seconds=0.56,
    least=0.52,
    smallest_budget=50 * MIB,
    op="grad",
    moves=(PlannedMove("a:0", "a", "a", "b", "c", "d"), PlannedMove("b:0", "b", "b", "c", "d", "d", recomputed=True)),
    curve=(CurvePoint(40 * MIB, None), CurvePoint(60 * MIB, 0.56), CurvePoint(71 * MIB, 0.28)),
    inputs=(("float32", (64, None)), ("resource", None)),
    ops=(("a", "11"), ("b", "22")),
    report=Report("net.fit", "CPU", "optimal", Decision.MOVED, 1, 1),
)


def test_a_plan_reads_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert Plan.from_json(replace(PLAN, report=None).to_json()).report is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Expecting"),
        ("[1]", "this is no plan; expected format 1"),
        (json.dumps({"plan_format": 7}), "a plan of format 7"),
        (json.dumps({"plan_format": 1, "subject": "x"}), "not a tfmem plan: .*missing"),
        (PLAN.to_json().replace('"subject"', '"colour"', 1), "not a tfmem plan: .*colour"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_the_page_has_the_verdict_the_bound_the_smallest_budget_and_the_curve() -> None:
    lines = str(PLAN).splitlines()
    assert " ".join(map(str.strip, lines[:2])) == (
        "`net.fit`: fits 60.0 MiB: peak 55.0 instead of 71.0 MiB, 12% slower by prediction; 1 tensor offloaded, "
        "1 tensor recomputed"
    )
    text = "\n".join(lines)
    assert "560 ms planned; no plan of copies and recomputation is under 520 ms" in text
    assert "50.0 MiB with nothing split, at op 'grad'" in text
    assert "      40.0 MiB  does not fit" in lines
    assert f"      60.0 MiB  {'#' * 30} 560 ms  <- the budget" in lines
    assert f"      71.0 MiB  {'#' * 15} 280 ms" in lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"budget": None}, "`net.fit`: needs 71.0 MiB; no budget was given"),
        (
            {"budget": None, "memory": 1 << 30},
            "`net.fit`: needs 71.0 MiB of the device's 1.0 GiB; no budget was given",
        ),
        (
            {"budget": None, "memory": MIB},
            "`net.fit`: does not fit the device's 1.0 MiB unchanged: it needs 71.0 MiB; give a budget to plan for",
        ),
        ({"feasible": False}, "`net.fit`: does not fit 60.0 MiB: with nothing split it needs at least 50.0 MiB"),
        ({"fits": True, "moves": ()}, "`net.fit`: fits 60.0 MiB unchanged: peak 71.0 MiB"),
    ],
)
def test_the_first_line_says_whether_it_fits(changes: dict[str, object], line: str) -> None:
    assert replace(PLAN, **changes).headline == line  # type: ignore[arg-type]


def test_a_plan_is_for_its_graph_by_whatever_names() -> None:
    assert PLAN.renamed((("x", "11"), ("y", "22"))) == {"a": "x", "b": "y"}
    with pytest.raises(StalePlanError, match=r"1 op is new \(c\); 1 op is gone \(a\); 1 op is changed \(b\)"):
        PLAN.renamed((("c", "11"), ("b", "33")))
    with pytest.raises(StalePlanError, match="in another order"):
        PLAN.renamed((("b", "22"), ("a", "11")))


def test_a_diff_names_what_differs() -> None:
    moved = PlannedMove("a:0", "a", "b", "b", "c", "d")
    other = replace(PLAN, budget=50 * MIB, moves=(moved, PlannedMove("c:0", "a", "a", "b", "c", "d")))
    found = PlanDiff.between(PLAN, other)
    assert found.fields == (("budget", 60 * MIB, 50 * MIB),)
    assert (found.moves_too, found.stays_now, found.differs) == (("c:0",), ("b:0",), ("a:0",))
    lines = str(found).splitlines()
    assert "  budget      60.0 MiB -> 50.0 MiB" in lines
    assert "  moves too   1 tensor (c:0)" in lines
    assert "  stays now   1 tensor (b:0)" in lines
    assert "  differs     1 tensor (a:0)" in lines
    assert str(PlanDiff.between(PLAN, PLAN)) == "the plans are equal"
    ops = tuple((f"gradient_tape/model/layer_{number}/MatMul", "1") for number in range(9))
    found = PlanDiff.between(PLAN, replace(PLAN, seconds=2 * PLAN.seconds, ops=ops))
    assert found.ops.new == tuple(name for name, _ in ops)  # all of them, where a sentence names some
    lines = str(found).splitlines()
    assert any(line.startswith("  step time   ") for line in lines)
    assert max(map(len, lines)) <= 100


@dataclass(frozen=True)
class Needs:
    feasible: bool
    budget: int | None
    smallest_budget: int


@pytest.mark.parametrize("most", [0, 1, 63, 64, 65, 1000, 12345])
@pytest.mark.parametrize("start", [1, 64, 5000])
def test_the_largest_batch_is_found_with_few_plans(most: int, start: int) -> None:
    asked: list[int] = []

    def planned(batch: int) -> Needs:
        asked.append(batch)
        return Needs(batch <= most, 100 + 7 * most, 100 + 7 * batch)

    assert largest_batch(planned, start) == most
    assert len(asked) <= 6


def test_a_step_that_grows_in_steps_ends_too() -> None:
    def planned(batch: int) -> Needs:
        need = 1000 * (batch // 37) + batch * batch // 50
        return Needs(need <= 20_000, 20_000, need)

    found = largest_batch(planned, 1)
    assert planned(found).feasible
    assert not planned(found + 1).feasible


@pytest.mark.parametrize("most", [1, 10, 100, 12345])
@pytest.mark.parametrize("whole", [1, 10])
def test_a_batch_of_divided_steps_is_found_to_an_eighth(most: int, whole: int) -> None:
    asked: list[int] = []

    def planned(batch: int) -> Needs:
        asked.append(batch)
        return Needs(batch <= most, 100, 100)

    found = largest_divided_batch(planned, whole)
    assert found == max(whole, min(found, most))
    assert found >= most / 1.125 - 1 or found == whole >= most
    assert len(asked) <= 17


def test_where_no_batch_fits_none_is_divided_and_an_endless_search_ends() -> None:
    assert largest_divided_batch(lambda _: Needs(True, 100, 100), 0) == 0
    assert largest_divided_batch(lambda _: Needs(True, 100, 100), 3) == MOST
