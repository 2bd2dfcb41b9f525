"""XLA is timed, too, where the regions of a step cannot be planned, or fail when they are first run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Decision
from tests.tf.stitched_steps import Softmax, batch, close, optimized
from tests.tf.xla_contest import FAST, FULL, LOSES, WINS, fixture_compared, waited  # noqa: F401 - a fixture
from tfmem.steps import on_copies
from tfmem.steps.fuser import Fuser
from tfmem.steps.variable_copies import Copies
from tfmem.timing.ab_timing import Times


@pytest.mark.parametrize("error", [tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError])
@pytest.mark.parametrize("fusion", [FULL, FAST], ids=["in a call", "in a thread"])
def test_it_is_timed_where_regions_fail(
    fusion: tfmem.FusionOptions, error: Any, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op of a region that fails is a fault of tfmem's, unless memory ran out; XLA is timed in either case."""
    compared(WINS)
    monkeypatch.setattr(on_copies, "LARGE", 1)
    functions: list[Any] = []
    run_on_copies = Copies.run

    def fails(copies: Copies, function: Any) -> Any:
        functions.extend([] if function in functions else [function])
        if functions.index(function) == 1:
            raise error(None, None, "on purpose")
        return run_on_copies(copies, function)

    monkeypatch.setattr(Copies, "run", fails)
    plain, step = Softmax(), optimized(Softmax().step, fusion=fusion)
    fault = error is tf.errors.InvalidArgumentError
    with pytest.warns(tfmem.TfmemWarning, match="stitching failed") if fault else nullcontext():
        found = waited(step, 8)
    close(found, [plain.step(*batch(seed)) for seed in range(8)])
    report = tfmem.report(step)
    assert report.decision is Decision.XLA
    assert report.fusion == "left to XLA: 1 ms a step against 2 ms without XLA, on copies"
    assert any("on purpose" in note for note in report.notes) == fault


@pytest.mark.parametrize("fusion", [FULL, FAST], ids=["in a call", "in a thread"])
@pytest.mark.parametrize("second", [WINS, LOSES], ids=["XLA wins", "XLA loses"])
def test_it_is_timed_where_planning_fails(
    fusion: tfmem.FusionOptions, second: Times, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("on purpose")

    times = compared(second)
    monkeypatch.setattr(Fuser, "plan", fails)
    plain, step = Softmax(), optimized(Softmax().step, fusion=fusion)
    with pytest.warns(tfmem.TfmemWarning, match="stitching failed with ValueError: on purpose"):
        found = waited(step, 6)
    close(found, [plain.step(*batch(seed)) for seed in range(6)])
    report = tfmem.report(step)
    assert not times.left
    assert (report.decision is Decision.XLA) == (second is WINS)
    assert any("on purpose" in note for note in report.notes)
