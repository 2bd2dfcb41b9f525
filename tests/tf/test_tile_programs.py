"""Programs over tensors on the CPU: compiled to a tile program, serialised, read again and interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import OpLibraryError
from custom_ops.expr.program import MOST_AXES, Program
from custom_ops.expr.reference import run as reference
from custom_ops.expr.text import to_text
from tests.programs import GATHERS, sigmoid_step, softmax_step
from tests.tf.tile_programs import Array, prepare, run

# What logistic regression does beside its products: p = softmax(logits + b), cost = mean(-sum(y log p, 1)), the
# gradient of the logits, and a step of gradient descent for b.
LOGISTIC = """program 1
axes 0 10
tensor float32 2
tensor float32 2
tensor float32 1
tensor float32 0
input 0 a0 a1
input 1 a0 a1
input 2 a1
input 3
add 0 2
reduce max 4 1
subtract 4 5
exp 6
reduce sum 7 1
divide 7 8
log 9
multiply 1 10
reduce sum 11 1
negate 12
reduce mean 13 0
subtract 9 1
constant float32 0.01
multiply 15 16
reduce sum 17 0
multiply 3 18
subtract 2 19
output 14
output 17 0 1
output 20 1
"""


def test_logistic_regression_trains_as_tensorflow_does() -> None:
    rows, features, classes, rate = 100, 784, 10, np.float32(0.05)
    random = np.random.default_rng(0)
    x = random.uniform(size=(rows, features)).astype(np.float32)
    y = np.eye(classes, dtype=np.float32)[random.integers(0, classes, rows)]
    theirs_w, theirs_b = tf.Variable(tf.zeros([features, classes])), tf.Variable(tf.zeros([classes]))
    ours_w, ours_b = np.zeros((features, classes), np.float32), np.zeros(classes, np.float32)
    first = last = 0.0
    for _ in range(50):
        with tf.GradientTape() as tape:
            p = tf.nn.softmax(x @ theirs_w + theirs_b)
            cost = tf.reduce_mean(-tf.reduce_sum(y * tf.math.log(p), axis=1))
        for variable, gradient in zip((theirs_w, theirs_b), tape.gradient(cost, (theirs_w, theirs_b)), strict=True):
            variable.assign_sub(rate * gradient)
        ours, slope, ours_b = run(
            LOGISTIC,
            [rows, classes],
            [x @ ours_w, y, ours_b, rate],
            *(("float32", []), ("float32", [rows, classes]), ("float32", [classes])),
        )
        ours_w = ours_w - rate * (x.T @ slope)
        np.testing.assert_allclose(ours, cost.numpy(), rtol=1e-5)
        first, last = first or float(ours), float(ours)
    assert last < 0.9 * first
    np.testing.assert_allclose(ours_b, theirs_b.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours_w, theirs_w.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "step", [softmax_step(7, 5, 6), softmax_step(300, 33, 64), sigmoid_step(32, 4), sigmoid_step(999, 70)]
)
def test_steps_of_regressions_are_the_references(step: tuple[Program, list[Array]]) -> None:
    """The classes are the columns of the first, and the rows are of two domains: of examples, and of features."""
    program, tensors = step
    expected = reference(program, tensors)
    shapes = [(str(array.dtype), array.shape) for array in expected]
    found = run(to_text(program), program.sizes([tensor.shape for tensor in tensors]), tensors, *shapes)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_columns_are_reduced_over_many_tiles_as_float64_has_it() -> None:
    text = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\nreduce sum 0 0\nreduce sum 0 0 1\nreduce max 0 0\n"
    text += "subtract 0 3\noutput 1 1\noutput 2\noutput 4 0 1\n"
    for rows, columns in ((1, 1), (3, 5), (1000, 3), (77, 2000), (5000, 64)):
        x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
        shapes = (("float32", [columns]), ("float32", []), ("float32", [rows, columns]))
        by_column, total, centred = run(text, [rows, columns], [x], *shapes)
        exact = x.astype(np.float64)
        np.testing.assert_allclose(by_column, exact.sum(0), rtol=1e-5, atol=1e-5 * np.sqrt(rows))
        np.testing.assert_allclose(total, exact.sum(), rtol=1e-5, atol=1e-5 * np.sqrt(x.size))
        np.testing.assert_array_equal(centred, x - x.max(0))


@pytest.mark.parametrize(
    ("index", "axes", "expected"),
    [
        ("a1 a0", [5, 4], lambda x: x.T),
        ("2*a0+1 a1+2", [1, 3], lambda x: x[1:3:2, 2:]),
        ("-1*a0+3 a1", [4, 5], lambda x: x[::-1]),
        ("a0/5 a0%5", [20], lambda x: x.reshape(-1)),
        ("a0/2%2+2*a1/2 0", [4, 4], lambda x: (x[:, 0])[np.add.outer(np.arange(4) // 2 % 2, 2 * (np.arange(4) // 2))]),
        ("a1 a2", [3, 4, 5], lambda x: np.broadcast_to(x, (3, 4, 5))),
        ("a2 a0", [5, 3, 4], lambda x: np.broadcast_to(x.T[:, None], (5, 3, 4))),
        ("3 1", [2, 3], lambda x: np.full((2, 3), x[3, 1])),
        ("a0 2", [4, 3], lambda x: np.broadcast_to(x[:, 2:3], (4, 3))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bool"])
def test_inputs_are_read_by_their_access(index: str, axes: list[int], expected, dtype: str) -> None:
    x = np.random.default_rng(1).normal(size=(4, 5)).astype(dtype)
    dimensions = " ".join(map(str, range(len(axes))))
    text = f"program 1\naxes {' '.join('0' for _ in axes)}\ntensor {dtype} 2\ninput 0 {index}\noutput 0 {dimensions}\n"
    (read,) = run(text, axes, [x], (dtype, axes))
    np.testing.assert_array_equal(read, expected(x))


def test_positions_and_outputs_with_dimensions_in_any_order() -> None:
    text = "program 1\naxes 3 0 0\nposition int64 0\nposition int64 1\nposition int64 2\nconstant int64 10\n"
    text += "multiply 0 3\nadd 4 1\nmultiply 5 3\nadd 6 2\noutput 7 2 0 1\noutput 1 1\n"
    numbers, second = run(text, [3, 4, 5], [], ("int64", [5, 3, 4]), ("int64", [4]))
    expected = np.fromfunction(lambda k, i, j: 100 * i + 10 * j + k, (5, 3, 4), dtype=np.int64)
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(second, np.arange(4))


def test_nothing_is_left_of_an_empty_axis() -> None:
    text = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\nreduce sum 0 0\nreduce max 0 1\nreduce mean 0 0 1\n"
    text += "output 0 0 1\noutput 1 1\noutput 2 0\noutput 3\n"
    for shape in ((0, 3), (3, 0), (0, 0)):
        outputs = [("float32", axes) for axes in (shape, shape[1:], shape[:1], [])]
        same, by_column, by_row, mean = run(text, shape, [np.zeros(shape, np.float32)], *outputs)
        assert same.shape == shape
        assert np.isnan(mean)
        np.testing.assert_array_equal(by_column, np.zeros(shape[1], np.float32))
        np.testing.assert_array_equal(by_row, np.full(shape[0], -np.inf, np.float32))


HEAD = "program 1\naxes 0 10\ntensor float32 2\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("program 2\naxes 1\n", "differ in version"),
        ("program 1\ntensor float32 2\n", "expected 'axes' at line 2 word 1, found 'tensor'"),
        (HEAD + "input 1 a0 a1\n", "input 1"),
        (HEAD + "input 0 a0\n", "input 0 a0"),
        (HEAD + "input 0 a0 a2\n", "a2"),
        (HEAD + "input 0 a0 1048576*a1/0\n", "/0"),
        (HEAD + "input 0 a0 a1\nadd 0 1\n", "add 0 1"),
        (HEAD + "input 0 a0 a1\nlogical_not 0\n", "logical_not"),
        (HEAD + "input 0 a0 a1\nreduce any 0 1\n", "float32"),
        (HEAD + "input 0 a0 a1\nselect 0 0 0\n", "select"),
        (HEAD + "input 0 a0 a1\noutput 0 1\n", "leaves out"),
        (HEAD + "constant int32 0.5\n", "0.5"),
        (HEAD + "input 0 a0 a1\ncast int32 0\ninput 0 a0 2*n1\n", "input 0 a0 2\\*n1"),
        (HEAD + "input 0 a0 a1\ninput 0 a0 n0\n", "gathers at values of float32"),
        (HEAD + "input 0 a0 n0\n", "input 0 a0 n0"),
        (HEAD + "frobnicate 0\n", "frobnicate"),
    ],
)
def test_a_wrong_program_is_refused_by_its_line(text: str, named: str) -> None:
    with pytest.raises(OpLibraryError, match=named):
        prepare(text, [1, 10], [[1, 10]])


def test_a_program_has_as_many_axes_as_python_writes() -> None:
    axes = " ".join("1" * MOST_AXES)
    text = f"program 1\naxes {axes}\nconstant float32 2.0\noutput 0 0 {MOST_AXES - 1}\n"
    prepare(text, [1] * MOST_AXES, [])
    with pytest.raises(OpLibraryError, match=r"expected at most .* numbers at line 2 .* in 'axes 1 1"):
        prepare(text.replace("axes ", "axes 1 "), [1] * (MOST_AXES + 1), [])


def test_sizes_are_checked_before_anything_runs() -> None:
    text = HEAD + "input 0 a0 a1\noutput 0 0 1\n"
    for axes, shapes, named in (
        ([4, 9], [[4, 10]], "axis 1 has 10"),
        ([5, 10], [[4, 10]], "index of tensor 0"),
        ([4, 10], [[4]], "2 dimensions"),
        ([4, 10], [], "found 2 and 0"),
        ([-1, 10], [[4, 10]], "negative"),
        ([1 << 60, 10], [[4, 10]], "too many"),
    ):
        with pytest.raises(OpLibraryError, match=named):
            prepare(text, axes, shapes)
    prepared = prepare(text, [4, 10], [[4, 10]])
    good, out = np.zeros((4, 10), np.float32), np.zeros((4, 10), np.float32)
    for inputs, outputs, named in (
        ([good[:3]], [out], "inputs of 160 bytes"),
        ([good], [out[:2]], "outputs of 160 bytes"),
        ([good], [], "outputs of 160 bytes"),
        ([np.zeros((10, 4), np.float32).T], [out], "contiguous"),
    ):
        with pytest.raises(OpLibraryError, match=named):
            prepared.run(inputs, outputs)


# The first gather's index is computed once more where it is used, in a later stage than that which checks it.
CHECKED_EARLIER = GATHERS.replace("output 13 0 2\n", "")


@pytest.mark.parametrize("rows", [1, 2])
def test_an_index_that_is_computed_twice_is_checked(rows: int) -> None:
    axes = [3, 4, 3, 2]
    tensors = [np.ones((rows, 2), np.float32), np.array([0, 1, 1], np.int32), np.ones((3, 6, 6))]
    outputs = ("float32", [4, 3, 2]), ("float32", [2, 3, 4, 3]), ("float32", [3, 2])
    if rows == 1:
        with pytest.raises(OpLibraryError, match=r"indices\[1\] = 1 is not in \[0, 1\)"):
            run(CHECKED_EARLIER, axes, tensors, *outputs)
    else:
        total, _, gathered = run(CHECKED_EARLIER, axes, tensors, *outputs)
        assert (total == 3.0).all()
        assert (gathered == 1.0).all()


def test_axes_that_nothing_shares_may_have_any_number_of_positions_together() -> None:
    """As many updates of variables as one kernel holds; of one axis, 2^60 numbers would be too many."""
    axes = [1 << 10] * 7
    head = "program 1\naxes " + " ".join(map(str, axes)) + "\n"
    tensors = "tensor float32 1\n" * len(axes)
    nodes = "".join(f"input {place} a{place}\nnegate {2 * place}\n" for place in range(len(axes)))
    outputs = "".join(f"output {2 * place + 1} {place}\n" for place in range(len(axes)))
    inputs = [np.full(size, place, np.float32) for place, size in enumerate(axes)]
    found = run(head + tensors + nodes + outputs, axes, inputs, *(("float32", [size]) for size in axes))
    assert all((array == -place).all() for place, array in enumerate(found))
