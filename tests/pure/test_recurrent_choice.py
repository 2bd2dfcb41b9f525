"""What the model and the tuner make of a search's times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recurrent import choice
from benchmarks.recurrent.cases import Case
from benchmarks.recurrent.search import COLUMNS, short
from custom_ops.recurrent import cells
from custom_ops.recurrent.search.ranking import rank
from custom_ops.recurrent.search.tune import Trial
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from custom_ops.timing.tuner import NEVER
from graph_passes.analysis.cost import device_costs

CASE = Case("lstm", 256, 1)


def searched(times: dict[Configuration, float]) -> dict[str, Any]:
    """A case as benchmarks.recurrent.search writes it."""
    trials = [Trial(configuration, 1, 1.0, time, 40, 0) for configuration, time in times.items()]
    trials = [replace(trial, error="too many") if trial.measured == NEVER else trial for trial in trials]
    written = [short(place, trial) for place, trial in enumerate(trials)]
    return {**asdict(CASE), "kernels": {"highest": {"kernels": [{"columns": COLUMNS, "trials": written}]}}}


@pytest.fixture(name="ranked")
def fixture_ranked() -> list[Configuration]:
    """All that there is, in the model's order."""
    found = rank(device_costs.machine("h200"), RecurrentSpec(cells.lstm(), 256), 1)
    return [prediction.configuration for prediction in found]


def test_the_order_is_the_models(ranked: list[Configuration]) -> None:
    times = {configuration: 100.0 + place for place, configuration in reversed(list(enumerate(ranked)))}
    assert choice.slower(searched(times), "h200") == (0, 0, 0)
    times[ranked[2]], times[ranked[40]] = 50.0, 25.0  # the first five include the one, and not the other
    assert choice.slower(searched(times), "h200") == (3, 1, 1)


def test_the_tuner_looks_among_the_kind_that_was_the_fastest(ranked: list[Configuration]) -> None:
    alike = [configuration for configuration in ranked if configuration.kind == ranked[2].kind]
    others = [configuration for configuration in ranked if configuration.kind != ranked[2].kind]
    times = dict.fromkeys(others, 200.0) | {ranked[2]: 150.0, alike[-1]: 100.0}
    assert choice.slower(searched(times), "h200") == (0.5, 0.5, 0)


def test_what_failed_is_left_out(ranked: list[Configuration]) -> None:
    times = dict.fromkeys(ranked, 100.0) | {ranked[0]: NEVER}
    assert choice.slower(searched(times), "h200") == (0, 0, 0)


def test_a_line_for_each_case(ranked: list[Configuration], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = dict.fromkeys(ranked, 100.0) | {ranked[0]: 110.0}
    path = tmp_path / "search.json"
    path.write_text(json.dumps({"format": 1, "cases": {CASE.name: searched(times)}}))
    assert choice.main([str(path)]) == 0
    assert [line.split()[-3:] for line in capsys.readouterr().out.splitlines()[1:]] == [["10.0%", "0.0%", "0.0%"]] * 3
    with pytest.raises(SystemExit):
        choice.main([str(tmp_path / "none.json")])
