"""CUDA that is written for programs runs on the CPU: every op of the table, access, dtype and reduction."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from custom_ops import build_flags
from custom_ops.errors import KernelError
from custom_ops.expr import reference
from custom_ops.expr.nodes import AxisTerm, Cast, Elementwise, Index, Input, Node
from custom_ops.expr.program import DTYPES, REDUCTIONS, Output, Program, Tensor
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import INTEGER_RANGES, INTEGERS
from custom_ops.expr.text import from_text
from custom_ops.jit import nvrtc
from tests.compiled import cubin
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.cuda_on_cpu.loops import run, source
from tests.elementwise_edges import FEW, VALUES, different
from tests.programs import sigmoid_step, softmax_step


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    compiler = Compiler()
    with CpuDevice(driver=Driver(), compile_source=compiler) as found:
        yield found


def compare(device: CpuDevice, program: Program, tensors: list[Any], rtol: float = 0.0) -> None:
    for found, expected in zip(run(device, program, tensors), reference.run(program, tensors), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        wrong = different(found.reshape(-1), expected.reshape(-1), rtol, atol=rtol)
        assert not len(wrong), (found.reshape(-1)[wrong], expected.reshape(-1)[wrong])


@pytest.mark.parametrize(("rows", "classes", "features"), [(1, 1, 1), (33, 10, 7), (100, 3, 20)])
def test_softmax_regression(device: CpuDevice, rows: int, classes: int, features: int) -> None:
    compare(device, *softmax_step(rows, classes, features), rtol=1e-5)


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (65, 13)])
def test_sigmoid_regression(device: CpuDevice, rows: int, features: int) -> None:
    compare(device, *sigmoid_step(rows, features), rtol=1e-5)


def every_op(dtype: str) -> tuple[Program, list[str]]:
    """Each op of `dtype` as an output, of three tensors `[n]`; and the ops' names."""
    nodes: list[Node] = [Input(tensor, (Index(terms=(AxisTerm(0),)),)) for tensor in range(3)]
    nodes.append(Cast("bool", 0))
    names = [name for name, op in TABLE.items() if dtype in op.dtypes]
    nodes += [Elementwise(name, (3, 1, 2) if name == "select" else (0, 1, 2)[: TABLE[name].arity]) for name in names]
    outputs = tuple(Output(4 + number, (0,)) for number in range(len(names)))
    return Program((0,), (Tensor(dtype, 1),) * 3, tuple(nodes), outputs), names


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_signs_of_zero_are_tensorflows(device: CpuDevice, dtype: str) -> None:
    text = f"program 1\naxes 0\ntensor {dtype} 1\ninput 0 a0\nsign 0\ntanh 0\noutput 1 0\noutput 2 0\n"
    zeros = np.array([0.0, -0.0]).astype(numpy_dtype(dtype))
    sign, tanh = run(device, from_text(text), [zeros])
    assert list(np.signbit(sign)) == [False, False]
    assert list(np.signbit(tanh)) == [False, True]
    assert not np.any(sign)
    assert not np.any(tanh)


def points(dtype: str) -> list[Any]:
    """Pairs of special values and random ones, and a third value for `select`."""
    special: list[Any] = VALUES
    if dtype == "bool":
        special = [False, True]
    elif dtype.startswith("int"):
        special = [0, 1, -1, 2, -7, 1000, -46000, np.iinfo(dtype).max, np.iinfo(dtype).min]
    elif dtype == "float16":
        special = [*FEW, 6.0, -6.0, 20.0, 300.0, -300.0, 1e-4]
    pairs = np.array(list(product(special, special)))
    random = np.random.default_rng(0)
    if dtype not in ("bool", "int32", "int64"):
        pairs = np.concatenate([pairs, 3 * random.normal(size=(200, 2))])
    first, second = pairs.T
    with np.errstate(over="ignore"):  # infinity of a half type
        return [np.ascontiguousarray(x.astype(numpy_dtype(dtype))) for x in (first, second, first[::-1])]


BOUNDS = {"float64": 1e-14, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(scope="module")
def results(device: CpuDevice) -> dict[str, dict[str, tuple[Any, Any]]]:
    """For each dtype and op what the kernel computes and, of the same numbers in float64, NumPy."""
    found = {}
    for dtype in DTYPES:
        program, names = every_op(dtype)
        tensors = points(dtype)
        wide = "float64" if dtype in BOUNDS else dtype
        exact = reference.run(every_op(wide)[0], [tensor.astype(wide) for tensor in tensors])
        with np.errstate(over="ignore", invalid="ignore"):
            exact = [value.astype(numpy_dtype(dtype)) if value.dtype != bool else value for value in exact]
        found[dtype] = dict(zip(names, zip(run(device, program, tensors), exact, strict=True), strict=True))
    return found


@pytest.mark.parametrize(("op", "dtype"), [(name, dtype) for name, op in TABLE.items() for dtype in op.dtypes])
def test_every_op(results: dict[str, dict[str, tuple[Any, Any]]], op: str, dtype: str) -> None:
    found, exact = results[dtype][op]
    wrong = different(found, exact, BOUNDS.get(dtype, 0), 1e-7 if dtype == "float16" else 1.2e-38)
    arguments = [tensor[wrong][:8] for tensor in points(dtype)]
    assert not len(wrong), f"{op}{arguments}: {found[wrong][:8]}, NumPy {exact[wrong][:8]}"
    assert found.dtype == exact.dtype


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_and_wrap(device: CpuDevice, dtype: str) -> None:
    """Constants of all bits; and a compiler that may take it that nothing overflows would find each comparison true."""
    low, high = INTEGER_RANGES[dtype]
    constants = [low, low + 1, high, high - 1, high // 3 | 1, -(high // 5) | 1]
    lines, outputs = ["input 0 a0"], []
    for value in constants:
        place = len(lines)
        lines += [f"constant {dtype} {value}", f"multiply 0 {place}", f"add {place + 1} {place}"]
        outputs += [place + 1, place + 2]
    place = len(lines)
    lines += [f"constant {dtype} 1", f"add 0 {place}", f"greater {place + 1} 0", "square 0", f"constant {dtype} 0"]
    lines += [f"greater_equal {place + 3} {place + 4}", "absolute 0", f"greater_equal {place + 6} {place + 4}"]
    outputs += [place + 2, place + 5, place + 7]
    text = "\n".join([*lines, *(f"output {each} 0" for each in outputs)])
    numbers = np.array([low, low + 1, -3, 0, 1, 7, 46341, high // 2, high - 1, high], dtype)
    compare(device, from_text(f"program 1\naxes 0\ntensor {dtype} 1\n{text}\n"), [numbers])


@pytest.mark.parametrize("source", DTYPES)
def test_casts(device: CpuDevice, source: str) -> None:
    casts = "".join(f"cast {dtype} 0\n" for dtype in DTYPES)
    outputs = "".join(f"output {number + 1} 0\n" for number in range(len(DTYPES)))
    program = from_text(f"program 1\naxes 0\ntensor {source} 1\ninput 0 a0\n{casts}{outputs}")
    numbers = np.array([0, 1, 2.75, 100.3, 7, 0.001] if source != "bool" else [0, 1, 1])
    compare(device, program, [numbers.astype(numpy_dtype(source))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(device: CpuDevice, dtype: str) -> None:
    """Reductions of two axes of three, and of all."""
    kinds = [kind for kind, dtypes in REDUCTIONS.items() if dtype in dtypes]
    reductions = "".join(f"reduce {kind} 0 0 2\nreduce {kind} 0 0 1 2\n" for kind in kinds)
    outputs = "".join(f"output {2 * i + 1} 1\noutput {2 * i + 2}\n" for i in range(len(kinds)))
    program = from_text(f"program 1\naxes 0 0 0\ntensor {dtype} 3\ninput 0 a0 a1 a2\n{reductions}{outputs}")
    tensor = np.random.default_rng(0).normal(size=(3, 4, 5)) + 0.2
    tensor = tensor > -1 if dtype == "bool" else tensor.astype(numpy_dtype(dtype))
    compare(device, program, [tensor], BOUNDS.get(dtype, 0) * 2)


def test_accesses(device: CpuDevice) -> None:
    """A transpose, a slice, a reversal, a broadcast, two reshapes and a gather, in one program."""
    text = """program 1
axes 6 4 24
tensor float32 2
tensor int32 1
input 0 a0 a1
input 0 -1*a0+5 3
input 0 2 a1
input 0 a2/4 a2%4
input 1 a1
input 0 n4+1 a1
output 0 1 0
output 1 0
output 2 0 1
output 3 2
output 5 1
"""
    tensors = [np.arange(24, dtype=np.float32).reshape(6, 4), np.int32([3, 0, 4, 1])]
    compare(device, from_text(text), tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64"])
def test_nvrtc_takes_the_same_source(dtype: str) -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    assert cubin(source(every_op(dtype)[0]), 90)
    assert cubin(source(softmax_step(3, 4, 5)[0]), 80)
