"""Programs over tensors: their text, what they refuse, and shapes that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.errors import ProgramError
from custom_ops.expr import program as module
from custom_ops.expr.program import AxisTerm, Index, Type
from custom_ops.expr.reference import run
from custom_ops.expr.text import from_text, to_text
from tests.programs import SIGMOID_STEP, SOFTMAX_STEP

EVERYTHING = """program 1
axes 0 10 4
tensor float32 2
tensor int64 1
tensor bool 0
input 1 a1
input 0 n0+2*a0+-3*a1/4%3+7 5
input 2
constant float64 -0.5
constant int32 -7
constant bool True
cast float32 3
select 2 1 6
position int64 2
reduce max 7 0 1
output 9
output 7 1 0
"""


@pytest.mark.parametrize("text", [SOFTMAX_STEP, SIGMOID_STEP, EVERYTHING.replace("input 1 a1", "input 1 a0")])
def test_text_is_read_as_it_was_written(text: str) -> None:
    program = from_text(text)
    assert from_text(to_text(program)) == program
    assert hash(from_text(to_text(program))) == hash(program)


def test_the_example_in_the_docstring_is_a_program() -> None:
    assert module.__doc__
    lines = [line.partition("#")[0].strip() for line in module.__doc__.split("\n\n")[3].splitlines()]
    program = from_text("\n".join(lines))
    assert program.types[17] == Type("float32", (0, 1))
    logits, labels = np.zeros((3, 10), np.float32), np.int32([1, 5, 9])
    loss, gradient = run(program, [logits, labels])
    np.testing.assert_allclose(loss, np.log(10), rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.1 - (np.arange(10) == labels[:, None]), rtol=1e-5)


def test_types() -> None:
    program = from_text(EVERYTHING.replace("input 1 a1", "input 1 a0"))
    assert program.types == (
        ("int64", (0,)),
        ("float32", (0, 1)),
        ("bool", ()),
        ("float64", ()),
        ("int32", ()),
        ("bool", ()),
        ("float32", ()),
        ("float32", (0, 1)),
        ("int64", (2,)),
        ("float32", ()),
    )
    assert program.live == (True, True, True, True, False, False, True, True, False, True)
    expected = Index(7, (AxisTerm(0, 2), AxisTerm(1, -3, 4, 3)), (0,))
    assert program.nodes[1].index[0] == expected  # type: ignore[union-attr]


HEAD = "program 1\naxes 0 4\ntensor float32 2\ntensor bool 1\ninput 0 a0 a1\ninput 1 a0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("program 2\naxes 3\n", "expected 'program 1'"),
        ("", "expected 'program 1' on the first line, found ''"),
        ("program 1\n", "one line 'axes"),
        (HEAD + "axes 3", "one line 'axes"),
        ("program 1\naxes 0\n", "nothing says its size"),
        ("program 1\naxes -1\n", "size -1"),
        ("program 1\naxes 3\ntensor float8 1\n", "dtype 'float8'"),
        (HEAD + "add 0 2", "reads node 2"),
        (HEAD + "add 0 -1", "reads node -1"),
        (HEAD + "add 0", "1 arguments; expected 2"),
        (HEAD + "add 0 1", "cast them to one"),
        (HEAD + "exp 1", "dtype 'bool'; expected one of float64"),
        (HEAD + "logical_not 0", "dtype 'float32'; expected one of bool"),
        (HEAD + "select 0 0 0", "dtype 'float32'; expected one of bool"),
        (HEAD + "frobnicate 0", "cannot read the line 'frobnicate 0'"),
        (HEAD + "input 2 a0", "there are 2 tensors"),
        (HEAD + "input 0 a0", "1 indices of a tensor of rank 2"),
        (HEAD + "input 0 a0 a2", "there are 2 axes"),
        (HEAD + "input 0 a0 a1/0", "divisor"),
        (HEAD + "input 0 a0 b1", "cannot read"),
        (HEAD + "input 0 a0 n0", "expected one of int32, int64"),
        (HEAD + "constant int32 0.5", "cannot read"),
        (HEAD + "constant bool 1", "cannot read"),
        (HEAD + "position float32 1", "expected one of int32"),
        (HEAD + "position int32 2", "there are 2 axes"),
        (HEAD + "cast float8 1", "dtype 'float8'"),
        (HEAD + "reduce median 0 1", "unknown reduction"),
        (HEAD + "reduce sum 0", "expected axes, each once"),
        (HEAD + "reduce sum 0 1 1", "expected axes, each once"),
        (HEAD + "reduce sum 1 0", "dtype 'bool'; expected one of float64"),
        (HEAD + "reduce any 0 0", "dtype 'float32'; expected one of bool"),
        (HEAD + "output 2", "node 2 of 2"),
        (HEAD + "output 0 0", "varies along axes"),
        (HEAD + "output 0 0 0", "hold one twice"),
        (HEAD + "output 0 0 2", "axes"),
        (HEAD + "\n", "cannot read the line ''"),
    ],
)
def test_what_is_no_program(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        from_text(text)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4)], "ranks"),
        ([(3, 4), (3, 1)], "ranks"),
        ([(3, 4), (2,)], "axis 0 has size 3, and 2 in tensor 1"),
        ([(3, 3), (3,)], "read at 0 to 3 of a dimension of size 3"),
    ],
)
def test_tensors_that_do_not_fit(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        from_text(HEAD).sizes(shapes)


def test_sizes() -> None:
    program = from_text(HEAD)
    assert program.sizes([(3, 4), (3,)]) == (3, 4)
    assert program.sizes([(3, 9), (3,)]) == (3, 4)  # the first four columns
    assert program.sizes([(0, 4), (0,)]) == (0, 4)


def test_indices_out_of_bounds() -> None:
    text = "program 1\naxes 0\ntensor int32 1\ntensor float32 1\ninput 0 a0\ninput 1 n0\noutput 1 0\n"
    table = np.float32([1, 2, 3])
    np.testing.assert_array_equal(run(from_text(text), [np.int32([2, 0]), table])[0], [3, 1])
    for wrong in (3, -1):
        with pytest.raises(ProgramError, match="of a dimension of size 3"):
            run(from_text(text), [np.int32([2, wrong]), table])


def test_dtypes_that_do_not_fit() -> None:
    with pytest.raises(ProgramError, match=r"expected tensors of dtypes \['float32', 'bool'\], found"):
        run(from_text(HEAD), [np.zeros((3, 4)), np.zeros(3, bool)])
