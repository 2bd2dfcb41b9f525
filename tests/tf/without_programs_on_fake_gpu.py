"""Ops on a GPU that none of their programs fits: the CPU computes the results. Run by test_without_programs.py.

The fake GPU has compute capability 9.0. What is exported here is for 10.0."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

from custom_ops.dynamic.op import forward_backward, step
from custom_ops.expr.text import from_text
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Assign, Kernel, Read, Region
from custom_ops.jit.image import KernelImage
from custom_ops.load import load
from custom_ops.recurrent.cells import gru, lstm
from custom_ops.recurrent.gpu_program import RecurrentProgram
from tests.fusion_regions import softmax_step
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tests.tf.fake_gpu import OUT_OF_MEMORY, UNKNOWN, FakeGpu
from tests.tf.fusion_calls import DOUBLED, call, floats, product, stitched
from tests.tf.memory_in_use import in_use
from tests.tf.python_server import run_python
from tests.tf.recurrent_calls import recurrent
from tests.tf.recurrent_tensors import in_dtype, tensors_of
from tests.tf.test_fusion_op import data, plain_step, variables

pytest_plugins = ("tests.tf.fake_gpu",)

FEATURES, UNITS, STEPS = 12, 8, 5
OTHER = KernelImage(100, "main", 256, b"for compute capability 10.0")
OPS = ("TfmemRecurrent", "TfmemFusion", "TfmemMatMul", "TfmemDynamic", "TfmemDynamicStep")
LAUNCHES = ("cuLaunchKernelEx", "cuGraphLaunch")


@pytest.fixture(name="warned")
def fixture_warned(capfd: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What was said since the last call about ops without programs."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if "has no program that runs on" in line]


@pytest.fixture(autouse=True)
def fixture_nothing_is_launched(gpu: FakeGpu) -> Any:
    before = [gpu.calls(name) for name in LAUNCHES]
    yield
    assert [gpu.calls(name) for name in LAUNCHES] == before


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the plain kernels of the CPU."""

    def labelled(*args: Any) -> Any:
        with tf.compat.v1.get_default_graph()._kernel_label_map(dict.fromkeys(OPS, "tfmem_host")):
            return function(*args)

    return tf.function(labelled, autograph=False)


def flat(results: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(results, expand_composites=True)


def for_another_gpu(programs: list[FusionProgram]) -> list[FusionProgram]:
    return [replace(program, image=replace(program.image, arch=100)) for program in programs]


def exported(module: tf.Module, path: Path, signature: Any, passes: tuple[str, ...]) -> tuple[Any, Any]:
    """What is loaded of a SavedModel, and of the one that tfmem made of it for a GPU that is not here."""
    pytest.importorskip("cuda.bindings")
    tf.saved_model.save(module, str(path / "plain"), signatures={"run": signature})
    given = ["--passes", *passes, "--architectures", "sm_100", "--output", str(path / "fast")]
    # in another process: NVRTC does not start beside the fake driver
    done = run_python(["-m", "tfmem", "optimize", str(path / "plain"), *given])
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(tf.saved_model.load(str(path / each)).signatures["run"] for each in ("plain", "fast"))


def assert_one_warning(found: list[str], op: str) -> None:
    (warning,) = found
    for words in (op, "device:CPU:0", "capability 10.0", "this GPU has 9.0", "run tfmem.optimize", "architectures"):
        assert words in warning


def ops_of(signature: Any) -> list[str]:
    library = signature.graph.as_graph_def().library
    return [node.op for function in library.function for node in function.node_def]


def test_an_exported_lstm(warned: Callable[[], list[str]], tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    module = tf.Module()
    module.layer = keras.layers.LSTM(UNITS, return_sequences=True)
    module.run = tf.function(module.layer, input_signature=[tf.TensorSpec((None, STEPS, FEATURES))])
    plain, fast = exported(module, tmp_path, module.run, ("recurrent",))
    assert ops_of(fast).count("TfmemRecurrent") == 1
    warned()
    for batch in (3, 1, 0):
        x = tf.random.stateless_normal([batch, STEPS, FEATURES], [1, batch])
        (expected,), (found,) = plain(x).values(), fast(x).values()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert_one_warning(warned(), "TfmemRecurrent")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("passes", [("recurrent", "fusion"), ("recurrent",), ("fusion",)])
def test_an_exported_training_step(passes: tuple[str, ...], warned: Callable[[], list[str]], tmp_path: Path) -> None:
    """The ops of the gradient have programs as well; weights are read and assigned."""
    keras.utils.set_random_seed(0)
    module = tf.Module()
    layers = [keras.layers.LSTM(UNITS), keras.layers.Dense(4, "gelu"), keras.layers.Softmax()]
    module.layers = keras.Sequential([keras.Input((STEPS, FEATURES)), *layers])
    weights = module.weights = [weight.value for weight in module.layers.trainable_weights]

    def train(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(tf.math.log(module.layers(x)[:, 0]))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.5 * gradient)
        return loss

    module.train = tf.function(train, input_signature=[tf.TensorSpec((None, STEPS, FEATURES))])
    plain, fast = exported(module, tmp_path, module.train, passes)
    count = sum(ops_of(fast).count(op) for op in OPS)
    warned()
    for place in range(4):
        x = tf.random.stateless_normal([3, STEPS, FEATURES], [2, place])
        (expected,), (found,) = plain(x).values(), fast(x).values()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert float(found) < 1
    said = warned()
    # one for each op; a model before this one may have had an op of the same name and programs
    assert 0 < len(said) == len(set(said)) <= count


@pytest.mark.parametrize("programs", ["none", "others"])
def test_a_step_with_variables(gpu: FakeGpu, warned: Callable[[], list[str]], programs: str) -> None:
    region = softmax_step(product, None, FEATURES)
    made = for_another_gpu(gpu.programs(region)) if programs == "others" else []
    w, b = variables(FEATURES)
    plain_w, plain_b = variables(FEATURES)
    run = stitched(gpu, region, [w.handle, b.handle], made)
    held = []
    warned()
    for place in range(6):
        x, y = data((20, 33, 0)[place % 3] or 7, FEATURES)
        held.append((w.read_value(), w.numpy()))  # who reads keeps what was there
        np.testing.assert_allclose(run(x, y)[0], plain_step(x, y, plain_w, plain_b), rtol=2e-6)
    np.testing.assert_allclose(w, plain_w, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(b, plain_b, rtol=1e-5, atol=1e-7)
    for tensor, array in held:
        np.testing.assert_array_equal(tensor, array)
    (warning,) = warned()
    assert ("it has none for any GPU, this GPU has compute capability 9.0" in warning) == (programs == "none")


def twice(names: int) -> Region:
    """Doubles variable 0 twice, and reads it by its last name in between."""
    once, again = (Kernel(from_text(DOUBLED), (value,), (value + 1,)) for value in (0, 2))
    values = (floats(2, 3),) * 4
    steps = (Read(0, 0), once, Assign(0, 1), Read(names - 1, 2), again, Assign(0, 3))
    return Region(0, (floats(2, 3),) * names, values, steps, (2,))


@pytest.mark.parametrize("names", [1, 2])
@pytest.mark.parametrize("scattered", [False, True])
def test_variables_are_what_steps_make_of_them(gpu: FakeGpu, names: int, scattered: bool) -> None:
    """One variable under two names is one copy in host memory."""
    v = tf.Variable(np.ones((2, 3), np.float32))
    if scattered:  # from now on nothing else shares its memory
        tf.raw_ops.ResourceScatterAdd(resource=v.handle, indices=[0], updates=np.zeros((1, 3), np.float32))
    run = stitched(gpu, twice(names), [v.handle] * names, [])
    for place in range(3):
        np.testing.assert_array_equal(run()[0], np.full((2, 3), 2.0 * 4**place))
        np.testing.assert_array_equal(v, np.full((2, 3), 4.0 ** (place + 1)))


def test_a_region_that_was_planned_for_the_cpu(gpu: FakeGpu) -> None:
    """What it calls, no region on a GPU calls."""
    steps = (Kernel(from_text(DOUBLED), (0,), (1,)), call("Tanh", (1,), (2,), T=tf.float32))
    x = np.ones((2, 3), np.float32)
    found = stitched(gpu, Region(1, (), (floats(2, 3),) * 3, steps, (0, 2)), made=[])(x)
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_allclose(found[1], np.tanh(2 * x), rtol=1e-6)


def test_threads_lose_no_update(gpu: FakeGpu) -> None:
    v = tf.Variable(np.ones((2, 3), np.float32))
    run = stitched(gpu, twice(1), [v.handle], [])
    threads = [threading.Thread(target=lambda: [run() for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(v, np.full((2, 3), 4.0**20))


def test_buffers_are_given_back(gpu: FakeGpu) -> None:
    v = tf.Variable(np.ones((2, 3), np.float32))
    run = stitched(gpu, twice(1), [v.handle], [])
    run()
    gc.collect()
    before = in_use()
    for _ in range(20):
        run()
    assert in_use() == before
    for function in ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"):
        gpu.fail(function)
        with pytest.raises(tf.errors.InternalError, match=function.removesuffix("_v2")):
            run()
    assert in_use() == before


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"])
def test_after_a_failure_no_variable_has_changed(gpu: FakeGpu, function: str) -> None:
    v = tf.Variable(np.ones((2, 3), np.float32))
    run = stitched(gpu, twice(1), [v.handle], [])
    for after in range(2 if function == "cuMemcpyHtoDAsync_v2" else 1):  # of the output, of the variable
        gpu.fail(function, after=after)
        with pytest.raises(tf.errors.InternalError, match=function.removesuffix("_v2")):
            run()
        np.testing.assert_array_equal(v, np.ones((2, 3)))
    run()
    np.testing.assert_array_equal(v, np.full((2, 3), 4.0))


def lone(gpu: FakeGpu, code: bytes, kind: Literal["cubin", "ptx"] = "cubin") -> tuple[Region, list[FusionProgram]]:
    """A region of one kernel, and its program with other code."""
    region = Region(1, (), (floats(None, 3),) * 2, (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    (made,) = gpu.programs(region)
    return region, [replace(made, image=replace(made.image, kind=kind, code=code))]


@pytest.mark.parametrize(("code", "error"), [(OUT_OF_MEMORY, "ResourceExhaustedError"), (UNKNOWN, "InternalError")])
def test_real_failures_stay_errors(gpu: FakeGpu, warned: Callable[[], list[str]], code: int, error: str) -> None:
    """Although another program fits no device that is here."""
    cell, given = lstm(), in_dtype(tensors_of(lstm(), 4, 3, 2), tf.float32)
    fits = replace(OTHER, arch=90, code=b"fails with %d" % code)
    for programs in ((fits, OTHER), (OTHER, fits)):
        made = [RecurrentProgram(image) for image in programs]
        run = tf.function(lambda made=made: recurrent(load().ops, cell, 4, *given, programs=made), autograph=False)
        gpu.fail("cuModuleLoadData", code=code)
        with pytest.raises(getattr(tf.errors, error), match="cuModuleLoadData"):
            run()
    region, (program,) = lone(gpu, b"%d" % code)
    gpu.fail("cuModuleLoadData", code=code)
    with pytest.raises(getattr(tf.errors, error), match="cuModuleLoadData"):
        stitched(gpu, region, made=[program])(np.ones((2, 3), np.float32))
    assert not warned()


def test_a_wrong_program_stays_an_error(warned: Callable[[], list[str]]) -> None:
    cell, given = lstm(), in_dtype(tensors_of(lstm(), 4, 3, 2), tf.float32)
    wrong = [RecurrentProgram(OTHER), RecurrentProgram(OTHER, rows=0)]
    run = tf.function(lambda: recurrent(load().ops, cell, 4, *given, programs=wrong))
    with pytest.raises(tf.errors.InvalidArgumentError, match="attr programs"):
        run()
    assert not warned()


@pytest.mark.parametrize("code", [209, 221, 222, 223])
def test_code_that_the_driver_does_not_run(gpu: FakeGpu, code: int) -> None:
    """As PTX of a later version than an old driver knows."""
    region, programs = lone(gpu, b"ptx %d" % code, "ptx")
    x = np.ones((2, 3), np.float32)
    gpu.fail("cuModuleLoadData", code=code)
    np.testing.assert_array_equal(stitched(gpu, region, made=programs)(x)[0], 2 * x)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_a_layer_and_its_gradient(dtype: tf.DType) -> None:
    """In both directions; the ops of the gradient have no programs at all."""
    cell = gru()
    given = in_dtype(tensors_of(cell, 4, 6, 3, directions=2), dtype)

    def run() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            both = {"reverse": (False, True), "programs": [RecurrentProgram(OTHER)]}
            outputs, finals = recurrent(load().ops, cell, 4, *given, **both, training=True)
            loss = sum(tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in (*outputs, *finals))
        return outputs, finals, tape.gradient(loss, given)

    found, expected = tf.function(run, autograph=False)(), on_cpu(run)()
    for result, exact in zip(flat(found), flat(expected), strict=True):
        np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize("programs", [(), (OTHER,) * 3])
def test_a_product(programs: tuple[KernelImage, ...], warned: Callable[[], list[str]]) -> None:
    from custom_ops.image_functions import named

    a, b, bias = (tf.random.stateless_normal(shape, [0, 1]) for shape in ([7, 5], [5, 3], [3]))
    attributes = {"programs": [program.to_text() for program in programs], "images": named([p.code for p in programs])}
    run = tf.function(lambda: load().ops.tfmem_mat_mul(a=a, b=b, bias=[bias], **attributes), autograph=False)
    for _ in range(2):
        np.testing.assert_allclose(run(), a @ b + bias, rtol=1e-5, atol=1e-6)
    assert len(warned()) == 1


def test_dynamic_nets(warned: Callable[[], list[str]]) -> None:
    net = TreeLSTM(hidden=6, width=2)
    handle = net.specialize()
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(3)])

    def run() -> Any:
        return forward_backward(load().ops, handle.spec, net.parameters, batch, 0, None)

    found, expected = tf.function(run, autograph=False)(), on_cpu(run)()
    for result, exact in zip(flat(found), flat(expected), strict=True):
        np.testing.assert_array_equal(result, exact)
    (warning,) = warned()
    assert "call tfmem.dynamic.specialize on the machine with this GPU" in warning


def trained(run: Callable[..., Any]) -> list[tf.Tensor]:
    """The losses of some steps, and the parameters behind them; `run` makes a function of a step."""
    net = TreeLSTM(hidden=6, width=2)
    handle = net.specialize()
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(3)])
    parameters = list(net.parameters)
    update = run(lambda: step(load().ops, handle.spec, parameters, batch, 0, None, "sgd", tf.constant([0.1]), 0))
    losses = [update()[0] for _ in range(3)]
    return [*losses, *map(tf.convert_to_tensor, parameters)]


def test_training_a_dynamic_net() -> None:
    for result, exact in zip(trained(tf.function), trained(on_cpu), strict=True):
        np.testing.assert_array_equal(result, exact)
