"""The fusion benchmark itself: a short run of its worker, and what the profiler says of kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfmem
from benchmarks.fusion import __main__ as command
from benchmarks.fusion import anyone, breakdown, compare, kernels, long_run, planning, statistics, tables, worker
from benchmarks.fusion.cases import RECURRENT, SYSTEMS, TEN
from benchmarks.fusion.coverage import covered
from benchmarks.fusion.moves import MOVES
from benchmarks.fusion.systems import System
from benchmarks.fusion.workloads import make
from benchmarks.fusion.workloads.anyone import WORKLOADS
from benchmarks.records import FORMAT

pytestmark = pytest.mark.timeout(1200)  # one test waits for what all of them need


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("fusion") / "found.json"
    steps = ["--steps", "6", "--block", "3", "--parity", "4", "--warm-up", "2", "--settle", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # this process may have all of a GPU's memory
        assert command.main(["--only", "logistic", "large/column", *steps, "--output", str(path)]) == 0
    return json.loads(Path(path).read_text())["cases"]


@pytest.mark.long
def test_every_system_is_measured(results) -> None:
    outcome = results["logistic"]
    assert outcome["ops"] == {"products": 2, "memory": 17}
    assert set(outcome["systems"]) == set(SYSTEMS) - {"fusion"}  # logistic regression has no recurrence
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
    assert "regions" not in outcome["systems"]["graph"]
    assert outcome["systems"]["tfmem"]["fusion"]


def test_a_row_says_what_regions_hold() -> None:
    workload = make("logistic")
    step = tfmem.optimize(workload.step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    step(*workload.inputs)
    found = worker.regions_of(System("tfmem", workload, step))
    (region,) = tfmem.report(step).regions
    assert found["regions"] == 1
    assert f"{found['stitched_ops']} ops in {found['stitched_kernels']} kernels" in str(region)
    assert found["stitched_ops"] > found["stitched_kernels"] + found["stitched_calls"] > 0
    numbers = " | ".join(str(found[key]) for key in ("stitched_ops", "stitched_kernels", "stitched_calls"))
    row = f"| logistic | 1 | {numbers} | stitched, as"
    assert row in tables.regions({"logistic": {"systems": {"tfmem": found}}})
    assert worker.regions_of(System("graph", workload, workload.step)) == {}


@pytest.mark.long
def test_recurrent_kernels_run_in_the_workloads_that_are_said_to_have_them() -> None:
    replaced = set()
    for name in TEN:
        workload = make(name)
        step = tfmem.optimize(workload.step, passes=("recurrent",), cache_directory="")
        step(*workload.inputs)
        replaced |= {name} if tfmem.report(step).replaced else set()
    assert replaced == set(RECURRENT)


@pytest.mark.long
def test_a_copy_is_measured_beside_large_tensors(results) -> None:
    outcome = results["large/column_sums"]
    assert outcome["systems"]["copy"]["moved"] == outcome["moved"]  # two inputs; an input and an output
    assert 0 < compare.of_copy(outcome, "graph") < 10
    assert outcome["systems"]["jit_compile"]["difference"] < 1e-4  # sums of 4096 numbers in another order


def profile(*, marked: bool) -> bytes:
    """A profile of two steps of 10 ms: fusion_3 at 2 and 5 ms, sgemm at 3 beside another stream's copy, 1 ms each."""
    space = xplane_pb2.XSpace()
    host, gpu = space.planes.add(name="/host:CPU"), space.planes.add(name="/device:GPU:0")
    host.event_metadata[1].name = f"{kernels.STEP}#step_num=0#"
    thread = host.lines.add(name="Stream #1", timestamp_ns=7)
    for number, name in enumerate(("fusion_3", "MemcpyD2H", "sgemm")):
        gpu.event_metadata[number].name = name
    streams = [gpu.lines.add(name=f"Stream #{number}(Compute)", timestamp_ns=7) for number in (14, 15)]
    for step in range(2):
        begin = step * 10 * MS
        if marked:
            thread.events.add(metadata_id=1, offset_ps=begin, duration_ps=10 * MS)
        for at, number, stream in ((2, 0, 0), (3, 2, 0), (3, 1, 1), (5, 0, 0)):
            streams[stream].events.add(metadata_id=number, offset_ps=begin + at * MS, duration_ps=MS)
    gpu.lines.add(name="XLA Ops").events.add(metadata_id=0, duration_ps=1000 * MS)
    return space.SerializeToString()


MS = 10**9  # picoseconds


def test_kernels_are_counted_by_streams() -> None:
    found = kernels.counted([profile(marked=False)], steps=2)
    largest = [{"name": "fusion_3", "count": 2.0, "ms": 2.0}, {"name": "sgemm", "count": 1.0, "ms": 1.0}]
    assert found == {"kernels": 3.0, "copies": 1.0, "kernel_ms": 3.0, "busy_ms": 4.0, "largest": largest}


def test_a_step_is_split_into_kernels_gaps_and_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = kernels.counted([profile(marked=True)], steps=2)
    assert (found["before_ms"], found["gaps_ms"], found["after_ms"]) == (2.0, 1.0, 4.0)
    systems = {"graph": {"ms": 10.5}, "jit_compile": {"ms": 6.0}, "tfmem": {"ms": 9.0, "wall_ms": 10.0} | found}
    results = {"format": FORMAT, "cases": {"vae": {"systems": systems}, "mlp": {"systems": {"graph": {"ms": 1.0}}}}}
    (tmp_path / "found.json").write_text(json.dumps(results))
    assert breakdown.main([str(tmp_path / "found.json"), "--missed"]) == 0
    text = capsys.readouterr().out
    assert "## vae: 1.17x over graph, of 1.5x and 0.67x over the better XLA, of 1.0x" in text
    assert "| tfmem | 3.0 | 1.0 | 9.000 | 10.000 | 3.000 | 2.000 | 1.000 | 4.000 |" in text
    assert "| fusion_3 | 2.0 | 2.0000 |" in text
    assert breakdown.main([str(tmp_path / "found.json"), "--only", "mlp"]) == 1


@pytest.mark.long
def test_statistics_of_kernels_for_a_gpu(tmp_path: Path) -> None:
    results, page = tmp_path / "statistics.json", tmp_path / "page.md"
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    assert statistics.main(["--output", str(results), "--only", "logistic", "--document", str(page)]) == 0
    assert tf.config.optimizer.get_experimental_options().get("remapping", True) == before
    found = json.loads(results.read_text())
    case = found["cases"]["logistic"]
    assert (case["kernels"], case["calls"], case["lost"]) == (2, 1, [])  # the gradient is updated in its kernel
    counts = case["composition"]
    assert counts["product"] == 1
    for names in (statistics.CATEGORIES, statistics.FOUND_BY, statistics.SCOPES):
        assert sum(counts[name] for name in names) == case["kernels"]
    assert 0 < case["shared"]["average"] <= case["shared"]["largest"] <= case["shared"]["unshared"]
    assert "| logistic | 2 |" in page.read_text()


@pytest.mark.long
def test_the_generated_graph_is_planned(tmp_path: Path) -> None:
    results = tmp_path / "planning.json"
    assert planning.main(["--ops", "1000", "--without-long", "--output", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["ops"] == 1000
    assert found["usual"]["saves"] >= found["usual"]["greedy"] > 0


@pytest.mark.long
def test_a_stitched_step_strays_no_further_than_one_unit_in_the_last_place_would(tmp_path: Path) -> None:
    results = tmp_path / "long_run.json"
    assert long_run.main(["--steps", "200", "--output", str(results)]) == 0
    (case,) = json.loads(results.read_text())["cases"].values()
    assert case["regions"]
    assert len(case["moved"]) == MOVES
    assert min(case["moved"]) > 0
    assert len(set(case["moved"])) > 1, "each is moved in its own way"
    assert len(case["permuted"]) == long_run.ORDERS
    assert min(case["permuted"]) > 0, "another order of the batch has to be another order of sums"


def test_networks_of_anyone_have_sources_and_rows() -> None:
    assert set(anyone.NETS) == set(WORKLOADS)
    system = {"ms": 2.0, "first": 3.0}
    case = {
        "status": "ok",
        "decided": 4.0,
        "tuned": None,
        "slowest_ms": 5.0,
        "mean_ms": 2.5,
        "commit": "abc",
        "regions": 1,
        "inside": 9,
        "outside": 0,
        "stitched": True,
        "systems": {"graph": system, "tfmem": {"ms": 0.5}, "jit_compile": {"status": "refused"}},
    }
    title, row, failed = anyone.lines({"nerf": case, "gpt": {"status": "timeout", "message": "no result"}})
    assert title.count("|") == row.count("|") == failed.count("|")
    assert "| 4.0 " in row
    assert "| 4.00 " in row  # over plain
    assert "refused" in row


def test_all_of_a_small_network_is_in_one_region() -> None:
    found = covered("anyone/nerf")
    assert (found.regions, found.outside.total()) == (1, 0)
    assert found.kernels >= found.different > 5
