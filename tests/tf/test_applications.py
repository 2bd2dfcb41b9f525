"""Architectures of keras.applications: planned and put into their graphs; one of them trained. Each in a separate
process: what tests before them hold would count."""

from __future__ import annotations

import pytest

from benchmarks.applications.__main__ import CASES, SHARES, WORKER, table, wanted
from benchmarks.runs import in_process


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "image"),
    [("ResNet50V2", 96), ("MobileNetV3Small", 48), ("EfficientNetV2B0", 48)],
)
def test_every_share_is_planned_and_put_into_the_graph(name, image):
    found = in_process(WORKER, {"kind": "planned", "name": name, "image": image, "batch": 16}, timeout=580)
    assert found["status"] == "ok", found.get("message")
    assert set(found["plans"]) == {str(share) for share in SHARES}
    for plan in found["plans"].values():
        assert plan.get("smallest", found["estimate"]) > plan["budget"]
        assert plan.get("planned", 0) <= plan["budget"]
    assert found["plans"]["80"]["moves"] > 0


@pytest.mark.timeout(1300)
@pytest.mark.long
def test_one_of_them_trains_within_its_budget():
    task = {"name": "MobileNetV2", "image": 64, "batch": 16}
    plain = in_process(WORKER, {**task, "kind": "plain"}, timeout=580)
    assert plain["status"] == "ok", plain.get("message")
    budget = int(0.65 * plain["peak"])
    found = in_process(WORKER, {**task, "kind": "under", "budget": budget}, timeout=580)
    assert found["status"] == "ok", found.get("message")
    assert found["decision"] == "moved"
    assert found["reported"] <= budget
    assert found["peak"] <= budget
    if plain["losses"] == plain["again"]:  # TensorFlow repeats itself
        assert found["losses"] == plain["losses"]


@pytest.mark.long
def test_a_peak_that_cannot_be_measured_is_none(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    found = in_process(WORKER, {"kind": "plain", "name": "MobileNetV3Small", "image": 48, "batch": 2}, timeout=580)
    assert found["status"] == "error"
    assert "counts no bytes" in found["message"]


def test_rows_ask_for_what_an_error_says_next():
    (case,) = [case for case in CASES if case.name == "ResNet50"]
    rows = {"ResNet50/plain": {"status": "ok", "peak": 1000, "seconds": [1.0] * 10, "losses": [1.0], "again": [1.0]}}
    names = dict(wanted(case, rows, plan_only=False))
    assert names["ResNet50/80%"] == 800
    assert names["ResNet50/least"] == 1
    rows["ResNet50/50%"] = {"status": "refused", "smallest": 600, "budget": 500}
    names = dict(wanted(case, rows, plan_only=False))
    assert names["ResNet50/50%/refused"] == 600
    row = {"status": "ok", "peak": 601, "planned": 590, "budget": 600, "seconds": [2.0] * 10, "losses": [1.0]}
    lines = table(rows | {"ResNet50/50%/refused": row})
    assert any("refused: at least" in line for line in lines)
    assert any("OVER" in line and "equal" in line for line in lines)
    rows["ResNet50/plain"]["seconds"] = [100.0] * 10
    assert list(dict(wanted(case, rows, plan_only=False))) == ["ResNet50/planned", "ResNet50/plain"]
