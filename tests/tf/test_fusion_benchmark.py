"""The fusion benchmark itself: a short run of its worker, and what the profiler says of kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.fusion import __main__ as command
from benchmarks.fusion import compare, kernels, long_run, pictures, planning, statistics
from benchmarks.fusion.cases import SYSTEMS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("fusion") / "found.json"
    steps = ["--steps", "6", "--block", "3", "--parity", "4", "--warm-up", "2", "--settle", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # this process may have all of a GPU's memory
        assert command.main(["--only", "logistic", "large/column", *steps, "--output", str(path)]) == 0
    return json.loads(Path(path).read_text())["cases"]


def test_every_system_is_measured(results) -> None:
    outcome = results["logistic"]
    assert outcome["ops"] == {"products": 2, "memory": 17}
    assert set(outcome["systems"]) == set(SYSTEMS)
    assert outcome["systems"]["auto-jit"]["clusters"] >= 1
    assert outcome["rounds"] == 2
    assert not outcome["remapper"]
    for system in outcome["systems"].values():
        assert system["status"] == "ok"
        assert system["steps"] == 6
        assert 0 < system["least"] <= system["ms"] < 1e3 * 60
        assert system["first_seconds"] > 0
        assert system["difference"] < compare.BOUNDS[True]
    assert outcome["systems"]["graph"]["difference"] == 0


def test_a_copy_is_measured_beside_large_tensors(results) -> None:
    outcome = results["large/column_sums"]
    assert outcome["systems"]["copy"]["moved"] == outcome["moved"]  # two inputs; an input and an output
    assert 0 < compare.of_copy(outcome, "graph") < 10
    assert outcome["systems"]["jit_compile"]["difference"] < 1e-4  # sums of 4096 numbers in another order


def test_kernels_are_counted_by_streams() -> None:
    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:CPU").lines.add(name="Stream #1").events.add(metadata_id=1, duration_ps=9)
    gpu = space.planes.add(name="/device:GPU:0")
    for number, name in enumerate(("fusion_3", "MemcpyD2H", "sgemm")):
        gpu.event_metadata[number].name = name
    stream = gpu.lines.add(name="Stream #14(Compute)")
    for number in (0, 1, 2, 0, 2, 0):
        stream.events.add(metadata_id=number, duration_ps=1_000_000_000)
    gpu.lines.add(name="XLA Ops").events.add(metadata_id=0, duration_ps=10**12)
    found = kernels.counted([space.SerializeToString()], steps=2)
    assert found == {"kernels": 2.5, "copies": 0.5, "busy_ms": 3.0}


def test_the_profiler_runs_without_a_gpu() -> None:
    assert kernels.profiled(lambda: None) == {"kernels": 0, "copies": 0, "busy_ms": 0}


def test_pictures_of_workloads(tmp_path: Path) -> None:
    assert pictures.main(["--output", str(tmp_path), "--only", "logistic"]) == 0
    assert "ResourceApplyGradientDescent" in (tmp_path / "logistic.svg").read_text()


def test_statistics_of_kernels_for_a_gpu(tmp_path: Path) -> None:
    results, page = tmp_path / "statistics.json", tmp_path / "page.md"
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    assert statistics.main(["--output", str(results), "--only", "logistic", "--document", str(page)]) == 0
    assert tf.config.optimizer.get_experimental_options().get("remapping", True) == before
    found = json.loads(results.read_text())
    case = found["cases"]["logistic"]
    assert (case["kernels"], case["calls"], case["lost"]) == (2, 2, [])
    counts = case["composition"]
    for names in (statistics.CATEGORIES, statistics.FOUND_BY, statistics.SCOPES):
        assert sum(counts[name] for name in names) == case["kernels"]
    assert 0 < case["shared"]["average"] <= case["shared"]["largest"] <= case["shared"]["unshared"]
    assert "| logistic | 2 |" in page.read_text()


def test_the_generated_graph_is_planned(tmp_path: Path) -> None:
    results = tmp_path / "planning.json"
    assert planning.main(["--ops", "1000", "--without-long", "--output", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["ops"] == 1000
    assert found["usual"]["saves"] >= found["usual"]["greedy"] > 0


def test_a_stitched_step_strays_no_further_than_one_unit_in_the_last_place_would(tmp_path: Path) -> None:
    results = tmp_path / "long_run.json"
    assert long_run.main(["--steps", "200", "--output", str(results)]) == 0
    (case,) = json.loads(results.read_text())["cases"].values()
    assert case["regions"]
    assert case["moved"] > 0
