"""Steps planned as for a GPU, which is the fake one. A plugin of the tests of such steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Region
from graph_passes.analysis.cost.device_costs import kernel_device, load
from graph_passes.analysis.cost.kernel_costs import Beside, KernelDevice
from graph_passes.analysis.device_support import CUDA
from graph_passes.graph import serde
from graph_passes.passes.fuse.partition.partition import ON_GPU
from graph_passes.passes.fuse.partition.score import Measure
from graph_passes.passes.fuse.plan import Needs
from tests.tf.fake_gpu import FakeGpu
from tfmem.capture.captured import every_node, op_name
from tfmem.kernels.fusion_needs import HOME
from tfmem.steps import after_grappler

CPU = kernel_device(load("cpu"), "cpu")

Programs = Callable[[Region, str], Sequence[FusionProgram]]


@pytest.fixture(name="on_gpu")
def fixture_on_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans for the fake GPU, which TensorFlow calls a CPU; with other programs, if they are given, and products that
    are timed, if they are to be; `beside` is what products take."""

    def plan(
        programs: Programs | None = None,
        device: KernelDevice = CPU,
        measure: Measure | None = None,
        timed: bool = False,
        beside: Beside | None = None,
    ) -> None:
        def needs(feeds: Any, target: Any, options: Any, roots: Any = None, **other: Any) -> Needs:
            made = programs or (lambda region, place: gpu.programs(region))
            measured = (lambda graph, shapes, keep: measure) if measure else None
            fed = tuple(map(op_name, feeds))
            return Needs(device, HOME, serde.attributes, ON_GPU, fed, roots, CUDA, made, measured, timed, beside)

        monkeypatch.setattr(after_grappler, "fusion_needs", needs)

    return plan


def saved_stitched(model: tf.Module, folder: Path) -> str:
    """Where a model is saved, stitched."""
    tf.saved_model.save(model, str(folder / "given"))
    tfmem.optimize(
        str(folder / "given"),
        output=str(folder / "stitched"),
        passes=("fusion",),
        fusion=tfmem.FusionOptions(tune="off"),
        cache_directory="",
    )
    return str(folder / "stitched")


def served_without_a_gpu(path: str, x: Any) -> Any:
    tfmem.load_ops()
    served = tf.saved_model.load(path).signatures["serving_default"]
    assert "TfmemFusion" in {node.op for node in every_node(served.graph.as_graph_def())}
    return next(iter(served(tf.constant(x)).values())).numpy()
