"""The recurrent benchmark: its cases and floors as data, its tables from results."""

from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks import make_recurrent_tables, make_tables, recurrent_launches, recurrent_search
from benchmarks.recurrent_cases import BATCHES, STAGES, UNITS, Case, Chip, Floor, all_cases, chosen, fastest, floor
from benchmarks.recurrent_sources import (
    GONE,
    GPU_INFO,
    HASTE_KERNELS,
    LOADER,
    all_shapes,
    build_variables,
    haste_sources,
    prepared,
)
from custom_ops.errors import KernelError
from custom_ops.jit.tune import Measured
from custom_ops.recurrent.tune import Trial
from custom_ops.spec import Configuration

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
        "configuration": {"exchange": "cluster", "product": "fma", "rows": 1, "ctas": 16, "threads": 256, "slices": 1},
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
    text = make_recurrent_tables.tables(results)
    assert "| 256 | 1 | 0.0500 | 1.000 (cudnn, graph) | 20.00x | 0.0200 | 0.900 (cudnn tf32, plain) | 45.00x |" in text
    assert "| 1024 | 1 | error | - | - | - | 1.000 (cudnn tf32, plain) | - | 1.000 (cudnn tf32, plain) | - |" in text
    assert "Fp32: geometric mean 20.00x, least 20.00x." in text
    assert "TF32 allowed: geometric mean 45.00x, least 45.00x." in text
    assert "TF32 allowed, both call by call: geometric mean 30.00x, least 30.00x." in text
    assert "| `lstm/256/1` | cluster, fma, 1 rows, 16 x 256 | 0.40 | 0.20 | 0.05 | 0.12 |" in text
    assert "torch 2.11, cudnn 9.19" in text


def test_layers_that_no_chip_holds_have_a_table_of_their_own(results):
    beyond = Case("lstm", 2048, 1)
    results["cases"][beyond.name] = result(beyond, cudnn__graph=ran(2.0), tfmem_highest__graph=ran(1.0))
    grid, own = make_recurrent_tables.tables(results).split("### LSTM whose weights no chip holds")
    assert "| 2048 | 1 |" not in grid
    assert "Fp32: geometric mean 20.00x, least 20.00x." in grid  # as without it
    assert "| 2048 | 1 | 1.0000 | 2.000 (cudnn, graph) | 2.00x |" in own


def test_what_each_layer_is_measured_in():
    assert Case("lstm", 256, 20).precisions == ("highest", "tf32", "bfloat16", "float16")
    for case in (Case("lstm", 256, 1), Case("gru", 256, 20), Case("lstm", 256, 20, layers=2)):
        assert case.precisions == ("highest", "tf32")


def test_the_models_first_and_first_five_against_all(results):
    text = make_recurrent_tables.tables(results, search=results)
    assert "| `lstm/256/1` | 7 | 0.0001 | 1.20x | 5.0% | 1.0% |" in text
    assert "top-1 5.0%, top-5 1.0%; at most 5.0% and 1.0%." in text


def test_a_search_times_what_is_near_and_some_of_the_rest():
    predicted = [10.0, 12.0, 11.0, 20.0, *range(21, 60)]
    near = [0, 1, 2, 3]
    assert recurrent_search.selected(predicted, 2.0, 0) == near
    found = recurrent_search.selected(predicted, 2.0, 5)
    assert found[:4] == near
    assert len(set(found)) == 9
    assert recurrent_search.selected(predicted, 2.0, 5) == found
    assert recurrent_search.selected(predicted, 2.0, 99) == list(range(len(predicted)))
    assert recurrent_search.selected([], 2.0, 5) == []


class Bench:
    """Times by threads, the first time too small; more than 512 fail."""

    def __init__(self):
        self.asked = []

    def measure(self, configuration, batch, time_steps):
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
    found = recurrent_search.search(bench, shares, 100)
    assert found[1].measured == 64_100
    assert found[0].measured == 96_100
    assert found[2].error == "too many"
    assert found[len(order) - 1].measured == 480_000  # slow, and not among the model's first: timed once
    assert recurrent_search.in_words(found) == "0.0641 ms, first 49.9%, first 5 0.0%, 1 failed: too many, 15 timed"
    case = {**results["cases"]["lstm/256/1"], **recurrent_search.outcome(found), "space": 99}
    text = "".join(make_recurrent_tables.accuracy({"cases": {"lstm/256/1": case}}))
    assert "| `lstm/256/1` | 15 of 99 | 0.0641 | 4.49x | 49.9% | 0.0% |" in text


def test_keras_before_and_after(results):
    times = {"lstm/256/1": 20, "lstm/64/1": 5, "gru/64/1": 40, "train/lstm/64/10": 4, "lstm/64/1, no TF32": 9}
    cases = {
        name: {"status": "ok", "before": 0.1 * ratio, "after": 0.1, "error": 1e-4} for name, ratio in times.items()
    }
    cases["train/gru/64/1"] = {"status": "wrong", "message": "losses differ"}
    inference, exact, training = make_recurrent_tables.end_to_end(cases)
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


def test_a_cpu(results):
    row = {"layer": "GRU", "hidden": 64, "batch": 2, "tfmem": 2.0, "keras": 9.0, "tf_keras": 5.0}
    machine = {"cpu": "EPYC", "cores": 2, "tensorflow": "2.21", "keras": "3", "tf_keras": "2"}
    text = make_recurrent_tables.tables(results, cpu={"machine": machine, "time": 100, "rows": [row]})
    assert "### A Keras layer on 2 cores (EPYC), 100 steps" in text
    assert "| GRU | 64 | 2 | 2.0 | 9.0 | 4.5x | 5.0 | 2.5x |" in text
    assert "geometric mean 4.5x, least 4.5x" in text


def context(case, heads=1, **systems):
    return {**asdict(case), "heads": heads, "systems": result(case, **systems)["systems"]}


def test_other_kernels_are_listed_with_their_types(results):
    figure = Case("lstm", 768, 16, steps=1024)
    broken = {"status": "error", "message": "no"}
    results["context"] = {
        "figure/lstm/768/16": context(
            figure, tfmem_bfloat16__plain=ran(2.5), tfmem_bfloat16__graph=ran(2.0, 0.003),
            tfmem_highest__plain=ran(4.0), cudnn__plain=ran(9.0), cudnn_bfloat16__plain=ran(3.0),
            flashrnn_fused_bfloat16__plain=ran(5.0), flashrnn_fused_bfloat16__graph=broken,
            flashrnn_alternating_bfloat16__plain=broken,
            haste_float32__plain=ran(18.0), tfmem_float16__plain=ran(2.0),
        ),
        "figure/lstm/768/16/12 heads": context(
            figure, 12, flashrnn_fused_tf32__plain=ran(3.0), cudnn_tf32__plain=ran(5.0),
        ),
        "train/lstm/64/20": context(Case("lstm", 64, 20, training=True), haste_float32__plain=ran(1.0)),
    }  # fmt: skip
    text = make_recurrent_tables.tables(results)
    first = "| 768 | 1 | 16 | 1024 | forward |"
    assert f"{first} float32 | 4.0000 (1e-07) | 9.0000 (1e-07) | - | - | 18.0000 (1e-07) |" in text
    assert f"{first} bfloat16 | 2.0000 (0.003) | 3.0000 (1e-07) | 5.0000 (1e-07) | error | - |" in text
    assert f"{first} float16" not in text  # none of the others in it
    assert "| 768 | 12 | 16 | 1024 | forward | tf32 | - | 5.0000 (1e-07) | 3.0000 (1e-07) | - | - |" in text
    assert "| 64 | 1 | 20 | 100 | training | float32 | - | - | - | - | 1.0000 (1e-07) |" in text


def test_a_system_that_did_not_run_is_told_from_one_that_was_not_tried():
    systems = {"a, plain": {"status": "wrong", "error": 1.0}, "b, plain": {"status": "error"}, "b, graph": ran(2.0)}
    found = [make_recurrent_tables.best(systems, name) for name in "abc"]
    assert found == ["wrong", "2.0000 (1e-07)", "-"]


def test_shapes_of_the_other_kernels_are_lstms_with_names_of_their_own():
    shapes = all_shapes()
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert [shape.name for shape in shapes[:3]] == [
        "figure/lstm/768/16", "figure/lstm/768/16/12 heads", "figure/train/lstm/768/16",
    ]  # fmt: skip
    assert all(shape.case.layer == "lstm" and shape.case.units % shape.heads == 0 for shape in shapes)
    assert {shape.case.steps for shape in shapes if shape.figure} == {1024}
    known = {case.name for case in all_cases()}
    assert all(shape.figure or shape.name in known for shape in shapes)


def write_flashrnn(folder, field="clockRate"):
    fields = "\n".join(f'    dict["{each}"] =\n        prop.{each}; // kept' for each in ("warpSize", *GONE[1:], field))
    loader = '"verbose": True, "arch=compute_80,code=compute_80"\n    time.sleep(random.random() * 10)\n'
    for file, text in ((GPU_INFO, fields), (LOADER, loader), (".git/config", "")):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


def test_sources_are_patched_in_a_copy(tmp_path):
    source, folder = tmp_path / "clone", tmp_path / "work"
    write_flashrnn(source, GONE[0])
    place = prepared("flashrnn", source, folder)
    found = (place / GPU_INFO).read_text()
    assert "prop.warpSize" in found
    assert not [field for field in GONE if f"prop.{field};" in found]
    assert (place / LOADER).read_text() == '"verbose": False, "arch=compute_90,code=sm_90"\n    pass\n'
    assert not (place / ".git").exists()
    assert "compute_80" in (source / LOADER).read_text()


def test_sources_that_the_patches_are_not_for_are_told(tmp_path):
    source = tmp_path / "clone"
    source.mkdir()
    with pytest.raises(ValueError, match="is it a clone of haste"):
        prepared("haste", source, tmp_path / "haste")
    write_flashrnn(source, "maxGridSize")
    with pytest.raises(ValueError, match=r"has nothing like .*clockRate.*another version"):
        prepared("flashrnn", source, tmp_path / "flashrnn")


def test_of_haste_the_lstm_alone_is_built(tmp_path):
    source = tmp_path / "clone"
    declared = "".join(f"void {name}_init(py::module&);\n" for name in ("gru", "lstm", "layer_norm_lstm"))
    called = "".join(f"  {name}_init(m);\n" for name in ("gru", "lstm", "layer_norm_lstm"))
    files = {
        "frameworks/pytorch/support.cc": declared + called,
        "frameworks/pytorch/__init__.py": "import torch as _\n\nfrom .gru import GRU\nfrom .lstm import LSTM\n",
        **{f"lib/{name}.cu.cc": "" for name in HASTE_KERNELS},
    }
    for file, text in files.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text)
    place = prepared("haste", source, tmp_path)
    support = (place / "haste_pytorch" / "support.cc").read_text()
    assert support == "void lstm_init(py::module&);\n  lstm_init(m);\n"
    assert (place / "haste_pytorch" / "__init__.py").read_text() == "from .lstm import LSTM\n\n__all__ = ['LSTM']\n"
    assert [Path(file).name for file in haste_sources(place)] == [
        "lstm.cc", "support.cc", "lstm_forward_gpu.cu", "lstm_backward_gpu.cu",
    ]  # fmt: skip


def test_cuda_is_found_where_pip_put_it(tmp_path):
    library = tmp_path / "cu13" / "lib" / "libcublas.so.13"
    for folder in (library.parent, tmp_path / "cu13" / "include", tmp_path / "build"):
        folder.mkdir(parents=True)
    variables = build_variables(tmp_path / "build", ["[heap]", str(library), f"{library.parent}/libcublasLt.so.13"])
    assert (Path(variables["LIBRARY_PATH"]) / "libcublas.so").readlink() == library
    assert variables["CPLUS_INCLUDE_PATH"] == str(tmp_path / "cu13" / "include")
    assert not (Path(variables["LIBRARY_PATH"]) / "libcudart.so").exists()


def test_only_what_is_between_the_markers_changes():
    first, last = make_recurrent_tables.MARKERS
    other = f"{make_tables.BEGIN}\nkept\n{make_tables.END}"
    document = f"# Benchmarks\n\n{other}\n\n{first}\nold\n{last}\ntail\n"
    found = make_tables.replaced(document, "new", make_recurrent_tables.MARKERS)
    assert found == document.replace("old", "new")
    assert make_tables.replaced(other, "new", make_recurrent_tables.MARKERS).endswith(f"{first}\nnew\n{last}\n")


def test_a_launch_for_each_stage_has_a_floor_and_a_row():
    """LSTM of 2,048 units: 64 MiB of weights come from device memory, for its 50 MiB of L2 do not hold them."""
    trial = {
        "configuration": {"exchange": "grid", "product": "fma", "rows": 1, "ctas": 256, "threads": 128, "slices": 1},
        "measured": 2e6,
    }
    case = {"layer": "lstm", "units": 2048, "batch": 1, "steps": 100, "one_block_nanoseconds": None}
    fmas, weights, launches = recurrent_launches.floor(case)
    assert fmas == pytest.approx(4 * 2048**2 * 100 / (132 * 128 * 1.98e9) * 1e3)
    assert weights == pytest.approx(100 * (64 << 20) / 4.3e12 * 1e3)
    assert launches == pytest.approx(100 * 2.1e-3)
    assert recurrent_launches.floor({**case, "layer": "canonical_gru"})[2] == 2 * launches
    *_, row = recurrent_launches.table({"lstm/2048/1": {**case, "whole": {**trial, "measured": 5e5}, "staged": trial}})
    assert row.startswith("| lstm | 2048 | 1 | 0.500 (grid, fma, 1 rows, 256 x 128) | 2.000 ")
    assert row.endswith("| 4.00 | - |")
