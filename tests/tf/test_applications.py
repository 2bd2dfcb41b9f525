"""Architectures of keras.applications: planned and put into their graphs; one of them trained."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf

import tfmem
from benchmarks.application_worker import network, planned, train
from benchmarks.applications import CASES, SHARES, table, wanted


@pytest.mark.parametrize(
    ("name", "image"),
    [("ResNet50V2", 96), ("MobileNetV3Small", 48), ("EfficientNetV2B0", 48)],
)
def test_every_share_is_planned_and_put_into_the_graph(name, image):
    task = {"name": name, "image": image, "batch": 16}
    found = planned(network(task), task)
    assert set(found["plans"]) == {str(share) for share in SHARES}
    for plan in found["plans"].values():
        assert plan.get("smallest", found["estimate"]) > plan["budget"]
        assert plan.get("planned", 0) <= plan["budget"]
    assert found["plans"]["80"]["moves"] > 0


def test_one_of_them_trains_within_its_budget():
    task = {"name": "MobileNetV2", "image": 64, "batch": 16}
    losses, peaks = [], []
    for share in (None, 0.65):
        tf.keras.utils.set_random_seed(1)
        model = network(task)
        if share is not None:
            model = tfmem.optimize(model, memory_budget=int(share * peaks[0]))
        found = train(model, task)
        losses.append(found["losses"])
        peaks.append(found["peak"])
        report = share and tfmem.report(model)
        del model
        gc.collect()
    assert report.transfers
    assert report.peak_measured <= int(0.65 * peaks[0])
    assert peaks[1] <= 0.65 * peaks[0]
    assert losses[0] == losses[1]


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
