"""Functions of `tfmem.dynamic.trace` on tensors of any shape: TensorFlow's values and gradients, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfmem import dynamic

ROWS, WIDTH, MOST = 3, 12, 180
Vectors = list[tf.Tensor]


class Net:
    """Two tables, a square matrix of their width, another one that is not square, a vector, and weights of results."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def variable(*shape: int) -> tf.Variable:
            return tf.Variable(random.normal(size=shape).astype(np.float32))

        self.table, self.square = variable(ROWS, WIDTH), variable(WIDTH, WIDTH)
        self.matrix, self.vector = variable(WIDTH, 4), variable(WIDTH)
        self.more, self.weights = variable(ROWS, WIDTH), variable(MOST)
        self.parameters = [self.table, self.square, self.matrix, self.vector, self.more, self.weights]

    def compare(self, function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> None:
        """Losses, states and gradients of `function(x, number)`, of each row of the table with its number.

        Raises:
            DynamicError: the only other result there may be.
        """

        def cell(children, row):
            value = function(tf.nn.embedding_lookup(self.table, row), row)
            flat = tf.reshape(value, [-1])
            weighted = tf.tanh(flat) * self.weights[: flat.shape[0]]  # so that numbers that change places are seen
            return dynamic.Result(state=flat, loss=tf.reduce_sum(weighted), outputs=flat)

        handle = dynamic.specialize(self.parameters, {"row": dynamic.trace(cell)})
        found = handle.forward_backward([handle.node("row", row) for row in range(ROWS)])
        with tf.GradientTape() as tape:
            plain = [cell((), tf.constant(row)) for row in range(ROWS)]
            losses = [result.loss for result in plain]
            total = tf.add_n(losses)
        expected = tape.gradient(total, self.parameters, unconnected_gradients="zero")
        np.testing.assert_allclose(found.outputs[0], [result.outputs for result in plain], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.losses, losses, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(found.gradients, expected, strict=True):
            np.testing.assert_allclose(tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs), rtol=1e-3, atol=1e-4)


NET = Net()
MATRIX, VECTOR = [3, 4], [12]


@tf.RegisterGradient("TfmemTestTripled")
def _tripled(op, gradient):
    return gradient * 3


def tripled(x: tf.Tensor) -> tf.Tensor:
    with tf.compat.v1.get_default_graph().gradient_override_map({"Tanh": "TfmemTestTripled"}):
        return tf.tanh(x)


WRONG = {
    "lookup along columns": lambda x, i: x * tf.gather(NET.square, i, axis=1),
    "a matrix that was reshaped": lambda x, i: x[:6] * tf.gather(tf.reshape(NET.square, [24, 6]), i),
    "product with a matrix that was reshaped": lambda x, i: tf.linalg.matvec(tf.reshape(NET.matrix, [4, 12]), x),
    "an effect": lambda x, i: NET.vector.assign_add(tf.ones([WIDTH])) * x,
    "a custom gradient": lambda x, i: tf.grad_pass_through(tf.square)(x),
    "a registered gradient": lambda x, i: tripled(x),
    "integers": lambda x, i: tf.cast(tf.raw_ops.Div(x=tf.where(x > 0, 3, 1), y=2), tf.float32),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_vectors_cannot_say_is_an_error_with_the_op_and_the_line(name: str) -> None:
    with pytest.raises(dynamic.DynamicError) as found:
        NET.compare(WRONG[name])
    message = str(found.value)
    assert re.search(r"^kind 'row': op '[^']+' \(\w+\): ", message), message
    assert re.search(rf"\[{re.escape(str(Path(__file__).resolve()))}:\d+: .+\]$", message), message


def test_the_line_is_the_one_of_the_op() -> None:
    def cell(children):
        x = tf.reshape(NET.vector, [3, 4])
        return tf.math.cumprod(x, axis=1)[:, 0]

    message = (
        rf"test_dynamic_shapes\.py:{cell.__code__.co_firstlineno + 2}: return tf\.math\.cumprod\(x, axis=1\)\[:, 0\]\]"
    )
    with pytest.raises(dynamic.DynamicError, match=message):
        dynamic.specialize(NET.parameters, {"row": dynamic.trace(cell)})


RIGHT = {
    "softmax of rows": lambda x, i: tf.nn.softmax(tf.reshape(x, MATRIX)),
    "a vector that is a matrix": lambda x, i: tf.matmul(x[None], tf.reshape(NET.vector, [12, 1])) * x,
    "mean of rows": lambda x, i: tf.reduce_mean(tf.reshape(x, MATRIX), 1),
    "mean of columns": lambda x, i: tf.reduce_mean(tf.reshape(x, MATRIX), 0),
    "sum of rows": lambda x, i: tf.reduce_sum(tf.reshape(x, MATRIX), -1),
    "maximum of rows": lambda x, i: tf.reduce_max(tf.reshape(x, MATRIX), 1),
    "concat along columns": lambda x, i: tf.concat([tf.reshape(x, MATRIX), tf.reshape(x * 2, MATRIX)], 1),
    "split along columns": lambda x, i: tf.split(tf.reshape(x, MATRIX), 2, 1)[1],
    "parts of columns": lambda x, i: tf.split(tf.reshape(x, MATRIX), [1, 3], -1)[0],
    "outer product": lambda x, i: x[:4, None] * x[None, :4],
    "a row to each row": lambda x, i: tf.reshape(x, MATRIX) + x[:4],
    "bias": lambda x, i: tf.nn.bias_add(tf.reshape(x, MATRIX), x[:4]),
    "rows backwards": lambda x, i: tf.reshape(x[:8], [2, 4])[:, 1::-1],
    "product of rows": lambda x, i: tf.matmul(tf.reshape(x, [3, 4]), NET.matrix, transpose_b=True),
    "select of rows": lambda x, i: tf.raw_ops.Select(
        condition=x[:3] > 0, x=tf.reshape(x, [3, 4]), y=tf.reshape(-x, [3, 4])
    ),
    "select of rows of a square": lambda x, i: tf.raw_ops.Select(
        condition=x[:3] > 0, x=tf.reshape(x[:9], [3, 3]), y=tf.reshape(-x[:9], [3, 3])
    ),
    "softmax of one row": lambda x, i: tf.nn.softmax(x[None]) * x,
    "a column": lambda x, i: tf.reshape(x, [12, 1]) * tf.reshape(tf.exp(x), [12, 1]),
    "sums of one number": lambda x, i: tf.reduce_sum(x[:, None], 1) * 3,
    "no axis": lambda x, i: tf.reshape(tf.reduce_max(x, []), MATRIX) + tf.reduce_mean(tf.reshape(x, MATRIX), []) * 2,
    "all axes": lambda x, i: x * tf.reduce_mean(tf.reshape(x, MATRIX), [0, 1]),
    "all axes that are not 1": lambda x, i: x * tf.reduce_sum(tf.reshape(x, [1, 12, 1]), 1),
    "rows after each other": lambda x, i: tf.concat([tf.reshape(x, MATRIX), tf.reshape(x * 2, MATRIX)], 0),
    "columns of one row": lambda x, i: tf.concat([x[None], tf.tanh(x)[None]], 1),
    "rows of a matrix": lambda x, i: tf.split(tf.reshape(x, MATRIX), 3)[1] * 2,
    "a row": lambda x, i: tf.reshape(x, MATRIX)[2] * x[:4],
    "a part of a row": lambda x, i: tf.reshape(x, MATRIX)[1, 1:3],
    "a number to each": lambda x, i: tf.reshape(x, MATRIX) + tf.reduce_sum(x)[None, None] * 0.1,
    "a row times a matrix": lambda x, i: tf.matmul(tf.reshape(x, [1, 12]), NET.matrix),
    "a matrix times a column": lambda x, i: tf.matmul(NET.matrix, tf.reshape(x, [12, 1]), transpose_a=True),
    "a column, transposed": lambda x, i: tf.matmul(tf.reshape(x, [12, 1]), NET.matrix, transpose_a=True),
    "constants": lambda x, i: tf.concat([x, [2.0]], 0) * tf.nn.softmax(tf.constant([3.0])),
    "a constant of one number": lambda x, i: tf.reduce_sum(tf.reshape(tf.constant([[2.0]]), [1])) * x,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_vectors_can_say_is_tensorflows(name: str) -> None:
    NET.compare(RIGHT[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lookup along columns", r"it looks up along axis 1; expected axis 0"),
        ("a matrix that was reshaped", r"looks up a part of a parameter of shape \[12, 12\]; expected the whole"),
    ],
)
def test_the_error_says_what_was_found_and_expected(name: str, words: str) -> None:
    with pytest.raises(dynamic.DynamicError, match=words):
        NET.compare(WRONG[name])


def test_a_state_that_is_no_vector_is_an_error() -> None:
    kind = dynamic.trace(lambda children: tf.reshape(NET.vector, MATRIX))
    with pytest.raises(dynamic.DynamicError, match=r"its shape as state is \(3, 4\); expected a vector"):
        dynamic.specialize(NET.parameters, {"row": kind})


def test_what_is_returned_inside_of_something_else_is_an_error() -> None:
    def cell(children):
        return dynamic.Result(state=((NET.vector, tf.reduce_sum(NET.vector)),), loss=tf.reduce_max(NET.vector))

    with pytest.raises(dynamic.DynamicError, match="returns a value that is no vector"):
        dynamic.specialize(NET.parameters, {"row": dynamic.trace(cell)})


# ---- random functions ----


class Random:
    """Writes a function as a list of steps, each by the values before it; all choices are made when it is written, so
    that the function is one."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.steps: list[Callable[[Vectors], tf.Tensor]] = []
        self.shapes = [[WIDTH], [WIDTH]]

    def one_of(self, given):
        return given[int(self.random.integers(len(given)))]

    def write(self, length: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        makers = [self.reshape] * 3 + [self.binary, self.reduce, self.concat, self.split, self.product] * 2
        makers += [self.unary, self.softmax, self.slice, self.select, self.add_n]
        while len(self.steps) < length:
            step = self.one_of(makers)()
            if step is None:
                continue
            probe = tf.function(step).get_concrete_function([tf.TensorSpec(shape) for shape in self.shapes])
            shape = probe.outputs[0].shape.as_list()
            if 0 < np.prod(shape) <= MOST // 3 and len(shape) < 5:
                self.steps.append(step)
                self.shapes.append(shape)

        def function(x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
            values = [x, tf.nn.embedding_lookup(NET.more, number)]
            for step in self.steps:
                values.append(step(values))
            return tf.concat([tf.reshape(value, [-1]) for value in values[-3:]], 0)

        return function

    def any(self) -> int:
        """A value, rather one of the last."""
        return int(max(self.random.integers(len(self.shapes), size=2)))

    def reshape(self):
        i = self.any()
        sizes, rest = [], int(np.prod(self.shapes[i]))
        while rest > 1 and len(sizes) < 3:
            sizes.append(self.one_of([size for size in range(1, rest + 1) if rest % size == 0]))
            rest //= sizes[-1]
        sizes.insert(int(self.random.integers(len(sizes) + 1)), rest)
        return lambda values: tf.reshape(values[i], sizes)

    def unary(self):
        i, op = self.any(), self.one_of([tf.tanh, tf.square, tf.nn.relu, lambda x: tf.expand_dims(x, -1), tf.squeeze])
        return lambda values: op(values[i])

    def binary(self):
        i, j = self.any(), self.any()
        op = self.one_of([tf.add, tf.multiply, tf.maximum, tf.subtract])
        try:
            np.broadcast_shapes(self.shapes[i], self.shapes[j])
        except ValueError:
            return None
        return lambda values: op(values[i], values[j])

    def axis(self, i: int) -> int | None:
        rank = len(self.shapes[i])
        return int(self.random.integers(-rank, rank)) if rank else None

    def softmax(self):
        i = self.any()
        return (lambda values: tf.nn.softmax(values[i])) if self.shapes[i] else None

    def reduce(self):
        i, op = self.any(), self.one_of([tf.reduce_sum, tf.reduce_mean, tf.reduce_max])
        rank, keepdims = len(self.shapes[i]), bool(self.random.integers(2))
        axes = [axis for axis in range(rank) if self.random.integers(2)]
        return lambda values: op(values[i], axes, keepdims=keepdims)

    def concat(self):
        i, j = self.any(), self.any()
        axis = self.axis(i)
        if axis is None or len(self.shapes[i]) != len(self.shapes[j]):
            return None
        others = [np.delete(self.shapes[value], axis).tolist() for value in (i, j)]
        return (lambda values: tf.concat([values[i], values[j]], axis)) if others[0] == others[1] else None

    def split(self):
        i = self.any()
        axis = self.axis(i)
        if axis is None:
            return None
        size = self.shapes[i][axis]
        first = int(self.random.integers(1, size + 1))
        sizes = self.one_of([[first, size - first], [first, -1]]) if first < size else 1
        count = 2 if first < size else 1
        which = int(self.random.integers(count))
        return lambda values: tf.split(values[i], sizes, axis)[which]

    def slice(self):
        i, index = self.any(), []
        for size in self.shapes[i]:
            first = int(self.random.integers(size))
            last = int(self.random.integers(first, size)) + 1
            steps = [slice(None, None, -1), slice(first, None, 2)]
            index.append(self.one_of([*[slice(None), slice(first, last), first] * 3, *steps]))
        if self.random.integers(2):
            index.insert(int(self.random.integers(len(index) + 1)), self.one_of([..., None]))
        return lambda values: values[i][tuple(index)]

    def product(self):
        fitting = [i for i, shape in enumerate(self.shapes) if shape and WIDTH in shape[-2:] and len(shape) < 4]
        if not fitting:
            return None
        i, matrix = self.one_of(fitting), self.one_of([NET.square, NET.matrix])
        if len(self.shapes[i]) == 1:
            return lambda values: tf.linalg.matvec(matrix, values[i], transpose_a=True)
        if self.shapes[i][-1] == WIDTH:
            return lambda values: tf.matmul(values[i], matrix)
        return lambda values: tf.matmul(matrix, values[i], transpose_a=True)

    def select(self):
        i, j = self.any(), self.any()
        try:
            np.broadcast_shapes(self.shapes[i], self.shapes[j])
        except ValueError:
            return None
        return lambda values: tf.where(values[i] > 0, values[j], tf.cast(0.5, tf.float32))

    def add_n(self):
        i = self.any()
        alike = [j for j, shape in enumerate(self.shapes) if shape == self.shapes[i]]
        return lambda values: tf.add_n([values[j] for j in alike])


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 100), marks=pytest.mark.long)], ids=len)
def test_random_functions_compute_what_tensorflow_computes(seeds: range) -> None:
    for seed in seeds:
        function = Random(seed).write(3 + seed % 8)
        try:
            NET.compare(function)
        except (AssertionError, dynamic.DynamicError) as error:
            raise AssertionError(f"seed {seed}") from error
