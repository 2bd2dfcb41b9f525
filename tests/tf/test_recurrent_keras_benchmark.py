"""The benchmark of Keras layers before and after, on a CPU, with layers that take no time."""

from __future__ import annotations

import pytest

from benchmarks.recurrent import keras
from benchmarks.recurrent.cases import Case


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "SECONDS", 0.0)
    monkeypatch.setattr(keras, "LEAST", 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        Case("lstm", 8, 3, steps=5),
        Case("canonical_gru", 8, 1, steps=4, layers=2),
        Case("lstm", 8, 3, steps=5, training=True),
        Case("gru", 8, 2, steps=5, training=True),
    ],
    ids=lambda case: case.name,
)
def test_both_sides_compute_the_same(case: Case) -> None:
    found = keras.measure(case, tf32=False)
    assert found["status"] == "ok", found["message"]
    assert len(found["replaced"]) == case.layers
    assert all(("gradient" in line) == case.training for line in found["replaced"])
    assert found["calls"] == 2 * keras.ROUNDS
    assert found["before"] > 0
    assert found["after"] > 0


def test_losses_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(keras.TOLERANCES, True, -1.0)
    found = keras.measure(Case("lstm", 8, 3, steps=5, training=True), tf32=True)
    assert found["status"] == "wrong"
    assert "losses differ by" in found["message"]
