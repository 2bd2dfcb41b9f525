"""Steps whose kernels are tuned while they run, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Region
from custom_ops.fusion.search.ranking import ranked
from graph_passes.decision import Decision
from graph_passes.passes.fuse.plan import FusionPlan
from tests.tf.fake_gpu import PROCESSORS, FakeGpu
from tests.tf.stitched_steps import Softmax, batch, close, values
from tests.tf.test_fusion_choice import Found
from tests.tf.test_step_machine import edge, fixture_moves  # noqa: F401 - a fixture
from tfmem.kernels.fusion_tuning import Tuned
from tfmem.steps import after_grappler, comparing, on_copies, xla_runner
from tfmem.steps.phases import Event, Phase
from tfmem.steps.variable_copies import Copies
from tfmem.timing.ab_timing import Times

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")


@dataclass
class Kernels:
    """In place of `FusionKernels`: each kernel's second best, which saves as much as it is told."""

    gpu: FakeGpu
    saved: float
    plans: list[FusionPlan] = field(default_factory=list)
    error: Exception | None = None
    begun: int = 0

    def begin(self) -> None:
        self.begun += 1

    def tuned(self, plan: FusionPlan) -> Tuned:
        self.plans.append(plan)
        if self.error is not None:
            raise self.error

        made = {region.text: tuple(self.programs(region.lowered.region)) for region in plan.regions}
        return Tuned(made, self.saved, 1)

    def programs(self, region: Region, place: str = "") -> Sequence[FusionProgram]:
        """The tuned kernels, which a later process has from the start."""

        def second(pattern: Any, shapes: Any) -> Any:
            found = ranked(pattern, shapes, PROCESSORS)
            return found[min(1, len(found) - 1)][0]

        return self.gpu.programs(region, second)


@pytest.fixture(name="tuned")
def fixture_tuned(
    gpu: FakeGpu, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """An optimised step, with what its kernels save and what its comparisons find; and the kernels."""

    def make(
        saved: float,
        *times: Times | None,
        error: Exception | None = None,
        xla: bool = False,
        before: bool = False,
    ) -> tuple[Any, Softmax, Kernels]:
        kernels, model = Kernels(gpu, saved, error=error), Softmax()
        on_gpu(kernels.programs if before else None)
        monkeypatch.setattr(comparing.Fuser, "kernels", lambda self: kernels)
        monkeypatch.setattr(on_copies, "Slices", Found(*times))
        fusion = tfmem.FusionOptions(tune="fast", xla=xla)
        step = tfmem.optimize(model.step, passes=("fusion",), fusion=fusion, cache_directory=str(tmp_path))
        return step, model, kernels

    return make


def settled(step: Any, model: Softmax) -> Any:
    """The `ManagedStep`, once it is final; its results are TensorFlow's all along."""
    plain = Softmax()
    for seed in range(20):
        close(step(*batch(seed)), plain.step(*batch(seed)))
        ((known,),) = [list(found.values()) for found in step._steps.values()]
        known.wait()
    close(values(model.variables), values(plain.variables))
    assert known.settled
    return known


def images(function: Any) -> set[bytes]:
    """The programs of a function's regions."""
    nodes = function.graph.as_graph_def().node
    return {text for node in nodes if node.op == "TfmemFusion" for text in node.attr["programs"].list.s}


def test_tuned_kernels_that_win_run(tuned: Callable[..., Any], moves: Callable[[], list[str]]) -> None:
    step, model, kernels = tuned(0.4, Times(2.0, 1.0), Times(1.0, 0.5))
    known = settled(step, model)
    assert moves()[-3:] == [
        edge(Phase.COMPARING, Event.TUNES, Phase.TUNING),
        edge(Phase.TUNING, Event.TIMED, Phase.COMPARING),
        edge(Phase.COMPARING, Event.CLEAR, Phase.SETTLED),
    ]
    (plan,) = kernels.plans
    assert kernels.begun == 1  # before there was work for other processes
    expected = {program.to_text().encode() for made in kernels.tuned(plan).programs.values() for program in made}
    assert images(known.function) == expected
    report = tfmem.report(step)
    assert report.fusion == "stitched: 500 ms a step against 2000 ms, on copies, with tuned kernels"
    assert not report.tuning


@pytest.mark.parametrize("second", [0.5, 1.1], ids=["tuned", "by model"])
def test_xla_is_timed_against_what_tuning_left(
    second: float, tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_runner, "loses", lambda _: "")  # the device stays a CPU for XLA
    best = min(1.0, second)
    step, model, _ = tuned(0.4, Times(2.0, 1.0), Times(1.0, second), Times(best, 0.4), xla=True)
    settled(step, model)
    report = tfmem.report(step)
    assert report.decision is Decision.XLA
    assert report.fusion == f"left to XLA: 400 ms a step against {1e3 * best:.0f} ms stitched, on copies"
    assert not report.tuning


def test_tuned_kernels_that_lose_do_not(tuned: Callable[..., Any]) -> None:
    step, model, kernels = tuned(0.4, Times(2.0, 1.0), Times(1.0, 1.1))
    known = settled(step, model)
    (plan,) = kernels.plans
    assert images(known.function) == {program.to_text().encode() for each in plan.regions for program in each.programs}
    assert tfmem.report(step).fusion == "stitched: 1000 ms a step against 2000 ms, on copies"


@pytest.mark.parametrize(("saved", "given"), [(0.019, 2.0), (0.2, 0.8)], ids=["little", "less than is missing"])
def test_kernels_that_save_little_are_not_tried(
    saved: float, given: float, tuned: Callable[..., Any], moves: Callable[[], list[str]]
) -> None:
    step, model, _ = tuned(saved, Times(given, 1.0))
    settled(step, model)
    assert moves()[-1] == edge(Phase.TUNING, Event.STAYS, Phase.SETTLED)


@pytest.mark.parametrize(
    ("saved", "times"),
    [
        (0.4, [Times(2.0, 1.0), Times(1.0, 0.5)]),
        (0.4, [Times(2.0, 1.0), Times(1.0, 1.1)]),
        (0.4, [Times(0.8, 1.0), Times(0.8, 0.6)]),
        (0.019, [Times(2.0, 1.0)]),
    ],
    ids=["tuned wins", "the model's wins", "won when tuned", "nothing to gain"],
)
def test_a_later_process_compares_and_tunes_no_more(
    saved: float, times: list[Times], tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the tuned kernels from the start, and finds the plan, too."""
    settled(*tuned(saved, *times)[:2])
    monkeypatch.setattr(after_grappler, "stitch", None)  # which plans
    step, model, kernels = tuned(saved, before=True)
    settled(step, model)
    assert tfmem.report(step).fusion.endswith("; known from the cache")
    assert not kernels.plans


def test_a_step_that_lost_by_model_may_win_with_tuned_kernels(tuned: Callable[..., Any]) -> None:
    step, model, _ = tuned(0.4, Times(0.8, 1.0), Times(0.8, 0.6))
    settled(step, model)
    assert tfmem.report(step).fusion == "stitched: 600 ms a step against 800 ms, on copies, with tuned kernels"


def test_a_fault_while_tuning_leaves_what_runs(tuned: Callable[..., Any]) -> None:
    step, model, _ = tuned(0.4, Times(2.0, 1.0), error=KeyError(168))
    settled(step, model)
    report = tfmem.report(step)
    assert report.fusion == "stitched: 1000 ms a step against 2000 ms, on copies"
    assert report.notes[-1] == "kernels were not tuned: KeyError: 168"


def test_tuned_kernels_that_fail_leave_the_models(tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Any] = []
    run_on_copies = Copies.run

    def fails(copies: Copies, function: Any) -> Any:
        functions.extend([] if function in functions else [function])
        if functions.index(function) == 2:  # after the step without regions, and with the model's kernels
            raise tf.errors.InternalError(None, None, "on purpose")
        return run_on_copies(copies, function)

    monkeypatch.setattr(Copies, "run", fails)
    step, model, _ = tuned(0.4, Times(2.0, 1.0))
    with pytest.warns(tfmem.TfmemWarning, match="tuning failed with RegionsFailedError"):
        settled(step, model)
    report = tfmem.report(step)
    assert report.fusion == "stitched: 1000 ms a step against 2000 ms, on copies"
    assert not report.tuning
    assert "on purpose" in report.notes[-1]
