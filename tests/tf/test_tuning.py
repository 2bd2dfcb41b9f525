"""Which matches a device takes: a CPU all of them; a GPU those that it has kernels for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tfmem
from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage
from custom_ops.random import draw_kernels as draws
from custom_ops.recurrent import cells
from custom_ops.recurrent.gpu_program import RecurrentProgram
from custom_ops.recurrent.spec import RecurrentSpec
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.graph.ir import Code, DataType, TensorId
from graph_passes.graph.rewrite import NewNode
from graph_passes.passes.recurrent.match import Direction, Kernels, Match, RecurrentNode, RecurrentPlan
from graph_passes.refusals import Reason
from tfmem.devices import Target
from tfmem.kernels import recurrent as tuning

CPU = Target("/device:CPU:0", "CPU", 1 << 30, profiles.load("cpu"))
GPU = Target("/device:GPU:0", "NVIDIA H200", 1 << 30, profiles.load("h200"))
OPTIONS = tfmem.Options(recurrent=tfmem.RecurrentOptions(progress=False))


def program_of(units: int) -> RecurrentProgram:
    return RecurrentProgram(KernelImage(90, "main", 32, str(units).encode()))


def match(name: str, units: int, dtype: str = "float32", batch: int | None = None) -> Match:
    cell = cells.simple_rnn()
    direction = Direction((TensorId("x"),), (), (), (TensorId("w"),), (TensorId("h"),))
    launch = RecurrentNode(name + "/launch", cell, units, dtype, (direction,), batch=batch)
    return Match(name, "While", (launch,), (), (name,))


@pytest.fixture(name="made")
def fixture_made(monkeypatch: pytest.MonkeyPatch) -> list[RecurrentSpec]:
    """Kernels as they are asked for; there are none for 7 units."""
    made: list[RecurrentSpec] = []

    def kernels(spec: RecurrentSpec, folder: Path, batches: Any, options: Any, ordinal: int) -> Kernels:
        if spec.units == 7:
            raise KernelError("seven is not a lucky number")
        made.append(spec)
        return Kernels((program_of(spec.units),), options.time_steps, ((1, 0.04321), (64, 0.5)))

    monkeypatch.setattr(tuning, "tuned_kernels", kernels)
    return made


def test_a_cpu_takes_all_and_needs_no_programs(made: list[RecurrentSpec]) -> None:
    plan = RecurrentPlan((match("a", 7), match("b", 8, "float64")))
    assert tuning.with_kernels(plan, CPU, tfmem.Options()) == plan
    assert not made


def test_what_has_no_kernel_stays_with_the_reason(made: list[RecurrentSpec]) -> None:
    matches = (match("a", 8), match("b", 7), match("c", 9, "float64"), match("d", 8))
    plan = tuning.with_kernels(RecurrentPlan(matches), GPU, OPTIONS)
    assert [each.name for each in plan.matches] == ["a", "d"]
    assert [each.name for each in plan.unmatched] == ["b", "c"]
    assert plan.unmatched[0].reason == Reason.NO_KERNEL(detail="seven is not a lucky number")
    assert "float64" in str(plan.unmatched[1].reason)
    assert {name: kernels.programs for name, kernels in plan.kernels.items()} == {
        "a/launch": (program_of(8),),
        "d/launch": (program_of(8),),
    }
    assert [spec.units for spec in made] == [8]  # equal ones once


def test_a_batch_that_is_known_is_the_one_to_choose_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def kernels(spec: RecurrentSpec, folder: Path, batches: Any, options: Any, ordinal: int) -> Kernels:
        asked.append((spec.units, batches))
        return Kernels((program_of(0),), options.time_steps, ((1, 0.1),))

    monkeypatch.setattr(tuning, "tuned_kernels", kernels)
    matches = (match("a", 8), match("b", 8, batch=20), match("c", 8, batch=20), match("d", 8, batch=0))
    plan = tuning.with_kernels(RecurrentPlan(matches), GPU, OPTIONS)
    assert len(plan.kernels) == 4
    assert asked == [(8, OPTIONS.recurrent.batches), (8, (20,))]


@pytest.mark.parametrize("allowed", ["highest", "tf32"])
@pytest.mark.parametrize("asked", ["auto", "highest", "tf32", "bfloat16"])
def test_precision_is_tensorflows_unless_asked_for(
    allowed: Any, asked: Any, made: list[RecurrentSpec], tmp_path: Path
) -> None:
    recurrent = dataclasses.replace(OPTIONS.recurrent, precision=asked)
    options = dataclasses.replace(OPTIONS, recurrent=recurrent, cache_directory=str(tmp_path))
    target = dataclasses.replace(GPU, precision=allowed)
    plan = tuning.with_kernels(RecurrentPlan((match("a", 8),)), target, options)
    expected = allowed if asked == "auto" else asked
    assert [spec.precision for spec in made] == [expected]
    assert plan.precision == expected
    (launch,) = plan.matches[0].launches
    node = launch.node(plan.precision, plan.kernels[launch.name].programs)
    assert node.attrs["precision"] == expected
    assert node.attrs["programs"] == (program_of(8).to_text(),)
    assert node.attrs["images"] == (Code(b"8"),)


def test_the_report_says_precision_and_times(made: list[RecurrentSpec]) -> None:
    target = dataclasses.replace(GPU, precision="tf32")
    found = match("a", 8)
    plan = tuning.with_kernels(RecurrentPlan((found,)), target, OPTIONS)
    assert plan.summary(found).endswith(
        "float32; precision tf32; 100 steps in 0.043 ms at batch 1, 0.500 ms at batch 64"
    )
    assert "precision" not in RecurrentPlan((found,)).summary(found)  # a CPU has one


@pytest.mark.parametrize(
    "wrong", [{"precision": "fp8"}, {"candidates": 0}, {"time_steps": 0}, {"batches": ()}, {"batches": (0, 1)}]
)
def test_bad_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(tfmem.OptionsError, match=next(iter(wrong))):
        tfmem.RecurrentOptions(**wrong)


def test_what_steps_draw_has_a_program_for_each_gpu_of_the_kernels(
    made: list[RecurrentSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for keys and truncated normals."""
    monkeypatch.setattr(draws, "code_of", lambda source, *_, **__: source.encode())
    ops = {"StatelessRandomUniformV2": "float32", "StatelessRandomGetKeyCounter": "uint64"}
    ops["StatelessTruncatedNormalV2"] = "float32"
    drawing = [NewNode(op, "TfmemStepDraws", (), {"op": op, "Tout": (DataType(dtype),)}) for op, dtype in ops.items()]
    found = match("a", 8)
    found = dataclasses.replace(found, nodes=(*drawing, *found.nodes))
    (planned,) = tuning.with_kernels(RecurrentPlan((found,)), GPU, OPTIONS).matches
    uniform, *others = (node for node in planned.nodes if isinstance(node, NewNode))
    (program,), (code,) = uniform.attrs["programs"], uniform.attrs["images"]
    assert "arch 90" in program
    assert b"Uniform<float>" in code.data
    assert others == drawing[1:]
