"""What tile programs compute, by dtype: casts, ops of the table and reductions, against TensorFlow and NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.program import REDUCTIONS as KINDS
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import FLOATS, INTEGERS
from custom_ops.load import load
from tests.tf.tile_programs import Array, run

DTYPES = (*FLOATS, *INTEGERS, "bool")
HALVES = ("float16", "bfloat16")
REDUCTIONS = {
    "sum": tf.reduce_sum,
    "dot": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "product": tf.reduce_prod,
    "any": tf.reduce_any,
    "all": tf.reduce_all,
}


@pytest.fixture(params=[16, 64], ids=["vectors of 16 bytes", "the widest vectors"], autouse=True)
def _vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    load().limit_vector_bytes(request.param)
    yield
    load().limit_vector_bytes(64)


def numpy_of(dtype: str) -> type:
    return tf.as_dtype(dtype).as_numpy_dtype


def numbers(dtype: str, count: int, seed: int = 0) -> Array:
    """Numbers of all sizes; integers wrap when they are multiplied."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        edges = [0, 1, -1, np.iinfo(dtype).max, np.iinfo(dtype).min]
        return np.concatenate([edges, random.integers(-(2**40), 2**40, count)])[:count].astype(dtype)
    edges = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -2.5, 6, 7]
    return np.concatenate([edges, random.normal(size=count) * 4])[:count].astype(numpy_of(dtype))


def assert_same(ours: Array, theirs: Array) -> None:
    """To the bit, but for the bits of a NaN."""
    assert ours.dtype == theirs.dtype
    if theirs.dtype == bool or np.issubdtype(theirs.dtype, np.integer):
        np.testing.assert_array_equal(ours, theirs)
        return
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    known = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours)[known], np.signbit(theirs)[known])


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_casts_are_tensorflows(source: str, target: str) -> None:
    x = numbers(source, 200)
    if source in FLOATS:
        far = [2147483520.0, 2147483648.0, -2147483904.0, 3e9, 9.3e18, -9.3e18, 1e30, 65504.0, 65519.0, 65520.0, 1e-7]
        far += [1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-40, 2.5e-8, 0.9999999]
        with np.errstate(over="ignore"):
            x[50 : 50 + len(far)] = np.array(far).astype(x.dtype)
    elif source != "bool":
        far = [2049, 2051, 65519, 65520, 2**24 + 1, 257, 2**31 - 1]
        x[50 : 50 + len(far)] = far
    text = f"program 1\naxes 0\ntensor {source} 1\ninput 0 a0\ncast {target} 0\noutput 1 0\n"
    (ours,) = run(text, [len(x)], [x], (target, [len(x)]))
    assert_same(ours, tf.cast(tf.constant(x), target).numpy())


CASES = [(name, dtype) for name, op in TABLE.items() for dtype in DTYPES if dtype in op.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_ops_are_the_tables(name: str, dtype: str) -> None:
    op, count = TABLE[name], 333
    arguments = [numbers(dtype, count, seed) for seed in range(op.arity)]
    for seed, argument in enumerate(arguments[1:]):
        np.random.default_rng(seed).shuffle(argument)
    dtypes = [dtype] * op.arity
    if name == "select":
        dtypes[0], arguments[0] = "bool", numbers("bool", count)
    elif op.comparison and op.arity == 2:
        arguments[1][::3] = arguments[0][::3]
    result = "bool" if op.comparison else dtype
    lines = ["program 1", "axes 0", *(f"tensor {dtype} 1" for dtype in dtypes)]
    lines += [f"input {i} a0" for i in range(op.arity)]
    lines += [f"{name} {' '.join(map(str, range(op.arity)))}", f"output {op.arity} 0"]
    (ours,) = run("\n".join(lines), [count], arguments, (result, [count]))
    wide = [a.astype(np.float32) if dtype in HALVES and a.dtype != bool else a for a in arguments]
    with np.errstate(all="ignore"):
        expected = np.asarray(op.numpy(*wide))
        if dtype in FLOATS and result != "bool":
            expected = expected.astype(numpy_of(dtype))
            digits = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
            np.testing.assert_allclose(
                ours.astype(np.float64), expected.astype(np.float64), rtol=digits, atol=digits * 1e-3
            )
        else:
            np.testing.assert_array_equal(ours, expected.astype(numpy_of(result)))


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in KINDS for dtype in KINDS[kind]])
@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1)], ids=["columns", "rows", "both"])
def test_reductions_are_tensorflows(kind: str, dtype: str, axes: tuple[int, ...]) -> None:
    words = " ".join(map(str, axes))
    left = [axis for axis in (0, 1) if axis not in axes]
    text = f"program 1\naxes 0 0\ntensor {dtype} 2\ninput 0 a0 a1\nreduce {kind} 0 {words}\n"
    text += f"output 1 {' '.join(map(str, left))}\n"
    for rows, columns in ((1, 1), (2, 3), (7, 64), (130, 33), (3, 1500)):
        x = np.random.default_rng(columns).normal(size=(rows, columns)) * 3
        if kind == "product":
            x = np.exp(x / 30)
        x = (x > -3 if kind == "all" else x > 5) if dtype == "bool" else x.astype(numpy_of(dtype))
        for nan in (False, True) if dtype in FLOATS else (False,):
            if nan:
                x[rows // 2, columns // 2] = np.nan
            shape = [(rows, columns)[axis] for axis in left]
            (ours,) = run(text, [rows, columns], [x], (dtype, shape))
            wide = tf.cast(x, "float32") if dtype in HALVES else tf.constant(x)
            theirs = tf.cast(REDUCTIONS[kind](wide, axis=list(axes)), dtype).numpy()
            if kind in ("sum", "dot", "mean", "product") and dtype in FLOATS:
                digits = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
                scale = float(np.nanmax(np.abs(x.astype(np.float64)), initial=0)) * np.sqrt(rows * columns)
                close = digits * (scale if kind in ("sum", "dot") else 1)
                np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=digits, atol=close)
            else:
                assert_same(ours, theirs)
