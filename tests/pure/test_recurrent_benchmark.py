"""The recurrent benchmark: its cases and floors as data, its tables from results."""

from dataclasses import asdict
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks import make_recurrent_tables, make_tables
from benchmarks.recurrent_cases import BATCHES, STAGES, UNITS, Case, Chip, Floor, all_cases, chosen, fastest, floor

CHIP = Chip(
    fmas_per_second=1e9, bytes_per_second=1e9, cluster_barrier_seconds=1e-3, grid_barrier_seconds=5e-3,
    multiprocessor_bytes=32 * 1024, cluster=2,
)  # fmt: skip


def test_the_grid_is_that_of_the_paper_and_more():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    for layer in STAGES:
        assert {f"{layer}/{units}/{batch}" for units in UNITS for batch in BATCHES} <= set(names)
    assert {(case.units, case.layers, case.steps) for case in all_cases() if case.layers > 1} == {
        (128, 3, 100),
        (256, 2, 20),
    }


def test_cases_are_chosen_by_the_start_of_their_names():
    assert [case.name for case in chosen(["lstm/256/1"])] == ["lstm/256/1", "lstm/256/10"]
    with pytest.raises(ValueError, match="no case starts with 'rnn'"):
        chosen(["rnn"])


def test_a_floor_by_hand():
    # 4 blocks of 32 x 32 words, twice; 2 rows, 10 steps
    assert floor(Case("lstm", 32, 2, steps=10), CHIP) == Floor(
        arithmetic=1e3 * 2 * 4 * 1024 * 2 * 10 / 1e9,
        memory=1e3 * 4 * (2 * 4 * 1024 + 2 * 10 * 2 * 32) / 1e9,
        barriers=0.0 if 4 * 4 * 1024 <= 16 * 1024 else 10.0,  # one block holds 16 KiB beside all else
    )
    assert floor(Case("lstm", 48, 1, steps=10), CHIP).barriers == 10.0  # two blocks do
    assert floor(Case("lstm", 64, 1, steps=10), CHIP).barriers == 10.0
    assert floor(Case("lstm", 128, 1, steps=10), CHIP).barriers == 50.0  # nor they
    assert floor(Case("canonical_gru", 128, 1, steps=10), CHIP).barriers == 100.0  # two of them a step
    assert floor(Case("lstm", 128, 1, steps=10, training=True), CHIP).barriers == 100.0
    assert Floor(arithmetic=3, memory=2, barriers=1).total == 4


def ran(milliseconds, error=1e-7):
    return {"status": "ok", "ms": milliseconds, "error": error}


def result(case, **systems):
    kernel = {
        "configuration": {"exchange": "cluster", "product": "fma", "rows": 1, "ctas": 16, "threads": 256},
        "nanoseconds": 40_000.0,
        "parts": {"synchronisation": 200.0, "load": 50.0, "products": 100.0, "reduction": 20.0, "hidden": 0.0},
        "trials": [
            {"predicted": float(place), "measured": measured}
            for place, measured in enumerate([105.0, 130.0, 120.0, 101.0, 140.0, 100.0, 200.0])
        ],
    }
    return {
        **asdict(case),
        "status": "ok",
        "floor": asdict(floor(case, Chip())),
        "systems": {name.replace("__", ", ").replace("_", " "): outcome for name, outcome in systems.items()},
        "kernels": {"highest": {"kernels": [kernel]}},
    }


@pytest.fixture
def results():
    lstm, large = Case("lstm", 256, 1), Case("lstm", 1024, 1)
    broken = {"status": "error", "message": "no"}
    return {
        "format": 1,
        "machine": {
            "gpus": ["NVIDIA H200, 580"], "cores": 16, "cpu": "CPU", "kernel": "6", "python": "3.12",
            "versions": {"torch": "2.11", "cudnn": "9.19"},
        },
        "cases": {
            lstm.name: result(
                lstm, cudnn__graph=ran(1.0), cudnn_tf32__plain=ran(0.9), cudnn_float16__plain=ran(0.01),
                tfmem_highest__graph=ran(0.05), tfmem_highest__plain=ran(0.1), tfmem_tf32__plain=ran(0.02),
            ),
            large.name: result(large, cudnn_tf32__plain=ran(1.0), tfmem_highest__plain=broken),
        },
    }  # fmt: skip


def test_the_fastest_of_fp32_count(results):
    systems = results["cases"]["lstm/256/1"]["systems"]
    assert fastest(systems, tfmem=True) == ("tfmem highest, graph", 0.05)
    assert fastest(systems, tfmem=True, kind="plain") == ("tfmem highest, plain", 0.1)
    assert fastest(systems, tfmem=True, tf32=True) == ("tfmem tf32, plain", 0.02)
    assert fastest(systems, tfmem=False) == ("cudnn tf32, plain", 0.9)
    assert fastest(systems, tfmem=False, tf32=False) == ("cudnn, graph", 1.0)


def test_tables_hold_ratios_floors_and_failures(results):
    text = make_recurrent_tables.tables(results)
    assert "| 256 | 1 | 0.0500 | 1.000 (cudnn, graph) | 20.00x | 0.0200 | 0.900 (cudnn tf32, plain) | 45.00x |" in text
    assert "| 1024 | 1 | error | - | - | - | 1.000 (cudnn tf32, plain) | - | 1.000 (cudnn tf32, plain) | - |" in text
    assert "Fp32, best of peers: geometric mean 20.00x, least 20.00x." in text
    assert "TF32, best of peers: geometric mean 45.00x, least 45.00x." in text
    assert "Peers call by call: geometric mean 45.00x, least 45.00x." in text
    assert "| `lstm/256/1` | cluster, fma, 1 rows, 16 x 256 | 0.40 | 0.20 | 0.05 | 0.12 |" in text
    assert "torch 2.11, cudnn 9.19" in text


def test_the_models_first_and_first_five_against_all(results):
    text = make_recurrent_tables.tables(results, search=results)
    assert "| `lstm/256/1` | 7 | 0.0001 | 1.20x | 5.0% | 1.0% |" in text
    assert "top-1 5.0%, top-5 1.0%" in text


def test_keras_before_and_after(results):
    keras = {"cases": {"lstm/256/1": {"status": "ok", "before": 2.0, "after": 0.1, "error": 1e-4}}}
    text = make_recurrent_tables.tables(results, keras=keras)
    assert "| `lstm/256/1` | 2.000 | 0.100 | 20.00x | 0.0001 |" in text


def test_a_cpu(results):
    row = {"layer": "GRU", "hidden": 64, "batch": 2, "tfmem": 2.0, "keras": 9.0, "tf_keras": 5.0}
    machine = {"cpu": "EPYC", "cores": 2, "tensorflow": "2.21", "keras": "3", "tf_keras": "2"}
    text = make_recurrent_tables.tables(results, cpu={"machine": machine, "time": 100, "rows": [row]})
    assert "### A Keras layer on 2 cores (EPYC), 100 steps" in text
    assert "| GRU | 64 | 2 | 2.0 | 9.0 | 4.5x | 5.0 | 2.5x |" in text
    assert "geometric mean 4.5x, least 4.5x" in text


def test_only_what_is_between_the_markers_changes():
    first, last = make_recurrent_tables.MARKERS
    other = f"{make_tables.BEGIN}\nkept\n{make_tables.END}"
    document = f"# Benchmarks\n\n{other}\n\n{first}\nold\n{last}\ntail\n"
    found = make_tables.replaced(document, "new", make_recurrent_tables.MARKERS)
    assert found == document.replace("old", "new")
    assert make_tables.replaced(other, "new", make_recurrent_tables.MARKERS).endswith(f"{first}\nnew\n{last}\n")
