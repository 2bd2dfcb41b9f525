"""Regions: their text, what is refused, and what they compute."""

from __future__ import annotations

import pkgutil
from dataclasses import is_dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops import fusion
from custom_ops.errors import RegionError
from custom_ops.expr.text import from_text as program_from_text
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, Step, TensorType, View
from custom_ops.fusion.region_check import VALUE_DTYPES, check
from custom_ops.fusion.text import from_text, to_text
from tests.fusion_reference import product, run, view_shape
from tests.fusion_regions import DESCENT, SOFTMAX, softmax_step
from tests.tiers import examples

PROGRAMS = tuple(map(program_from_text, (SOFTMAX, DESCENT)))


def a_product(inputs: tuple[int, int], output: int, transposed: bool) -> Call:
    return Call("MatMul", b"transposed" if transposed else b"", inputs, (output,), members=("MatMul",))


def multiply(call: Call, inputs: Any, _variables: Any) -> Any:
    return product(call, {"transpose_a": call.attrs == b"transposed"}, inputs)


sizes = st.one_of(st.none(), st.integers(0, 2**13))
types = st.builds(TensorType, st.sampled_from(VALUE_DTYPES), st.lists(sizes, max_size=4).map(tuple))
words = st.text(st.sampled_from("abcXYZ_019/."), min_size=1, max_size=12)
names = st.lists(words, max_size=3).map(tuple)


@st.composite
def regions(draw: Any) -> Region:
    """Steps that fit their values, of all kinds."""
    values: list[TensorType] = draw(st.lists(types, min_size=1, max_size=4))
    variables: list[TensorType] = draw(st.lists(types, max_size=3))
    inputs = len(values)
    steps: list[Step] = []

    def give(*found: TensorType) -> tuple[int, ...]:
        values.extend(found)
        return tuple(range(len(values) - len(found), len(values)))

    any_value = st.integers(0, 100).map(lambda number: number % len(values))
    any_variable = st.integers(0, 100).map(lambda number: number % len(variables))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(("kernel", "call", "view", "read", "assign")))
        if kind == "kernel":
            program = draw(st.sampled_from(PROGRAMS))
            fitting = [
                [place for place, found in enumerate(values) if (found.dtype, len(found.shape)) == (t.dtype, t.rank)]
                for t in program.tensors
            ]
            if all(fitting):
                read = tuple(draw(st.sampled_from(places)) for places in fitting)
                made = [TensorType("float32", tuple(draw(sizes) for _ in output.axes)) for output in program.outputs]
                steps.append(Kernel(program, read, give(*made), draw(names)))
        elif kind == "call":
            read = tuple(draw(st.lists(any_value, max_size=3)))
            touched = tuple(draw(st.lists(any_variable, max_size=2))) if variables else ()
            made = draw(st.lists(types, max_size=2))
            steps.append(Call(draw(words), draw(st.binary(max_size=20)), read, give(*made), touched, draw(names)))
        elif kind == "view":
            place = draw(any_value)
            shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
            steps.append(View(place, *give(TensorType(values[place].dtype, (None, *shape)))))
        elif kind == "read" and variables:
            variable = draw(any_variable)
            steps.append(Read(variable, *give(variables[variable])))
        elif kind == "assign":
            place = draw(any_value)
            variables.append(values[place])
            steps.append(Assign(len(variables) - 1, place))
    outputs = tuple(draw(st.lists(any_value, max_size=3)))
    return Region(inputs, tuple(variables), tuple(values), tuple(steps), outputs)


@settings(max_examples=examples(100))
@given(regions())
def test_text_is_read_as_it_was_written(region: Region) -> None:
    check(region)
    assert from_text(to_text(region)) == region


def test_equal_programs_are_written_once() -> None:
    region = softmax_step(a_product)
    again = replace(region.steps[6], inputs=(9, 8), outputs=(10,))
    twice = replace(region, values=(*region.values, region.values[9]), steps=(*region.steps, again))
    assert to_text(twice).count("\nprogram\n") == 2
    assert from_text(to_text(twice)) == twice


STEP = to_text(softmax_step(a_product, features=4))


@pytest.mark.parametrize(
    ("line", "by", "message"),
    [
        ("region 1", "region 2", "expected 'region 1'"),
        ("input float32 ? 10", "input float33 ? 10", "float33"),
        ("input float32 ? 10", "input float32 -1 10", "sizes of 0 or more"),
        ("input float32 ? 10", "input float32 ? 4611686018427387904", "more bytes than 64 bits count"),
        ("read v0 > 2", "read v2 > 2", r"variables \[2\] of 2"),
        ("read v0 > 2", "read 0 > 2", "expected a variable"),
        ("read v0 > 2", "read v0 > 3", r"gives values \(3,\); expected \(2,\)"),
        ("assign v1 7", "assign v1 4", "the variable is"),
        ("assign v1 7", "assign v1 9", r"reads values \[9\]; by then there are 8"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 2 4 3 1 > 5 6 7", "cannot read line .*'kernel 2"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 4 1 > 5 6 7", "its program"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 3 1 > 6 5 7", "numbered in order"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 3 1", "after '>'"),
        ("call MatMul - 0 2 > 4", "call MatMul *** 0 2 > 4", "cannot read line .*'call MatMul"),
        ("members Softmax Mean sub", "join", "cannot read line .*'join'"),
        ("output 5", "output 10", r"outputs: values \[10\] of 10"),
        ("output 5", "", "expected one line 'output"),
        ("output 5", "output 5\noutput 5", "found 2"),
        ("  exp 4", "  exp 40", "exp"),
    ],
)
def test_wrong_texts_are_refused(line: str, by: str, message: str) -> None:
    assert f"\n{line}\n" in "\n" + STEP
    with pytest.raises(ValueError, match=message):
        from_text(("\n" + STEP).replace(f"\n{line}\n", f"\n{by}\n")[1:])


def test_names_are_words() -> None:
    region = softmax_step(a_product)
    step = replace(region.steps[3], members=("a b",))
    with pytest.raises(RegionError, match=r"step 3 \(Kernel\): members named \['a b'\]"):
        to_text(replace(region, steps=(*region.steps[:3], step, *region.steps[4:])))


def test_views_have_one_unknown_size_at_most() -> None:
    two = TensorType("float32", (None, None))
    with pytest.raises(RegionError, match="at most one size"):
        check(Region(1, (), (two, two), (View(0, 1),), ()))
    assert view_shape((None, 3), 12) == (4, 3)
    assert view_shape((None, 0), 0) == (0, 0)
    with pytest.raises(RegionError, match="12 numbers do not make up shape"):
        view_shape((None, 5), 12)


@pytest.mark.parametrize("kind", ["value", "variable"])
def test_a_dtype_that_no_reader_knows_is_refused(kind: str) -> None:
    """Where no program looks at it, too."""
    known, unknown = TensorType("float32", (2,)), TensorType("float33", (2,))
    values, variables = ((known, unknown), ()) if kind == "value" else ((known, known), (known, unknown))
    check(Region(2, (known,) * len(variables), (known, known), (), (0,)))
    with pytest.raises(RegionError, match=f"^{kind} 1: dtype 'float33'; expected one of"):
        check(Region(2, variables, values, (), (0,)))


def test_the_reference_descends() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((50, 4), np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 50)]
    variables = [np.zeros((4, 10), np.float32), np.zeros(10, np.float32)]
    w, b = (variable.astype(np.float64) for variable in variables)
    for _ in range(5):
        (loss,) = run(softmax_step(a_product, features=4), [x, y], variables, multiply)
        logits = x @ w + b
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(loss, -np.mean((y * np.log(p)).sum(1)), rtol=1e-6)
        w, b = w - 0.1 * x.T @ (p - y) / 50, b - 0.1 * np.sum(p - y, 0) / 50
    np.testing.assert_allclose(variables[0], w, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(variables[1], b, rtol=1e-5, atol=1e-7)


def test_the_reference_refuses_what_is_not_declared() -> None:
    region, x = softmax_step(a_product, rows=5, features=4), np.zeros((5, 4), np.float32)
    variables = [np.zeros((4, 10), np.float32), np.zeros(10, np.float32)]
    with pytest.raises(RegionError, match="expected 2 inputs and 2 variables, found 1 and 2"):
        run(region, [x], variables, multiply)
    with pytest.raises(RegionError, match=r"value 1 is float32 of shape \(6, 10\)"):
        run(region, [x, np.zeros((6, 10), np.float32)], variables, multiply)


def test_products_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    a, b, bias = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 4, 5)), rng.normal(size=5)

    def found(op: str, attrs: dict[str, object], *inputs: Any) -> Any:
        return product(Call(op, b"", (), ()), attrs, inputs)[0]

    np.testing.assert_array_equal(found("MatMul", {"transpose_b": True}, a[0], b[0].T), a[0] @ b[0])
    np.testing.assert_array_equal(found("BatchMatMulV2", {"adj_x": True}, a.swapaxes(1, 2), b), a @ b)
    fused: dict[str, object] = {"fused_ops": ["BiasAdd", "Relu"]}
    np.testing.assert_array_equal(found("_FusedMatMul", fused, a[0], b[0], bias), np.maximum(a[0] @ b[0] + bias, 0))
    assert found("MatMul", {}, np.int64([[2**53 + 1]]), np.int64([[1]]))[0, 0] == 2**53 + 1
    with pytest.raises(RegionError, match="'Conv2D' is no product"):
        found("Conv2D", {}, a, b)
    with pytest.raises(RegionError, match="with 'Elu' is no product"):
        found("_FusedMatMul", {"fused_ops": ["Elu"]}, a[0], b[0])


def test_what_describes_regions_and_kernels_never_changes() -> None:
    """Threads share it, and caches keep it: all its dataclasses are frozen."""
    names = [found.name for found in pkgutil.walk_packages(fusion.__path__, "custom_ops.fusion.")]
    public = [each for name in names for word, each in vars(import_module(name)).items() if word[0] != "_"]
    records = {each for each in public if isinstance(each, type) and is_dataclass(each)}
    assert {Region, Kernel, Call, View, Read, Assign, TensorType} <= records
    assert [record.__name__ for record in records if not record.__dataclass_params__.frozen] == []
