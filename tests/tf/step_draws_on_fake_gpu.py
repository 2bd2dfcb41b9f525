"""TfmemStepDraws on a GPU, on the fake driver, beside TensorFlow's op of each step. Run by test_step_draws_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.image_functions import named
from custom_ops.load import load
from custom_ops.random import draw_kernels
from tests.tf.fake_gpu import OUT_OF_MEMORY, FakeGpu

pytest_plugins = ("tests.tf.fake_gpu",)

FLOATS, INTEGERS = ("float32", "float64", "float16", "bfloat16"), ("int32", "int64")
SHAPES = ((), (1,), (3, 5), (2, 3, 4), (7, 33), (4, 0))
SEEDS = [[0, 0], [-1, 7], [2**31 - 1, -(2**31)], [123456, -654321], [5, 6]]
DRAWS = [
    *((f"Random{kind}", dtype) for kind in ("Uniform", "Normal") for dtype in FLOATS),
    *((f"Random{kind}", dtype) for kind in ("UniformInt", "UniformFullInt") for dtype in INTEGERS),
]
ULPS = {"float16": 1, "bfloat16": 1, "float32": 16, "float64": 16}  # of normal numbers: what sin and cos may differ by


def keys_of(seeds: Any) -> tuple[Any, Any]:
    """TensorFlow's own, of each step."""
    pairs = [tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed) for seed in seeds]
    return tf.stack([pair.key for pair in pairs]), tf.stack([pair.counter for pair in pairs])


def draw(
    gpu: FakeGpu, op: str, dtype: str, inputs: Sequence[Any], of_steps: Sequence[bool], programs: Any = None
) -> tuple[Any, int]:
    """What the op gives in a graph, and how many kernels it launched."""
    made = [draw_kernels.build(op, dtype, 90, compile_source=gpu.compile_source)] if programs is None else programs

    def run(*inputs: Any) -> Any:
        (found,) = load().ops.tfmem_step_draws(
            inputs=inputs,
            Tout=[tf.as_dtype(dtype)],
            op=op,
            of_steps=of_steps,
            shapes=[None],
            programs=[program.to_text() for program in made],
            images=named([program.code for program in made]),
        )
        return found

    before = gpu.calls("cuLaunchKernelEx")
    given = [tf.convert_to_tensor(each) for each in inputs]  # constants of the graph would be folded
    return tf.function(run, autograph=False)(*given), gpu.calls("cuLaunchKernelEx") - before


def bounds(dtype: str, steps: int) -> tuple[Any, Any]:
    """Smallest and largest numbers of each step."""
    if dtype == "int64":
        low, high = [-(2**63), -3, 0, 2**62, 5], [2**63 - 1, 5, 1, 2**62 + 9, 2**40]
    else:
        low, high = [-(2**31), -3, 0, 2**30, 5], [2**31 - 1, 5, 1, 2**30 + 9, 2**20]
    return tf.constant(low[:steps], dtype), tf.constant(high[:steps], dtype)


def assert_same(op: str, dtype: str, found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not op.startswith("StatelessRandomNormal"):
        np.testing.assert_array_equal(found, expected)
        return
    unit = float(np.finfo(np.float16).eps) * 8 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
    a, b = (tf.cast(each, "float64") for each in (found, expected))
    np.testing.assert_allclose(a, b, rtol=ULPS[dtype] * unit, atol=ULPS[dtype] * unit / 8)


@pytest.mark.parametrize("steps", [5, 1])
@pytest.mark.parametrize(("kind", "dtype"), DRAWS)
def test_numbers_by_keys_and_counters(gpu: FakeGpu, kind: str, dtype: str, steps: int) -> None:
    op = f"Stateless{kind}V2"
    key, counter = keys_of(SEEDS[:steps])
    low, high = bounds(dtype, steps)
    for shape in SHAPES:
        more = [low, high] if kind == "RandomUniformInt" else []
        given = [tf.constant(shape, tf.int32), key, counter, 1, *more]
        found, launched = draw(gpu, op, dtype, given, [False, True, True, False, *[True] * len(more)])
        assert launched == (0 not in shape)
        names = ("minval", "maxval")[: len(more)]
        types = {} if more else {"dtype": tf.as_dtype(dtype)}
        expected = [
            getattr(tf.raw_ops, op)(
                shape=given[0], key=key[step], counter=counter[step], alg=1, **types,
                **{name: each[step] for name, each in zip(names, more, strict=True)},
            )
            for step in range(steps)
        ]  # fmt: skip
        assert_same(op, dtype, found, tf.stack(expected))


@pytest.mark.parametrize("seed_type", ["int32", "int64"])
@pytest.mark.parametrize(("kind", "dtype"), DRAWS)
def test_numbers_by_seeds(gpu: FakeGpu, kind: str, dtype: str, seed_type: str) -> None:
    """Ops of older programs take the seed itself."""
    op, seeds = f"Stateless{kind}", tf.constant(SEEDS, seed_type)
    more = {"minval": tf.constant(-3, dtype), "maxval": tf.constant(40, dtype)} if kind == "RandomUniformInt" else {}
    if kind == "RandomUniformFullInt":
        more = {"dtype": tf.as_dtype(dtype)}
    given = [tf.constant([3, 7]), seeds, *(more.values() if "minval" in more else ())]
    found, launched = draw(gpu, op, dtype, given, [False, True, *[False] * (len(given) - 2)])
    assert launched == 1
    types = {"dtype": tf.as_dtype(dtype)} if kind in ("RandomUniform", "RandomNormal") else {}
    expected = [getattr(tf.raw_ops, op)(shape=given[0], seed=seed, **types, **more) for seed in seeds]
    assert_same(op, dtype, found, tf.stack(expected))


def test_a_counter_whose_lower_half_overflows(gpu: FakeGpu) -> None:
    key, counter = tf.constant([[9], [9]], tf.uint64), tf.constant([[2**64 - 2, 3], [2**64 - 2, 2**64 - 1]], tf.uint64)
    op, shape = "StatelessRandomUniformV2", tf.constant([29])
    found, _ = draw(gpu, op, "float32", [shape, key, counter, 3], [False, True, True, False])
    for step in range(2):
        where = {"shape": shape, "key": key[step], "counter": counter[step]}
        np.testing.assert_array_equal(found[step], tf.raw_ops.StatelessRandomUniformV2(**where, alg=1))


@pytest.mark.parametrize("what", ["key", "counter"])
def test_a_key_or_a_counter_for_all_steps(gpu: FakeGpu, what: str) -> None:
    key, counter = keys_of(SEEDS)
    of_steps = {"key": what != "key", "counter": what != "counter"}
    given = [[6, 3], key if of_steps["key"] else key[1], counter if of_steps["counter"] else counter[1], 1]
    found, _ = draw(gpu, "StatelessRandomUniformV2", "float32", given, [False, *of_steps.values(), False])
    for step in range(len(SEEDS)):
        where = {"key": key[step if what != "key" else 1], "counter": counter[step if what != "counter" else 1]}
        np.testing.assert_array_equal(found[step], tf.raw_ops.StatelessRandomUniformV2(shape=[6, 3], alg=1, **where))


def test_no_step(gpu: FakeGpu) -> None:
    given = [[2, 3], tf.zeros([0, 1], tf.uint64), tf.zeros([0, 2], tf.uint64), 1]
    found, launched = draw(gpu, "StatelessRandomUniformV2", "float32", given, [False, True, True, False])
    assert found.shape == (0, 2, 3)
    assert launched == 0


def test_what_lies_in_host_memory_is_drawn_there(gpu: FakeGpu, capfd: pytest.CaptureFixture[str]) -> None:
    """Keys and unsigned numbers; and nothing is said about it."""
    (key, counter), seeds = keys_of(SEEDS), tf.constant(SEEDS)

    @tf.function(autograph=False)
    def keys(seeds: Any) -> Any:
        return load().ops.tfmem_step_draws(
            inputs=[seeds], Tout=[tf.uint64] * 2, op="StatelessRandomGetKeyCounter", of_steps=[True], shapes=[None] * 2
        )

    for found, expected in zip(keys(seeds), (key, counter), strict=True):
        np.testing.assert_array_equal(found, expected)
    of_steps = [False, True, True, False]
    for dtype in ("uint32", "uint64"):
        found, launched = draw(gpu, "StatelessRandomUniformFullIntV2", dtype, [[7], key, counter, 1], of_steps, [])
        assert launched == 0
        where = {"shape": [7], "key": key[2], "counter": counter[2], "alg": 1, "dtype": tf.as_dtype(dtype)}
        np.testing.assert_array_equal(found[2], tf.raw_ops.StatelessRandomUniformFullIntV2(**where))
    assert "has no program" not in capfd.readouterr().err


@pytest.mark.parametrize("programs", ["none", "another's", "another's first"])
def test_programs_of_other_gpus(gpu: FakeGpu, programs: str, capfd: pytest.CaptureFixture[str]) -> None:
    key, counter = keys_of(SEEDS)
    op = "StatelessRandomUniformV2"
    own = draw_kernels.build(op, "float32", 90, compile_source=gpu.compile_source)
    other = replace(own, arch=100, code=b"for compute capability 10.0")
    made = {"none": [], "another's": [other], "another's first": [other, own]}[programs]
    found, launched = draw(gpu, op, "float32", [[7, 3], key, counter, 1], [False, True, True, False], made)
    assert launched == (own in made)
    assert ("the CPU computes it instead" in capfd.readouterr().err) == (own not in made)
    for step in range(len(SEEDS)):
        where = {"shape": [7, 3], "key": key[step], "counter": counter[step], "alg": 1}
        np.testing.assert_array_equal(found[step], tf.raw_ops.StatelessRandomUniformV2(**where))


KEY, COUNTER = np.zeros((3, 1), np.uint64), np.zeros((3, 2), np.uint64)


@pytest.mark.parametrize(
    ("inputs", "of_steps", "error"),
    [
        ([[2, 4], KEY, COUNTER, 2], [0, 1, 1, 0], "algorithm 2; expected 1, Philox"),
        ([[2, 4], KEY[:2], COUNTER, 1], [0, 1, 1, 0], "expected an item for each of 2 steps|must be equal"),
        ([[2, 4], KEY, COUNTER[:, :1], 1], [0, 1, 1, 0], "input 2 .* expected 2 a step"),
        ([[2, 4], COUNTER, COUNTER, 1], [0, 1, 1, 0], "input 1 .* expected 1 a step"),
        ([[2, 4], KEY[0], COUNTER[0], 1], [0, 0, 0, 0], "no input that differs"),
        ([[[2, 4]] * 3, KEY, COUNTER, 1], [1, 1, 1, 0], "for each step"),
        ([[2, 4], KEY, COUNTER, [1, 1]], [0, 1, 1, 0], "input 3 .* expected 1"),
        ([[2, -4], KEY, COUNTER, 1], [0, 1, 1, 0], "-4|negative"),
        ([np.array([2**62, 0]), KEY, COUNTER, 1], [0, 1, 1, 0], "more numbers|too many|overflow|elements"),
        ([[2, 4], KEY.astype(np.float32), COUNTER, 1], [0, 1, 1, 0], "expected whole numbers"),
        ([[2, 4], KEY, COUNTER], [0, 1, 1], "has a program for a GPU, but 3 inputs"),
        ([[2, 4], KEY, COUNTER, 1], [0, 1, 1], "of_steps"),
    ],
)
def test_calls_that_are_refused(gpu: FakeGpu, inputs: Any, of_steps: Any, error: str) -> None:
    with pytest.raises((tf.errors.OpError, ValueError), match=error):
        draw(gpu, "StatelessRandomUniformV2", "float32", inputs, [bool(each) for each in of_steps])


def test_an_empty_range(gpu: FakeGpu) -> None:
    given = [[2], KEY, COUNTER, 1, 3, tf.constant([4, 3, 4])]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Need minval < maxval, got 3 >= 3 in step 1"):
        draw(gpu, "StatelessRandomUniformIntV2", "int32", given, [False, True, True, False, False, True])


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync_v2", "cuLaunchKernelEx"])
def test_failures_of_the_driver(gpu: FakeGpu, function: str) -> None:
    given = [[2, 4], KEY, COUNTER, 1], [False, True, True, False]
    for code, error in ((OUT_OF_MEMORY, tf.errors.ResourceExhaustedError), (999, tf.errors.InternalError)):
        gpu.fail(function, code=code)
        with pytest.raises(error, match=function.removesuffix("_v2")):
            draw(gpu, "StatelessRandomUniformV2", "float32", *given)
        draw(gpu, "StatelessRandomUniformV2", "float32", *given)
