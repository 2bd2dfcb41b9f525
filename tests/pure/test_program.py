"""Programs over tensors: their text, what they refuse, and shapes that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.errors import ProgramError
from custom_ops.expr import program as module
from custom_ops.expr.nodes import AxisTerm, Index, Input
from custom_ops.expr.philox import draw, philox
from custom_ops.expr.program import Type
from custom_ops.expr.reference import run
from custom_ops.expr.table_entry import INTEGER_RANGES, INTEGERS
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


DRAWS = """program 1
axes 0 4
tensor float32 2
tensor uint64 1
tensor uint64 1
input 0 a0 a1
random float32 1 2 4*a0+a1
random int64 1 2 3+8*a0
add 0 1
output 3 0 1
output 2 0
"""


def test_random_numbers() -> None:
    program = from_text(DRAWS)
    assert from_text(to_text(program)) == program
    assert program.types[1:3] == (("float32", (0, 1)), ("int64", (0,)))
    x, key, counter = np.ones((3, 4), np.float32), np.array([7], np.uint64), np.array([1, 2], np.uint64)
    found, bits = run(program, [x, key, counter])
    np.testing.assert_array_equal(found, x + draw("float32", key, counter, np.arange(12).reshape(3, 4)))
    np.testing.assert_array_equal(bits, draw("int64", key, counter, 3 + 8 * np.arange(3)))
    for shapes, message in (
        (((3, 4), (2,), (2,)), "a key of 2 numbers and a counter of 2; expected 1 and 2"),
        (((3, 4), (1,), (0,)), "a key of 1 numbers and a counter of 0"),
    ):
        with pytest.raises(ProgramError, match=message):
            program.sizes(shapes)
    with pytest.raises(ProgramError, match="from number -1 on"):
        from_text(DRAWS.replace("3+8*a0", "-1+8*a0")).sizes(((3, 4), (1,), (2,)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("random bool 1 2 a0", "dtype 'bool'; expected one of float64"),
        ("random float32 0 2 a0", "tensors 0 and 2 are no state"),
        ("random float32 1 3 a0", "tensors 1 and 3 are no state"),
        ("random float32 1 2 n0", "an index that is a value"),
        ("random float32 1 2 a2", "there are 2 axes"),
        ("random float32 1 2 a0/0", "divisor"),
        ("random float32 1 2", "cannot read line"),
        ("input 1 a0", "reads the state of a random generator"),
        ("constant uint64 1", "dtype 'uint64'"),
        ("cast uint64 0", "dtype 'uint64'"),
    ],
)
def test_what_draws_nothing(line: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        from_text(DRAWS + line + "\n")


def test_philox_has_its_published_numbers() -> None:
    """The numbers are those of Random123's kat_vectors, philox4x32 of 10 rounds."""
    none = np.zeros(1, np.int64)
    words = [int(word[0]) for word in philox(0, (0, 0), none)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    words = [int(word[0]) for word in philox(ones, (ones, ones), none)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


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
        ("program 1\naxes 0\n", "its size is unknown"),
        ("program 1\naxes -1\n", "size -1"),
        ("program 1\naxes 3\ntensor float8 1\n", "dtype 'float8'"),
        (HEAD + "add 0 2", "reads node 2"),
        (HEAD + "add 0 -1", "reads node -1"),
        (HEAD + "add 0", "1 arguments; expected 2"),
        (HEAD + "add 0 1", "cast them to one"),
        (HEAD + "exp 1", "dtype 'bool'; expected one of float64"),
        (HEAD + "logical_not 0", "dtype 'float32'; expected one of bool"),
        (HEAD + "select 0 0 0", "dtype 'float32'; expected one of bool"),
        (HEAD + "frobnicate 0", "cannot read line 7 of a program, 'frobnicate 0'"),
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


def test_more_axes_than_the_op_reads() -> None:
    with pytest.raises(ProgramError, match=f"{module.MOST_AXES + 1} axes; expected at most {module.MOST_AXES}"):
        module.Program((1,) * (module.MOST_AXES + 1), (), (), ())


@pytest.mark.parametrize(
    ("tensor", "index", "message"),
    [
        (module.Tensor("int32", module.MOST_AXES + 1), (Index(),) * (module.MOST_AXES + 1), "dimensions; expected"),
        (module.Tensor("int32", 1), (Index(1, (AxisTerm(0),) * module.MOST_TERMS),), "terms; expected at most"),
        (module.Tensor("int32", 1), (Index(-module.MOST_FACTOR - 1),), "a number in an index that is beyond"),
        (module.Tensor("int32", 1), (Index(0, (AxisTerm(0, module.MOST_FACTOR + 1),)),), "a number in an index"),
    ],
)
def test_what_the_op_does_not_read_is_refused(tensor: module.Tensor, index: tuple[Index, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        module.Program((1,), (tensor,), (Input(0, index),), ())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_all_bits(dtype: str) -> None:
    """As text and in the reference they stay what they are; what a dtype does not hold is refused."""
    for value in INTEGER_RANGES[dtype]:
        text = f"program 1\naxes\nconstant {dtype} {value}\nconstant {dtype} 1\nsubtract 0 1\nadd 2 1\noutput 3\n"
        program = from_text(text)
        assert to_text(program) == text
        assert run(program, [])[0] == value
    low, high = INTEGER_RANGES[dtype]
    for value in (low - 1, high + 1):
        with pytest.raises(ProgramError, match=f"a value that {dtype} does not hold; expected {low} to {high}"):
            from_text(f"program 1\naxes\nconstant {dtype} {value}\noutput 0\n")


def test_the_reference_has_as_many_axes_as_a_program() -> None:
    """More than the dimensions that an array of NumPy had before its second version."""
    count = module.MOST_AXES
    inputs = "".join(f"input {axis} a{axis}\n" for axis in range(count))
    sums = "".join(f"reduce sum {axis} {axis}\n" for axis in range(count))
    added = f"add {count} {count + 1}\n" + "".join(
        f"add {2 * count + axis} {count + axis + 2}\n" for axis in range(count - 2)
    )
    head = f"program 1\naxes{' 0' * count}\n" + "tensor int64 1\n" * count
    program = from_text(f"{head}{inputs}{sums}{added}output {3 * count - 2}\noutput {count - 1} {count - 1}\n")
    tensors = [np.arange(axis % 3 + 2) * axis for axis in range(count)]
    total, last = run(program, tensors)
    assert total == sum(tensor.sum() for tensor in tensors)
    np.testing.assert_array_equal(last, tensors[-1])
