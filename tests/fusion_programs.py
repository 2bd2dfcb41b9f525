"""Patterns that fusion kernels are tested with: what training steps have between their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr.program import Program
from custom_ops.expr.text import from_text
from tests.programs import sigmoid_step, softmax_step

Tensors = Sequence[NDArray[Any]]

SOFTMAX = """program 1
axes 0 0
tensor float32 2
input 0 a0 a1
reduce max 0 1
subtract 0 1
exp 2
reduce sum 3 1
divide 3 4
output 5 0 1
"""

# Softmax with dropout, and its gradient.
DROPOUT = """program 1
axes 0 {0}
tensor float32 2
tensor float32 2
tensor uint64 1
tensor uint64 1
input 0 a0 a1
reduce max 0 1
subtract 0 1
exp 2
reduce sum 3 1
divide 3 4
random float32 2 3 {0}*a0+a1
constant float32 0.25
greater_equal 6 7
constant float32 0.0
select 8 5 9
input 1 a0 a1
select 8 11 9
multiply 12 5
reduce sum 13 1
subtract 12 14
multiply 15 5
reduce sum 10 0
output 10 0 1
output 16 0 1
output 17 1
"""

# y = (x - mean) / sqrt(variance + epsilon) * scale + offset; the mean and 1 / sqrt are kept for the gradient.
LAYER_NORM = """program 1
axes 0 0
tensor float32 2
tensor float32 1
tensor float32 1
input 0 a0 a1
reduce mean 0 1
subtract 0 1
square 2
reduce mean 3 1
constant float32 0.001
add 4 5
reciprocal_sqrt 6
multiply 2 7
input 1 a1
multiply 8 9
input 2 a1
add 10 11
output 12 0 1
output 1 0
output 7 0
"""

# Of x, the gradient of y, scale, mean and 1 / sqrt(variance + epsilon): a row of x at a time, columns for the others.
LAYER_NORM_GRADIENT = """program 1
axes 0 0
tensor float32 2
tensor float32 2
tensor float32 1
tensor float32 1
tensor float32 1
input 0 a0 a1
input 1 a0 a1
input 2 a1
input 3 a0
input 4 a0
subtract 0 3
multiply 5 4
multiply 1 2
reduce mean 7 1
multiply 7 6
reduce mean 9 1
subtract 7 8
multiply 6 10
subtract 11 12
multiply 13 4
multiply 1 6
reduce sum 15 0
reduce sum 1 0
output 14 0 1
output 16 1
output 17 1
"""

# Batch normalisation of [batch, positions, channels] by its own statistics: two reductions in a chain, then an output.
BATCH_NORM = """program 1
axes 0 0 0
tensor float32 3
input 0 a0 a1 a2
reduce mean 0 0 1
subtract 0 1
square 2
reduce mean 3 0 1
constant float32 0.001
add 4 5
reciprocal_sqrt 6
multiply 2 7
output 1 2
output 4 2
output 8 0 1 2
"""

# An attention's weights over time, and what they pick: reductions over one axis, then over another, within a row.
POOLING = """program 1
axes 0 0 0
tensor float32 3
tensor float32 1
input 0 a0 a1 a2
input 1 a2
multiply 0 1
reduce sum 2 2
reduce max 3 1
subtract 3 4
exp 5
reduce sum 6 1
divide 6 7
multiply 0 8
reduce sum 9 1
tanh 10
output 8 0 1
output 11 0 2
"""

# GELU by the error function, its gradient, and the gradient's sums over rows.
GELU = """program 1
axes 0 0
tensor float32 2
tensor float32 1
tensor float32 2
input 0 a0 a1
input 1 a1
add 0 1
constant float32 0.7071067811865476
multiply 2 3
erf 4
constant float32 1.0
add 5 6
constant float32 0.5
multiply 2 8
multiply 9 7
square 2
constant float32 -0.5
multiply 11 12
exp 13
constant float32 0.3989422804014327
multiply 14 15
multiply 2 16
multiply 7 8
add 18 17
input 2 a0 a1
multiply 20 19
reduce sum 21 0
output 10 0 1
output 21 0 1
output 22 1
"""

# A transposed output beside a plain one, of half types too, and a reversed slice.
TRANSPOSES = """program 1
axes 0 0 0
tensor float32 3
tensor float16 3
input 0 a0 a1 a2
exp 0
input 1 a0 a1 a2
add 2 2
negate 0
output 1 0 2 1
output 3 0 2 1
output 4 2 0 1
"""

# Rows of a table by indices of which some may lie outside, their mean, and a position.
GATHER = """program 1
axes 0 0
tensor float32 2
tensor int32 1
tensor int64 2
input 1 a0
input 0 n0 a1
position int32 1
cast float32 2
add 1 3
input 2 a0 a1
input 0 n5 a1
multiply 4 6
reduce mean 7 1
reduce max 7 0 1
output 7 0 1
output 8 0
output 9
"""


def adam(shapes: Sequence[tuple[int, ...]]) -> tuple[Program, Tensors]:
    """The updates of several variables by Adam, with the powers of its betas, as one program."""
    axes, tensors, outputs = list[int](), ["tensor float32 0"] * 3, list[str]()
    nodes = [f"input {i}" for i in range(3)]  # learning rate, beta1's power, beta2's power
    constants = (0.9, 0.999, 0.1, 0.001, 1e-7, 1.0)
    nodes += [f"constant float32 {value}" for value in constants]
    beta1, beta2, rest1, rest2, epsilon, one = range(3, 9)

    def add(*words: object) -> int:
        nodes.append(" ".join(map(str, words)))
        return len(nodes) - 1

    root = add("sqrt", add("subtract", one, 2))
    rate = add("divide", add("multiply", 0, root), add("subtract", one, 1))
    random = np.random.default_rng(0)
    arrays = [np.float32(value).reshape(()) for value in (0.01, 0.9, 0.999)]
    for shape in shapes:
        first = len(axes)
        axes += [0] * len(shape)
        given = []
        for _ in range(4):  # the variable, its gradient, both moments
            given.append(add("input", len(tensors), *(f"a{first + i}" for i in range(len(shape)))))
            tensors.append(f"tensor float32 {len(shape)}")
            arrays.append(np.asarray(random.random(shape), np.float32))
        variable, gradient, m, v = given
        m = add("add", add("multiply", beta1, m), add("multiply", rest1, gradient))
        v = add("add", add("multiply", beta2, v), add("multiply", rest2, add("square", gradient)))
        step = add("divide", add("multiply", m, rate), add("add", add("sqrt", v), epsilon))
        dimensions = " ".join(str(first + i) for i in range(len(shape)))
        outputs += [f"output {node} {dimensions}" for node in (add("subtract", variable, step), m, v)]
    for power, beta in ((1, beta1), (2, beta2)):
        outputs.append(f"output {add('multiply', power, beta)}")
    lines = ["program 1", " ".join(map(str, ["axes", *axes])), *tensors, *nodes, *outputs]
    return from_text("\n".join(lines)), arrays


def programs(rows: int = 37, columns: int = 20) -> dict[str, tuple[Program, Tensors]]:
    """Each pattern by name, with tensors of about this size."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[Any]:
        return random.normal(size=shape).astype(np.float32)

    x, y, scale, offset = normal(rows, columns), normal(rows, columns), normal(columns), normal(columns)
    statistics = [x.mean(1), 1 / np.sqrt(x.var(1) + np.float32(0.001))]
    few = max(rows // 8, 1)
    indices = random.integers(0, rows, (2, rows, columns))
    return {
        "softmax": (from_text(SOFTMAX), [x]),
        "cross entropy": softmax_step(rows, columns, 7),
        "logistic": sigmoid_step(rows, columns),
        "layer norm": (from_text(LAYER_NORM), [x, scale, offset]),
        "layer norm gradient": (from_text(LAYER_NORM_GRADIENT), [x, y, scale, *statistics]),
        "batch norm": (from_text(BATCH_NORM), [normal(few, 9, columns)]),
        "pooling": (from_text(POOLING), [normal(few, 9, columns), scale]),
        "gelu": (from_text(GELU), [x, offset, y]),
        "transposes": (from_text(TRANSPOSES), [normal(3, rows, columns), normal(3, rows, columns).astype(np.float16)]),
        "gather": (from_text(GATHER), [x, indices[0, :, 0].astype(np.int32), indices[1]]),
        "dropout": (
            from_text(DROPOUT.format(columns)),
            [x, y, np.full(1, 77, np.uint64), np.array([2**64 - 3, 5], np.uint64)],
        ),
        "adam": adam([(rows, columns), (columns,), (3, 5, columns), (1,), ()]),
    }
