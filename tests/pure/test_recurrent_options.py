"""Whatever the search for a kernel ranges over has won a row of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.records import ROOT, load
from benchmarks.recurrent import options
from custom_ops.recurrent.spec import Configuration
from graph_passes.analysis.cost import device_costs

RESULTS = ROOT / "benchmarks" / "results" / "recurrent_h200.json"


def test_every_option_that_is_searched_wins_somewhere() -> None:
    results = load(RESULTS)
    assert results is not None
    kernels = [values for _, values in options.won(results)]
    searched = options.searched(device_costs.machine("h200"))
    assert searched["exchange"] == {"single", "cluster", "grid"}
    for option, value_of in options.OPTIONS.items():
        never = searched[option] - {value_of(values) for values in kernels}
        assert not never, f"{option}: {never} won nowhere in {RESULTS.name}: measure a row in which it does, or drop it"


def test_the_row_in_which_an_option_gains_most() -> None:
    fast, slow = Configuration(lanes=2), Configuration(lanes=4)
    lanes_of = options.OPTIONS["lanes"]
    assert options.gain({fast: 10.0, slow: 25.0}, lanes_of, 2) == 2.5
    assert options.gain({fast: 10.0, slow: 25.0}, lanes_of, 4) == 0.4
    assert options.gain({fast: 10.0}, lanes_of, 2) == 0  # nothing does without
