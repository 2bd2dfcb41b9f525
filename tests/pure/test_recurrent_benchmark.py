"""The recurrent benchmark: its cases and floors as data, its tables from results."""

from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.recurrent import search, tables
from benchmarks.recurrent.cases import Case, Chip, Floor, fastest, floor
from custom_ops.errors import KernelError
from custom_ops.recurrent.search.tune import Trial
from custom_ops.recurrent.spec import Configuration
from custom_ops.timing.tune import Measured

CHIP = Chip(
    fmas_per_second=1e9, bytes_per_second=1e9, cluster_barrier_seconds=1e-3, grid_barrier_seconds=5e-3,
    multiprocessor_bytes=32 * 1024, cluster=2,
)  # fmt: skip


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
        "configuration": vars(Configuration(ctas=16, exchange="cluster")),
        "nanoseconds": 40_000.0,
        "parts": {"synchronisation": 200.0, "load": 50.0, "products": 100.0, "reduction": 20.0},
        "columns": search.COLUMNS,
        "trials": [
            search.short(place, Trial(Configuration(), 1, 0.0, measured))
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
                tfmem_highest__graph=ran(0.05), tfmem_highest__plain=ran(0.1),
                tfmem_tf32__plain=ran(0.03), tfmem_tf32__graph=ran(0.02),
            ),
            large.name: result(large, cudnn_tf32__plain=ran(1.0), tfmem_highest__plain=broken),
        },
    }  # fmt: skip


def test_the_fastest_of_fp32_count(results):
    systems = results["cases"]["lstm/256/1"]["systems"]
    assert fastest(systems, tfmem=True) == ("tfmem highest, graph", 0.05)
    assert fastest(systems, tfmem=True, kind="plain") == ("tfmem highest, plain", 0.1)
    assert fastest(systems, tfmem=True, tf32=True) == ("tfmem tf32, graph", 0.02)
    assert fastest(systems, tfmem=False) == ("cudnn tf32, plain", 0.9)
    assert fastest(systems, tfmem=False, tf32=False) == ("cudnn, graph", 1.0)


def test_tables_hold_ratios_floors_and_failures(results):
    text = tables.tables(results)
    assert "| 256 | 1 | 0.0500 | 1.000 (cudnn, graph) | 20.00x | 0.0200 | 0.900 (cudnn tf32, plain) | 45.00x |" in text
    assert "| 1024 | 1 | error | - | - | - | 1.000 (cudnn tf32, plain) | - | 1.000 (cudnn tf32, plain) | - |" in text
    assert "Fp32: geometric mean 20.00x, least 20.00x." in text
    assert "TF32 allowed: geometric mean 45.00x, least 45.00x." in text
    assert "TF32 allowed, both call by call: geometric mean 30.00x, least 30.00x." in text
    assert "| `lstm/256/1` | cluster, fma, 1 rows, 16 x 256 | 0.40 | 0.20 | 0.05 | 0.12 |" in text
    assert "torch 2.11, cudnn 9.19" in text


def test_the_models_first_and_first_five_against_all(results):
    text = tables.tables(results, search=results)
    assert "| `lstm/256/1` | 7 | 0.0001 | 1.20x | 5.0% | 1.0% |" in text
    assert "top-1 5.0%, top-5 1.0%; at most 5.0% and 1.0%." in text


def test_a_search_times_what_is_near_and_some_of_the_rest():
    predicted = [10.0, 12.0, 11.0, 20.0, *range(21, 60)]
    near = [0, 1, 2, 3]
    assert search.selected(predicted, 2.0, 0) == near
    found = search.selected(predicted, 2.0, 5)
    assert found[:4] == near
    assert len(set(found)) == 9
    assert search.selected(predicted, 2.0, 5) == found
    assert search.selected(predicted, 2.0, 99) == list(range(len(predicted)))
    assert search.selected([], 2.0, 5) == []


class Bench:
    """Times by threads, the first time too small; more than 512 fail."""

    def __init__(self):
        self.asked = []

    def measure(self, configuration, point):
        threads = configuration.threads
        if threads > 512:
            raise KernelError("too many")
        again = threads in self.asked
        self.asked.append(threads)
        return Measured(1e3 * threads + 100 * again, registers=40, local=0)


def test_a_search_times_the_fastest_once_more(results):
    done = Future()
    done.set_result(None)
    order = [96, 64, 1024, *range(128, 512, 32)]  # the model's, which is wrong about the first and the third
    trials = {place: Trial(Configuration(threads=threads), 1, 1.0) for place, threads in enumerate(order)}
    shares = [(done, {place: trial}) for place, trial in trials.items()]
    bench = Bench()
    found = search.search(bench, shares)
    assert found[1].measured == 64_100
    assert found[0].measured == 96_100
    assert found[2].error == "too many"
    assert found[len(order) - 1].measured == 480_000  # slow, and not among the model's first: timed once
    assert search.in_words(found) == "0.0641 ms, first 49.9%, first 5 0.0%, 1 failed: too many, 15 timed"
    case = {**results["cases"]["lstm/256/1"], **search.outcome(found), "space": 99}
    text = "".join(tables.accuracy({"cases": {"lstm/256/1": case}}))
    assert "| `lstm/256/1` | 15 of 99 | 0.0641 | 4.49x | 49.9% | 0.0% |" in text


def test_keras_before_and_after(results):
    times = {"lstm/256/1": 20, "lstm/64/1": 5, "gru/64/1": 40, "train/lstm/64/10": 4, "lstm/64/1, no TF32": 9}
    cases = {
        name: {"status": "ok", "before": 0.1 * ratio, "after": 0.1, "error": 1e-4} for name, ratio in times.items()
    }
    cases["train/gru/64/1"] = {"status": "wrong", "message": "losses differ"}
    inference, exact, training = tables.end_to_end(cases)
    assert "| `lstm/256/1` | 2.000 | 0.100 | 20.00x | 0.0001 |" in inference
    assert "Geometric mean 15.87x, least 5.00x. " in inference  # the third root of 4000
    assert "Geometric mean of `lstm` 10.00x, least 5.00x. Geometric mean of `gru` 40.00x" in inference
    assert "train" not in inference
    assert "no TF32" not in inference
    assert exact.endswith(
        "| `lstm/64/1, no TF32` | 0.900 | 0.100 | 9.00x | 0.0001 |\n\nGeometric mean 9.00x, least 9.00x."
    )
    assert "| `train/gru/64/1` | - | - | wrong | - |" in training
    assert training.endswith("\n\nGeometric mean 4.00x, least 4.00x.")
