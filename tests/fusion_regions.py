"""Regions built by hand. A caller says how a product is called, since its attributes are TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, TensorType

# A MatMul of two values that gives a third: with the first one transposed, or not.
Product: TypeAlias = Callable[[tuple[int, int], int, bool], Call]

# Axes: rows, classes. The product x @ w, the bias, the labels.
SOFTMAX = """program 1
axes 0 10
tensor float32 2
tensor float32 1
tensor float32 2
input 0 a0 a1
input 1 a1
add 0 1
reduce max 2 1
subtract 2 3
exp 4
reduce sum 5 1
divide 5 6
input 2 a0 a1
log 7
multiply 8 9
reduce sum 10 1
negate 11
reduce mean 12 0
constant float32 1.0
reduce sum 14 0
subtract 7 8
divide 16 15
reduce sum 17 0
constant float32 0.1
multiply 19 18
subtract 1 20
output 13
output 17 0 1
output 21 1
"""

# A variable of two dimensions, its gradient.
DESCENT = """program 1
axes 0 0
tensor float32 2
tensor float32 2
input 0 a0 a1
input 1 a0 a1
constant float32 0.1
multiply 1 2
subtract 0 3
output 4 0 1
"""


def softmax_step(product: Product, rows: int | None = None, features: int = 784) -> Region:
    """A step of softmax regression with rate 0.1: takes x and one-hot y, gives the mean loss, updates w and b."""
    w, b = TensorType("float32", (features, 10)), TensorType("float32", (10,))
    wide, loss = TensorType("float32", (rows, 10)), TensorType("float32", ())
    return Region(
        inputs=2,
        variables=(w, b),
        values=(TensorType("float32", (rows, features)), wide, w, b, wide, loss, wide, b, w, w),
        steps=(
            Read(0, 2),
            Read(1, 3),
            product((0, 2), 4, False),
            Kernel(from_text(SOFTMAX), (4, 3, 1), (5, 6, 7), ("Softmax", "Mean", "sub")),
            Assign(1, 7),
            product((0, 6), 8, True),
            Kernel(from_text(DESCENT), (2, 8), (9,), ("ResourceApplyGradientDescent",)),
            Assign(0, 9),
        ),
        outputs=(5,),
    )
