"""TfmemRecurrent on a GPU: the op around the kernels. Needs a GPU and NVRTC; the kernels have separate tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.load import Library, load
from custom_ops.recurrent import cells, reference
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram, build
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.gpu_neighbour import WHOLE_PROCESSOR, Neighbour
from tests.gradient_reference import gradients
from tests.recurrent_cells import Arguments, arguments
from tests.tf.recurrent_calls import recurrent

UNITS, TIME, BATCH = 40, 12, 5
CONFIGURATIONS = {
    "single": Configuration(rows=2, lanes=8),
    "cluster": Configuration(rows=2, lanes=8, ctas=8, exchange="cluster"),
    "grid": Configuration(rows=2, lanes=32, ctas=24, exchange="grid"),
    "launches": Configuration(rows=2, lanes=32, ctas=10, exchange="launches"),
}


@pytest.fixture(name="library", scope="module")
def fixture_library() -> Library:
    return load()


@pytest.fixture(name="arch", scope="module")
def fixture_arch() -> int:
    try:
        return DeviceContext().arch
    except KernelError as error:
        pytest.skip(str(error))


def program(
    cell: Cell, arch: int, kind: str = "single", directions: int = 1, max_batch: int = ANY_BATCH
) -> RecurrentProgram:
    spec = RecurrentSpec(cell, UNITS, directions=directions)
    return build(spec, CONFIGURATIONS[kind], arch, max_batch=max_batch)


def tensors(given: Arguments, dtype: tf.DType = tf.float32) -> list[list[tf.Tensor]]:
    return [[tf.cast(array, dtype) for array in kind] for kind in given]


def check(found: Any, expected: Any, bound: float = 1e-5) -> None:
    for tensor, array in zip(found, expected, strict=True):
        error = np.linalg.norm(tensor.numpy() - array) / max(np.linalg.norm(array), 1e-30)
        assert error < bound, error


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_values_on_the_gpu(library: Library, arch: int, kind: str) -> None:
    cell = cells.lstm()
    given = arguments(cell, UNITS, TIME, BATCH)
    with tf.device("GPU:0"):
        outputs, finals = recurrent(
            library.ops, cell, UNITS, *tensors(given), reverse=[True], programs=[program(cell, arch, kind)]
        )
    assert "GPU" in outputs[0].device
    expected, ends = reference.run(cell, UNITS, *given, reverse=True)
    check([*outputs, *finals], [*expected, *ends])


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_beside_a_stream_that_is_not_tensorflows(library: Library, arch: int, kind: str) -> None:
    """It takes all processors, again and again."""
    cell = cells.lstm()
    given = tensors(arguments(cell, UNITS, TIME, BATCH))
    programs = [program(cell, arch, kind)]

    def outputs() -> tf.Tensor:
        return recurrent(library.ops, cell, UNITS, *given, programs=programs)[0][0]

    with DeviceContext() as device, tf.device("GPU:0"):
        alone = outputs().numpy()
        with Neighbour(device) as neighbour:
            neighbour.enqueue(device.processors, WHOLE_PROCESSOR, microseconds=100, launches=1000)
            beside = [outputs() for _ in range(50)]
            assert neighbour.busy
            for found in beside:
                np.testing.assert_array_equal(found.numpy(), alone)


@pytest.mark.parametrize(("time", "batch"), [(0, 3), (3, 0)])
def test_nothing_to_do_on_the_gpu(library: Library, arch: int, time: int, batch: int) -> None:
    cell = cells.gru()
    given = arguments(cell, UNITS, time, batch)
    with tf.device("GPU:0"):
        _, finals = recurrent(library.ops, cell, UNITS, *tensors(given), programs=[program(cell, arch)])
    check(finals, given.states, 1e-7)


@pytest.mark.usefixtures("float32_products")
def test_gradients_of_a_sweep_on_the_gpu(library: Library, arch: int) -> None:
    """The backward sweep is on the CPU. The weights' are TensorFlow's own products, which may run in TF32 otherwise."""
    cell = cells.lstm()
    gradient = differentiate(cell)
    parts = [arguments(cell, UNITS, TIME, BATCH, seed) for seed in range(2)]
    watched = [[*a, *b] for a, b in zip(*map(tensors, parts), strict=True)]
    with tf.device("GPU:0"), tf.GradientTape() as tape:
        tape.watch(watched)
        outputs, _ = recurrent(
            library.ops,
            cell,
            UNITS,
            *watched,
            reverse=[False, True],
            programs=[program(gradient.forward, arch, directions=2)],
            training=True,
        )
        loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
    found = tape.gradient(loss, watched)
    for direction, part in enumerate(parts):
        output = reference.run(cell, UNITS, *part, reverse=bool(direction))[0][0]
        zeros = [np.zeros_like(state) for state in part.states]
        expected = gradients(gradient, UNITS, *part, [2 * output], zeros, reverse=bool(direction))
        for kind, wanted in zip(found, expected, strict=True):
            check(kind[direction * len(wanted) :][: len(wanted)], wanted)


def on_the_cpu(library: Library, cell: Cell, given: Any, programs: Sequence[RecurrentProgram], capfd: Any) -> str:
    """What is said where no program runs, after the CPU has computed it."""
    capfd.readouterr()
    with tf.device("GPU:0"):
        outputs, finals = recurrent(library.ops, cell, UNITS, *tensors(given), programs=programs)
    expected, ends = reference.run(cell, UNITS, *given)
    check([*outputs, *finals], [*expected, *ends])
    return str(capfd.readouterr().err)


def test_the_batch_chooses_and_what_does_not_load_is_passed_over(
    library: Library, arch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = cells.simple_rnn()
    good = program(cell, arch, max_batch=4)
    foreign = replace(good, image=replace(good.image, arch=arch + 5))
    for programs in ([foreign, good], [good, foreign]):
        given = arguments(cell, UNITS, TIME, BATCH)
        with tf.device("GPU:0"):
            outputs, _ = recurrent(library.ops, cell, UNITS, *tensors(given), programs=programs)
        check(outputs, reference.run(cell, UNITS, *given)[0])
    assert f"it is for compute capability {(arch + 5) / 10}" in on_the_cpu(library, cell, given, [foreign], capfd)


def test_weights_of_another_shape_are_refused(library: Library, arch: int) -> None:
    cell = cells.simple_rnn()
    given = arguments(cell, UNITS, TIME, BATCH)
    given = given._replace(matrices=[matrix[:, 1:] for matrix in given.matrices])
    message = r"matrices\[0\] of .* has shape \[40,39\]; expected \[40,40\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message), tf.device("GPU:0"):
        recurrent(library.ops, cell, UNITS, *tensors(given), programs=[program(cell, arch)])


def test_without_programs_the_cpu_computes_and_a_line_says_what_to_do(
    library: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = cells.simple_rnn()
    said = on_the_cpu(library, cell, arguments(cell, UNITS, TIME, BATCH), (), capfd)
    assert "has no program that runs on" in said
    assert "run tfmem.optimize" in said


def standing_in(cell: Cell, arch: int) -> RecurrentProgram:
    """What `tune` puts in front of kernels that exchange through a grid."""
    return program(cell, arch, "launches", max_batch=0)


def test_where_a_group_does_not_fit_a_launch_for_each_stage_stands_in(
    library: Library, arch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = addons_cells.layer_norm_lstm(UNITS)
    given = arguments(cell, UNITS, TIME, BATCH)
    large = replace(program(cell, arch, "grid"), ctas=1000)
    programs = [standing_in(cell, arch), large]
    with tf.device("GPU:0"):
        outputs, finals = recurrent(library.ops, cell, UNITS, *tensors(given), programs=programs)
    expected, ends = reference.run(cell, UNITS, *given)
    check([*outputs, *finals], [*expected, *ends])
    assert "a group of 1000 CTAs does not fit" in on_the_cpu(library, cell, given, [large], capfd)


@pytest.mark.parametrize("stands_in", [True, False], ids=["a launch for each stage", "the fallback"])
def test_blocks_that_wait_in_vain_are_replaced(
    library: Library, arch: int, stands_in: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of this program's blocks are never launched. The others give up, the fallback computes that call, and
    what stands in the calls from then on: in another order, so that the last bits tell which of the two it was."""
    cell = cells.lstm()
    given = arguments(cell, UNITS, TIME, BATCH)
    half = replace(program(cell, arch, "grid"), ctas=12)
    programs = [*([standing_in(cell, arch)] if stands_in else []), half]

    @tf.function  # one op for all calls, of what is not known before, or TensorFlow would run it on the CPU
    def outputs(*kinds: list[tf.Tensor]) -> tf.Tensor:
        return recurrent(library.ops, cell, UNITS, *kinds, programs=programs)[0][0]

    with tf.device("GPU:0"):
        kinds = tensors(given)
        alone = recurrent(library.ops, cell, UNITS, *kinds, programs=[standing_in(cell, arch)])[0][0]
        fallback = outputs(*kinds).numpy()
        later = [outputs(*kinds).numpy() for _ in range(3)]
    for found in (alone, fallback, *later):
        check([tf.constant(found)], reference.run(cell, UNITS, *given)[0])
    assert np.any(alone.numpy() != fallback)
    np.testing.assert_array_equal(later[-1], alone.numpy() if stands_in else fallback)
    assert capfd.readouterr().err.count("waited for each other too long") == 1
