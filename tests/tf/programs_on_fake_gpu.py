"""Programs of a TfmemFusion on a GPU: which of them runs, what is wrong with others. Run by test_fusion_gpu.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.text import from_text
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Call, Kernel, Region
from tests.tf.fake_gpu import FakeGpu
from tests.tf.fusion_calls import DOUBLED, call, floats, stitched

pytest_plugins = ("tests.tf.fake_gpu",)


def test_the_first_programs_that_load_run(gpu: FakeGpu) -> None:
    """An exported region has programs for several GPUs, in this order; the fake one has compute capability 9.0."""
    region = Region(1, (), (floats(None, 3),) * 2, (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    (made,) = gpu.programs(region)
    x = np.ones((2, 3), np.float32)

    def program(kind: str, arch: int) -> FusionProgram:
        return replace(made, image=replace(made.image, kind=kind, arch=arch))

    older, own, newer, portable = (
        program(*each) for each in (("cubin", 80), ("cubin", 90), ("cubin", 100), ("ptx", 80))
    )
    for programs in ((older, own, portable), (older, newer, portable)):
        np.testing.assert_array_equal(stitched(gpu, region, made=programs)(x)[0], 2 * x)


def test_many_variables_that_one_kernel_updates(gpu: FakeGpu) -> None:
    """Each of the tensors may share its memory with each output: 6,400 pairs in one line of its description."""
    count = 80
    text = ["program 1", "axes 0", *["tensor float32 1"] * count]
    text += [line for at in range(count) for line in (f"input {at} a0", f"add {2 * at} {2 * at}")]
    text += [f"output {2 * at + 1} 0" for at in range(count)]
    values = (floats(None),) * (2 * count)
    step = Kernel(from_text("\n".join(text) + "\n"), tuple(range(count)), tuple(range(count, 2 * count)))
    region = Region(count, (), values, (step,), tuple(range(count, 2 * count)))
    (made,) = gpu.programs(region)
    assert dict(made.description)["in_place"].count(":") == 1
    args = [np.full(3, at, np.float32) for at in range(count)]
    for at, found in enumerate(stitched(gpu, region, made=(made,))(*args)):
        np.testing.assert_array_equal(found, 2 * args[at])


def test_programs_that_do_not_fit(gpu: FakeGpu) -> None:
    region = Region(1, (), (floats(None, 3),) * 2, (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    (made,) = gpu.programs(region)
    x = np.ones((2, 3), np.float32)
    two = replace(region, values=(floats(None, 3),) * 3, steps=(*region.steps, Kernel(from_text(DOUBLED), (1,), (2,))))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has 1 programs for a GPU, expected 2: run tfmem"):
        stitched(gpu, two, made=(made,))(x)
    for key, text in (
        ("words", "tensor:1"),
        ("words", "buffer:0"),
        ("words", "barrier"),
        ("words", "extent:0:0:9"),
        ("pieces", ""),
        ("pieces", "0/0/1/2*ctas:0"),
        ("pieces", "0/-1/1"),
        ("buffers", "4*ctas:7"),
        ("in_place", "0:1"),
        ("in_place", "0,0:0"),
        ("in_place", "0"),
        ("spans", "1*x"),
        ("wide", "2"),
    ):
        wrong = tuple((name, text if name == key else value) for name, value in made.description)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"attr programs: .*{key}"):
            stitched(gpu, region, made=[replace(made, description=wrong)])(x)


def test_calls_that_no_gpu_makes(gpu: FakeGpu) -> None:
    step = Call("Tanh", call("Tanh", (0,), (1,), T=tf.float32).attrs, (0,), (1,))
    with pytest.raises(
        tf.errors.UnimplementedError, match="a region on a GPU calls products, convolutions and pooling alone"
    ):
        stitched(gpu, Region(1, (), (floats(3),) * 2, (step,), (1,)))(np.ones(3, np.float32))
