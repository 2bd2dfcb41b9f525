"""A second process finds the plan of regions in the cache, and makes the same step of it without planning."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from custom_ops.jit.cache import Cache
from graph_passes.graph.ir import TensorId
from graph_passes.passes.fuse import kept_plan
from graph_passes.passes.fuse.plan import FusionPlan, Unfused
from graph_passes.refusals import Reason
from graph_passes.report import Report
from tests.tf.stitched_steps import BY_MODEL, Softmax, close, optimized, run
from tfmem.steps import after_grappler, known_plans

PLANS = "plans"


class Planned:
    """Counts how often the passes plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._stitch = after_grappler.stitch
        monkeypatch.setattr(after_grappler, "stitch", self)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self._stitch(*arguments)


@pytest.fixture(name="planned")
def fixture_planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(monkeypatch)


def stitched(cache: Path, function: Any = None, **options: Any) -> tuple[bytes, Report]:
    """The graph that runs, as bytes, and the report."""
    options = {"fusion": BY_MODEL, "passes": ("recurrent", "fusion"), **options}
    step = optimized(function or Softmax().step, cache_directory=str(cache), **options)
    close(run(step), run(Softmax().step))
    report = tfmem.report(step)
    assert report.regions
    ((known,),) = [list(found.values()) for found in step._steps.values()]
    return known.function.graph.as_graph_def().SerializeToString(deterministic=True), report


def files(cache: Path) -> list[Path]:
    return [place for place in (cache / PLANS).rglob("*") if place.is_file()]


def test_a_second_process_does_not_plan(planned: Planned, tmp_path: Path) -> None:
    first, told = stitched(tmp_path)
    assert planned.count == len(files(tmp_path)) == 1
    again, told_again = stitched(tmp_path)
    assert planned.count == 1
    assert again == first
    assert told_again.regions == told.regions
    assert told_again.not_stitched == told.not_stitched


def test_bodies_of_loops_are_known_too(planned: Planned, tmp_path: Path) -> None:

    @tf.function
    def function(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.tanh(x * 2.0 + 1.0) - x
        return x

    def made() -> Any:
        step = tfmem.optimize(function, passes=("fusion",), fusion=BY_MODEL, cache_directory=str(tmp_path))
        return step(tf.linspace(-1.0, 1.0, 64)), tfmem.report(step)

    (first, told), (again, told_again) = made(), made()
    assert planned.count == 1
    tf.debugging.assert_equal(first, again)
    assert told_again.regions == told.regions
    assert any("/" in region.name for region in told.regions), "there is a region in the body"


class Other(Softmax):
    """Another step of the same form."""

    def run(self, x: Any, y: Any) -> Any:
        loss, largest = super().run(x, y)
        return loss, largest + 0.0 * tf.reduce_sum(tf.sin(x))


@pytest.mark.parametrize(
    "other",
    [
        {"function": lambda: Other().step},
        {"fusion": tfmem.FusionOptions(tune="off", xla=False)},
        {"passes": ("fusion",)},
    ],
    ids=["graph", "option", "passes"],
)
def test_what_differs_is_planned(other: dict[str, Any], planned: Planned, tmp_path: Path) -> None:
    stitched(tmp_path)
    function = other.pop("function", None)
    stitched(tmp_path, function() if function else None, **other)
    assert planned.count == len(files(tmp_path)) == 2


@pytest.mark.parametrize("fact", ["device", "code"])
def test_another_device_or_version_plans(
    fact: str, planned: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stitched(tmp_path)
    if fact == "code":
        monkeypatch.setattr(known_plans, "code_digest", lambda: "another")
    else:
        needs = after_grappler.fusion_needs

        def changed(*given: Any, **more: Any) -> Any:
            found = needs(*given, **more)
            return replace(found, device=replace(found.device, launch=2 * found.device.launch))

        monkeypatch.setattr(after_grappler, "fusion_needs", changed)
    stitched(tmp_path)
    assert planned.count == len(files(tmp_path)) == 2


def test_shapes_that_the_program_set_count(planned: Planned, tmp_path: Path) -> None:
    """A GraphDef does not hold them."""

    def made(size: int | None) -> None:
        @tf.function(input_signature=[tf.TensorSpec([None, None])])
        def step(x: Any) -> Any:
            x = tf.tanh(x) * 2.0
            x.set_shape([None, size])
            return tf.reduce_sum(tf.sin(x) + 1.0)

        step = tfmem.optimize(step, passes=("fusion",), fusion=BY_MODEL, cache_directory=str(tmp_path))
        step(tf.ones([2, 3]))

    for size, count in ((3, 1), (3, 1), (None, 2)):
        made(size)
        assert planned.count == count


def rewritten(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another content in a file, with the checksum that fits."""
    cache, key = Cache(place.parent.parent), place.parent.name + place.name
    found = json.loads(cache.get(key, bytes))
    change(found)
    cache.keep(key, json.dumps(found).encode())


def no_graph(found: dict[str, Any]) -> None:
    found["graph"] = found["graph"][:40]


def no_updates(found: dict[str, Any]) -> None:
    graph_def = tf.compat.v1.GraphDef.FromString(base64.b64decode(found["graph"]))
    lost = [node for node in graph_def.node if node.op == "TfmemFusion"][-1]
    graph_def.node.remove(lost)
    found["graph"] = base64.b64encode(graph_def.SerializeToString()).decode()


def no_region(found: dict[str, Any]) -> None:
    found["plan"]["regions"][0]["text"] = "region 1\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place.write_bytes(place.read_bytes()[:-9]),
        lambda place: place.write_bytes(b""),
        lambda place: rewritten(place, lambda found: found.clear()),
        lambda place: rewritten(place, no_graph),
        lambda place: rewritten(place, no_updates),
        lambda place: rewritten(place, no_region),
    ],
    ids=["cut", "empty", "other JSON", "no graph", "an op less", "no region"],
)
def test_damaged_files_are_planned_again(change: Callable[[Path], object], planned: Planned, tmp_path: Path) -> None:
    first, _ = stitched(tmp_path)
    change(files(tmp_path)[0])
    assert stitched(tmp_path)[0] == first
    assert planned.count == 2
    assert stitched(tmp_path)[0] == first, "it was mended"
    assert planned.count == 2


def test_nothing_is_kept_without_a_cache(planned: Planned, tmp_path: Path) -> None:
    for count in (1, 2):
        step = optimized(Softmax().step, fusion=BY_MODEL, cache_directory="")
        run(step)
        assert planned.count == count
    assert not files(tmp_path)


def test_what_failed_is_not_kept(planned: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise AssertionError("no")

    monkeypatch.setattr("graph_passes.passes.fuse.plan.lower_region", broken)
    step = optimized(Softmax().step, fusion=BY_MODEL, cache_directory=str(tmp_path))
    with pytest.warns(tfmem.TfmemWarning):
        run(step)
    assert not files(tmp_path)


def test_a_plan_with_reasons_is_read_as_it_was_written() -> None:
    inner = Reason.NO_RULE(op="Sort")
    reasons = {
        "a": Reason.RANDOM_STATE(tensor=TensorId("x", 1), dtype="int64", shape=[2, None]),
        "b": inner,
        "c": Reason.NODES(count=3),
    }
    plan = FusionPlan(kept=(Unfused("fusion_0", ("a", "b"), inner),), reasons=reasons)
    assert kept_plan.read(json.loads(json.dumps(kept_plan.written(plan)))) == plan
    about = FusionPlan(reasons={"a": Reason.NO_RULE(op=ValueError("no dimension of it is known"))})
    read = kept_plan.read(json.loads(json.dumps(kept_plan.written(about))))
    assert str(read.reasons["a"]) == str(about.reasons["a"])
    with pytest.raises(TypeError, match="which the cache does not hold"):
        kept_plan.written(FusionPlan(reasons={"a": Reason.NO_RULE(op=object())}))
