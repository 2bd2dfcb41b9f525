"""The offload benchmark: its cases as data, its tables from results."""

import json
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.offload import shares, tables
from benchmarks.offload.cases import FULL, all_cases

GIB = 1 << 30


def ran(seconds: float, peak: float, **more):
    common = {"status": "ok", "batch": 256, "form": "function", "system": "plain"}
    losses = {"losses": [2.0, 1.0], "deterministic": False, "network": "vgg19"}
    return {**common, **losses, "median_seconds": seconds, "peak": int(peak * GIB), **more}


def moved(seconds: float, peak: float, **more):
    out = {"bytes_out": 3 * GIB, "bytes_in": 3 * GIB, "stall_ns": 12_000_000, "system": "tfmem"}
    return ran(seconds, peak, report={"peak_predicted": int(peak * GIB)}, **(out | more))


@pytest.fixture
def results():
    bandwidth = ("to_host", "to_device", "both_to_host", "both_to_device")
    return {
        "format": 1,
        "machine": {
            "gpus": ["NVIDIA H200, 580"],
            "gpu_fields": "name,driver_version",
            "cores": 16,
            "cpu": "CPU",
            "kernel": "6",
            "python": "3.12",
            "environment": {},
        },
        "cases": {
            "link": {"status": "ok", "bandwidth": dict.fromkeys(bandwidth, 10.0 * GIB)},
            "vgg19/oracle": ran(0.2, 24),
            "vgg19/1.5/plain": ran(0.5, 16, cap=16 * GIB),
            "vgg19/1.5/tfmem": moved(0.25, 15, cap=16 * GIB),
            "vgg19/2.0/plain": {"status": "oom", "cap": 12 * GIB, "system": "plain"},
            "vgg19/2.0/tfmem": moved(0.4, 12, cap=12 * GIB, losses=[2.0, 1.5]),
        },
    }


def test_the_cap_is_the_oracles_peak_over_n_m():
    case = next(case for case in all_cases() if case.name == "vgg19/1.5/tfmem")
    assert case.cap(FULL, {"vgg19/oracle": ran(0.2, 24)}) == 16 * GIB
    with pytest.raises(LookupError, match="vgg19/oracle, which has not run"):
        case.cap(FULL, {})
    headline = next(case for case in all_cases() if case.headline)
    assert headline.cap(FULL, {}) == FULL.headline_cap


def test_tables_hold_the_figures(results):
    text = tables.tables(results)
    assert "| one direction at a time | 10.0 | 10.0 |" in text
    # the floor at N_m = 1.5: 3 GiB at 10 GiB/s take longer than the oracle's 200 ms
    row = "| 1.5 | 16.00 | autovm | 500 | 250 | 2.00x | 80% | 3.00 / 3.00 | 12.0 | 300 | 15.00 (15.00) |"
    assert row in text
    assert "| 2 | 12.00 | autovm | OOM | 400 | - | 50% |" in text
    assert "| `vgg19/1.5/tfmem` | off | 2 | yes | 0 |" in text
    assert "| `vgg19/2.0/tfmem` | off | 2 | no | 0.5 |" in text
    assert "ResNet" not in text  # did not run


def test_only_what_is_between_the_markers_changes(results, tmp_path):
    source, document = tmp_path / "r.json", tmp_path / "docs" / "benchmarks.md"
    source.write_text(json.dumps(results))
    for _ in range(2):
        assert tables.main([str(source), "--document", str(document)]) == 0
    once = document.read_text()
    assert once.count(tables.BEGIN) == 1
    document.write_text("before\n" + once + "after\n")
    tables.main([str(source), "--document", str(document)])
    assert document.read_text() == "before\n" + once + "after\n"
    with pytest.raises(ValueError, match="needs both markers"):
        tables.replaced(tables.BEGIN, "")


def test_the_table_of_shares_has_a_row_for_moves_and_one_for_regions_as_well() -> None:
    plain = {"status": "ok", "name": "unet", "batch": 16, "seconds": 0.3, "peak": 23 << 30, "first": 1.0}
    refused = {"status": "ok", "error": "InfeasibleBudgetError: too small"}
    cases = {"unet": {**plain, "moves": {"0.6": {"seconds": 0.4}, "0.4": refused}, "fused": {"0.6": {"seconds": 0.2}}}}
    assert shares.table(cases) == [
        "| network, batch | plain | tfmem | 0.6 | 0.4 |",
        "| --- | --- | --- | --- | --- |",
        "| unet, 16 | 300 ms, 23.0 GiB | moves | 0.75 | refused |",
        "| unet, 16 | 300 ms, 23.0 GiB | fused | 1.50 |  |",
    ]
    told = shares.lines({**plain, "moves": {"0.4": refused}})
    assert [line.partition(":")[0] for line in told] == ["unet", "unet at 0.4, moves"]
