"""Programs that several tests run: the elementwise ops and reductions of logistic regression."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr.program import Program
from custom_ops.expr.text import from_text

# Gathers of rows, and of one number for each position; reductions that keep some of the rows' axes.
GATHERS = """program 1
axes 0 4 3 0
tensor float32 2
tensor int32 1
tensor float64 3
input 1 a0
constant int32 1
minimum 0 1
constant int32 0
maximum 2 3
input 0 n4 a3
position int64 1
position int64 2
add 6 7
input 2 a0 n8 a2+n6
cast float32 9
multiply 5 10
reduce sum 11 0
reduce max 11 1 3
reduce mean 11 0 2
subtract 11 14
output 12 1 2 3
output 13 0 2
output 15 3 2 1 0
output 5 0 3
"""
# Axes: rows, classes, features. The products x @ weights and x^T @ gradient are given; all else of a step is here.
SOFTMAX_STEP = """program 1
axes 0 0 0
tensor float32 2
tensor float32 1
tensor int32 1
tensor float32 2
tensor float32 2
tensor float32 0
input 0 a0 a1
input 1 a1
add 0 1
reduce max 2 1
subtract 2 3
exp 4
reduce sum 5 1
log 6
subtract 4 7
input 2 a0
position int32 1
equal 9 10
constant float32 0.0
select 11 8 12
reduce sum 13 1
negate 14
reduce mean 15 0
divide 5 6
cast float32 11
subtract 17 18
constant float32 1.0
reduce sum 20 0
divide 19 21
reduce sum 22 0
input 5
multiply 24 23
subtract 1 25
input 3 a2 a1
input 4 a2 a1
multiply 24 28
subtract 27 29
output 16
output 22 0 1
output 26 1
output 30 2 1
"""

# Axes: rows, features. Logits and their gradient are sums over products here: a whole step of training.
SIGMOID_STEP = """program 1
axes 0 0
tensor float32 2
tensor float32 1
tensor float32 1
tensor bool 1
input 0 a0 a1
input 1 a1
multiply 0 1
reduce sum 2 1
input 2 0
add 3 4
input 3 a0
cast float32 6
relu 5
multiply 5 7
subtract 8 9
absolute 5
negate 11
exp 12
log1p 13
add 10 14
reduce mean 15 0
sigmoid 5
subtract 17 7
multiply 18 0
reduce mean 19 0
constant float32 0.5
multiply 20 21
subtract 1 22
reduce mean 18 0
multiply 24 21
subtract 4 25
output 16
output 23 1
output 26
"""


def softmax_step(rows: int, classes: int, features: int, seed: int = 0) -> tuple[Program, list[NDArray[Any]]]:
    """The program and tensors for it: x @ weights, bias, labels, weights, their gradient, the learning rate."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[Any]:
        return random.normal(size=shape).astype(np.float32)

    labels = random.integers(0, classes, rows).astype(np.int32)
    weights, gradient = normal(features, classes), normal(features, classes)
    tensors = [3 * normal(rows, classes), normal(classes), labels, weights, gradient, np.float32(0.1).reshape(())]
    return from_text(SOFTMAX_STEP), tensors


def sigmoid_step(rows: int, features: int, seed: int = 0) -> tuple[Program, list[NDArray[Any]]]:
    """The program and tensors for it: x, weights, bias, labels."""
    random = np.random.default_rng(seed)
    x, weights = (random.normal(size=shape).astype(np.float32) for shape in ((rows, features), features))
    return from_text(SIGMOID_STEP), [x, weights, np.float32([0.25]), random.random(rows) < 0.5]
