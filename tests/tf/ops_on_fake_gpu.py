"""TfmemFusion as it runs on a GPU, on the fake driver; run by test_fusion_gpu.py in a separate process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.programs import FusionProgram, Shapes
from custom_ops.fusion.region import Assign, Kernel, Read, Region, Shape, TensorType, View
from custom_ops.load import load
from tests.fusion_kernels import varied
from tests.fusion_regions import SOFTMAX, softmax_step
from tests.tf.fake_gpu import OUT_OF_MEMORY, FakeGpu
from tests.tf.fusion_calls import DOUBLED, call, floats, product, stitched
from tests.tf.test_fusion_op import data, plain_step, variables
from tfmem import measure
from tfmem.devices import find_target

pytest_plugins = ("tests.tf.fake_gpu",)

FEATURES = 12
# What a step of softmax regression calls, in some run of it; those of the first run come first.
ONCE = (
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddChildGraphNode",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cublasLtMatmul",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
)


def softmax(gpu: FakeGpu, w: Any, b: Any, rows: int | None = None, features: int = 784) -> Callable[..., Any]:
    """A step of softmax regression."""
    return stitched(gpu, softmax_step(product, rows, features), [w.handle, b.handle])


def small() -> tuple[Any, Any]:
    return variables(FEATURES)


@pytest.mark.parametrize("rows", [20, None])
def test_softmax_regression_learns_as_in_tensorflow(gpu: FakeGpu, rows: int | None) -> None:
    """At two shapes in turn, where sizes are open: a graph is made for each, and launched again."""
    w, b = variables()
    plain_w, plain_b = variables()
    step, plain = softmax(gpu, w, b, rows), tf.function(plain_step)
    before = gpu.calls("cuGraphInstantiateWithFlags")
    for place in range(6):
        x, y = data(rows or (20, 33)[place % 2])
        np.testing.assert_allclose(step(x, y)[0], plain(x, y, plain_w, plain_b), rtol=2e-6)
    np.testing.assert_allclose(w, plain_w, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(b, plain_b, rtol=1e-5, atol=1e-7)
    assert gpu.calls("cuGraphInstantiateWithFlags") == before + (1 if rows else 2)


def test_what_moved_is_found_again(gpu: FakeGpu) -> None:
    """Variables that were assigned or are held by others, inputs elsewhere: nodes are set, products captured again."""
    w, b = small()
    plain_w, plain_b = small()
    step, plain = softmax(gpu, w, b, 20, FEATURES), tf.function(plain_step)
    names = ("cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphExecChildGraphNodeSetParams")
    before = [gpu.calls(name) for name in names]
    held = []
    for place in range(6):
        x, y = (tf.constant(array) for array in data(20, FEATURES))
        if place == 2:
            w.assign(w * 2)
            plain_w.assign(plain_w * 2)
        if place % 2:
            held.append((w.read_value(), w.numpy(), x, y))  # who reads keeps what was there
        np.testing.assert_allclose(step(x, y)[0], plain(x, y, plain_w, plain_b), rtol=2e-6)
        held.append((x, x.numpy(), x, y))
    for tensor, array, *_ in held:
        np.testing.assert_array_equal(tensor, array)
    np.testing.assert_allclose(w, plain_w, rtol=1e-5, atol=1e-7)
    made, kernels, products = (gpu.calls(name) - known for name, known in zip(names, before, strict=True))
    assert made == 1
    assert kernels > 0
    assert products > 0


def test_each_failure_is_one_error_and_changes_nothing(gpu: FakeGpu) -> None:
    x, y = data(20, FEATURES)
    for code, error in ((OUT_OF_MEMORY, tf.errors.ResourceExhaustedError), (999, tf.errors.InternalError)):
        for function in ONCE:
            w, b = small()
            step = softmax(gpu, w, b, 20, FEATURES)
            given = 3 if code == OUT_OF_MEMORY and function.startswith("cublas") else code
            called = gpu.calls(function)
            gpu.fail(function, code=given)
            if gpu.calls(function) == called and function.startswith("cuModule"):
                gpu.fail(function, times=0)
                continue  # the code is known to this process
            with pytest.raises(error, match=function.removesuffix("_v2")) as caught:
                step(x, y)
            assert caught.value.message.count("failed") == 1, caught.value.message
            np.testing.assert_array_equal(w, np.zeros((FEATURES, 10)))
            plain_w, plain_b = small()
            np.testing.assert_allclose(step(x, y)[0], plain_step(x, y, plain_w, plain_b), rtol=2e-6)
            np.testing.assert_allclose(w, plain_w, rtol=1e-5, atol=1e-7)
            w.assign(w * 2)  # it moved
            plain_w.assign(plain_w * 2)
            np.testing.assert_allclose(step(x, y)[0], plain_step(x, y, plain_w, plain_b), rtol=2e-6)


@pytest.mark.parametrize("function", ["cuGraphExecKernelNodeSetParams_v2", "cuGraphExecChildGraphNodeSetParams"])
def test_a_graph_that_cannot_be_changed_is_made_anew(gpu: FakeGpu, function: str) -> None:
    w, b = small()
    plain_w, plain_b = small()
    step, (x, y) = softmax(gpu, w, b, 20, FEATURES), data(20, FEATURES)
    before, called = gpu.calls("cuGraphInstantiateWithFlags"), gpu.calls(function)
    held = []  # until the end, so that the weights' memory is another one at each step
    for place in range(4):
        if place == 2:
            gpu.fail(function)
        w.assign(w + 1)
        plain_w.assign(plain_w + 1)
        held.append(w.read_value())
        np.testing.assert_allclose(step(x, y)[0], plain_step(x, y, plain_w, plain_b), rtol=1e-5)
    assert gpu.calls(function) > called
    assert gpu.calls("cuGraphInstantiateWithFlags") == before + 2


def test_two_threads(gpu: FakeGpu) -> None:
    """One op, one graph for both, and updates that do not get lost."""
    w, b = small()
    plain_w, plain_b = small()
    region = Region(1, (), (floats(None, FEATURES),) * 2, (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    step, double = softmax(gpu, w, b, 20, FEATURES), stitched(gpu, region)
    zeros = np.zeros((20, FEATURES), np.float32), np.eye(10, dtype=np.float32)[[0] * 20]
    step(*zeros)
    plain_step(*zeros, plain_w, plain_b)
    failed: list[object] = []

    def work(number: int) -> None:
        try:
            for place in range(15):
                x = np.full((1 + (place + number) % 3, FEATURES), place + number, np.float32)
                np.testing.assert_array_equal(double(tf.constant(x))[0], 2 * x)
                step(*zeros)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(30):
        plain_step(*zeros, plain_w, plain_b)
    assert not failed
    np.testing.assert_allclose(b, plain_b, rtol=1e-4)


def test_graphs_are_kept_for_the_last_shapes(gpu: FakeGpu) -> None:
    region = Region(1, (), (floats(None, 3),) * 2, (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    double, before = stitched(gpu, region), gpu.alive()
    for rows in range(1, 25):
        x = np.ones((rows, 3), np.float32)
        np.testing.assert_array_equal(double(tf.constant(x))[0], 2 * x)
    assert gpu.alive()[1] - before[1] == 1 + 16  # the first shape was traced by itself


def test_what_goes_gives_back(gpu: FakeGpu) -> None:
    gc.collect()
    before, made = gpu.alive(), gpu.calls("cuGraphInstantiateWithFlags")
    w, b = small()
    step = softmax(gpu, w, b, 20, FEATURES)
    step(*data(20, FEATURES))
    assert gpu.calls("cuGraphInstantiateWithFlags") == made + 1
    del step
    gc.collect()
    for _ in range(100):  # TensorFlow's threads may hold a kernel a little longer
        left = [now for now, known in zip(gpu.alive(), before, strict=True) if now > known]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_empty_tensors(gpu: FakeGpu) -> None:
    w, b = small()
    plain_w, plain_b = small()
    w.assign_add(tf.ones_like(w))
    plain_w.assign_add(tf.ones_like(w))
    step = softmax(gpu, w, b, None, FEATURES)
    x, y = np.zeros((0, FEATURES), np.float32), np.zeros((0, 10), np.float32)
    np.testing.assert_array_equal(step(x, y)[0], plain_step(x, y, plain_w, plain_b))  # the mean of nothing
    np.testing.assert_array_equal(w, plain_w)  # products of no depth are zero
    x, y = data(20, FEATURES)
    step(x, y)


def barriers(gpu: FakeGpu, shape: Shape) -> tuple[Region, list[FusionProgram]]:
    """A region of kernels whose CTAs wait for each other."""
    program = from_text(SOFTMAX)
    shapes: Shapes = ((37, 10), (10,), (37, 10))

    def choose(pattern: Pattern, known: Shapes) -> PatternConfiguration:
        found = [kernel for kernel in varied(pattern, shapes) if kernel.plan.cooperative]
        assert found
        return found[0].plan.configuration

    rows, *_ = shape
    values = (floats(rows, 10), floats(10), floats(rows, 10), *[floats(), floats(rows, 10), floats(10)] * 2)
    steps = (Kernel(program, (0, 1, 2), (3, 4, 5)), Kernel(program, (4, 5, 2), (6, 7, 8)))
    region = Region(3, (), values, steps, (3, 6, 7, 8))
    return region, gpu.programs(region, choose)


def test_kernels_whose_ctas_wait_for_each_other(gpu: FakeGpu) -> None:
    from tests import fusion_reference as reference

    region, made = barriers(gpu, (None,))
    assert all(program.image.cooperative for program in made)
    step, before = stitched(gpu, region, made=made), gpu.calls("cuGraphAddMemsetNode")
    for rows in (37, 5, 37):
        x, y = data(rows, 10)
        bias = np.arange(10, dtype=np.float32)
        found = step(x, bias, y)
        expected = reference.run(region, [x, bias, y], [], reference.product)  # type: ignore[arg-type]
        for result, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)
    assert gpu.calls("cuGraphAddMemsetNode") == before + 2
    assert gpu.calls("cuGraphKernelNodeSetAttribute") > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4, 5), (3, 5, 2)),
        ((3, 4, 5), (1, 5, 2)),
        ((4, 5), (3, 5, 2)),
        ((2, 1, 4, 5), (3, 5, 2)),
        ((2, 3, 4, 5), (2, 1, 5, 2)),
        ((3, 4, 0), (3, 0, 2)),
        ((0, 4, 5), (5, 2)),
    ],
)
def test_batches_of_products(gpu: FakeGpu, dtype: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for adj_x in (False, True):
        for adj_y in (False, True):
            a = rng.normal(size=(*left[:-2], *left[:-3:-1]) if adj_x else left).astype(dtype)
            b = rng.normal(size=(*right[:-2], *right[:-3:-1]) if adj_y else right).astype(dtype)
            expected = tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=adj_x, adj_y=adj_y)
            values = [TensorType(dtype, found.shape) for found in (a, b)] + [TensorType(dtype, tuple(expected.shape))]
            step = call("BatchMatMulV2", (0, 1), (2,), T=tf.as_dtype(dtype), adj_x=adj_x, adj_y=adj_y)
            found = stitched(gpu, Region(2, (), tuple(values), (step,), (2,)))(a, b)[0]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [["BiasAdd"], ["BiasAdd", "Relu"]])
def test_a_product_with_what_is_fused_into_it(gpu: FakeGpu, fused: list[str]) -> None:
    rng = np.random.default_rng(0)
    a, b, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((7, 5), (5, 3), (3,)))
    values = tuple(floats(*shape) for shape in ((7, 5), (5, 3), (3,), (7, 3)))
    step = call("_FusedMatMul", (0, 1, 2), (3,), T=tf.float32, num_args=1, fused_ops=fused)
    found = stitched(gpu, Region(3, (), values, (step,), (3,)))(a, b, bias)[0]
    expected = a @ b + bias
    np.testing.assert_allclose(found, np.maximum(expected, 0) if "Relu" in fused else expected, rtol=1e-5)


def test_views_and_what_is_handed_on(gpu: FakeGpu) -> None:
    """An input that is an output, a view of one, a view of what is computed, a variable as it is."""
    v = tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
    double = Kernel(from_text(DOUBLED), (1,), (2,))
    values = tuple(floats(*shape) for shape in ((6,), (2, 3), (2, 3), (3, 2), (2, 3)))
    steps = (View(0, 1), double, View(2, 3), Read(0, 4))
    region = Region(1, (floats(2, 3),), values, steps, (0, 1, 2, 3, 4))
    x = np.arange(6, dtype=np.float32) + 10
    found = stitched(gpu, region, [v.handle])(x)
    expected = x, x.reshape(2, 3), 2 * x.reshape(2, 3), 2 * x.reshape(3, 2), v.numpy()
    for result, exact in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize("scattered", [False, True])
def test_variables_are_what_steps_make_of_them(gpu: FakeGpu, scattered: bool) -> None:
    """Assigned twice, read in between, handed on, and assigned what was given; shared or not."""
    double = from_text(DOUBLED)
    values = (floats(2, 3),) * 5
    steps = (
        Read(0, 1),
        Kernel(double, (1,), (2,)),
        Assign(0, 2),
        Read(0, 3),
        Kernel(double, (3,), (4,)),
        Assign(0, 4),
        Assign(1, 0),
    )
    region = Region(1, (floats(2, 3),) * 2, values, steps, (3, 0))
    v, w = tf.Variable(np.ones((2, 3), np.float32)), tf.Variable(np.zeros((2, 3), np.float32))
    if scattered:  # from now on nothing else shares its memory
        for variable in (v, w):
            tf.raw_ops.ResourceScatterAdd(resource=variable.handle, indices=[0], updates=np.ones((1, 3), np.float32))
    step, x = stitched(gpu, region, [v.handle, w.handle]), tf.constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    held: list[tuple[Any, Any]] = []
    for _ in range(3):
        before = v.numpy()
        found, given = step(x)
        held += [(found, 2 * before), (given, x.numpy()), (v.read_value(), 4 * before)]
        np.testing.assert_array_equal(w, x)
        if scattered:
            tf.raw_ops.ResourceScatterAdd(resource=w.handle, indices=[0], updates=np.ones((1, 3), np.float32))
        for tensor, expected in held:
            np.testing.assert_array_equal(tensor, expected)


def test_without_memory_nothing_happens(gpu: FakeGpu) -> None:
    """The update comes first, and what cannot be held after it."""
    v = tf.Variable(np.ones((2, 3), np.float32))
    large = 1 << 23
    values = (floats(None, 1), floats(2, 3), floats(2, 3), floats(None, None))
    steps = (
        Read(0, 1),
        Kernel(from_text(DOUBLED), (1,), (2,)),
        Assign(0, 2),
        call("MatMul", (0, 0), (3,), T=tf.float32, transpose_a=False, transpose_b=True),
    )
    step = stitched(gpu, Region(1, (floats(2, 3),), values, steps, (3,)), [v.handle])
    launched = gpu.calls("cuGraphLaunch")
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        step(tf.zeros((large, 1)))
    np.testing.assert_array_equal(v, np.ones((2, 3)))
    assert gpu.calls("cuGraphLaunch") == launched
    np.testing.assert_array_equal(step(tf.ones((2, 1)))[0], np.ones((2, 2)))
    np.testing.assert_array_equal(v, np.full((2, 3), 2.0))


def test_regions_are_measured_by_kernels_of_the_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "CHAIN", 2)
    monkeypatch.setattr(measure, "KERNELS", 3)
    added = gpu.calls("cuGraphAddKernelNode_v2")
    found = measure.regions(find_target("/device:CPU:0", load()), 1e-5, lambda region, place: gpu.programs(region))
    assert gpu.calls("cuGraphAddKernelNode_v2") == added + 2 * (1 + 3)  # of two regions of one kernel and two of three
    assert found["dispatch"] == 1e-5
