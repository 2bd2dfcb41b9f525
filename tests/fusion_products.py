"""Programs that hold products of matrices, with tensors for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr import reference
from custom_ops.expr.nodes import Cast, Constant
from custom_ops.expr.program import Program, Tensor
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.text import from_text

Given = tuple[Program, list[NDArray[Any]]]


def drawn(dtype: str, *shape: int, seed: int = 0) -> NDArray[Any]:
    """Normal numbers."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(numpy_dtype(dtype))


def product(
    rows: int, columns: int, depth: int, left: str = "a0 a2", right: str = "a2 a1", dtype: str = "float32"
) -> Given:
    """`[rows, depth]` times `[depth, columns]`, either of them transposed."""
    half = dtype in ("float16", "bfloat16")
    wide = ["cast float32 0", "cast float32 1", "multiply 2 3", "reduce dot 4 2", f"cast {dtype} 5", "output 6 0 1"]
    lines = [
        *("program 1", "axes 0 0 0", f"tensor {dtype} 2", f"tensor {dtype} 2", f"input 0 {left}", f"input 1 {right}"),
        *(wide if half else ["multiply 0 1", "reduce dot 2 2", "output 3 0 1"]),
    ]
    shapes = [
        (rows, depth) if left == "a0 a2" else (depth, rows),
        (depth, columns) if right == "a2 a1" else (columns, depth),
    ]
    return from_text("\n".join(lines) + "\n"), [drawn(dtype, *shape, seed=i) for i, shape in enumerate(shapes)]


def layer(rows: int, columns: int, depth: int) -> Given:
    """A mask and a scale before the product, a bias, an activation and a residual behind it; and the mask's sum."""
    program = from_text("""program 1
axes 0 0 0
tensor float32 2
tensor float32 2
tensor float32 2
tensor float32 1
tensor float32 2
tensor float32 1
input 0 a0 a2
input 1 a0 a2
constant float32 0.0
greater 1 2
select 3 0 2
input 5 a0
multiply 4 5
input 2 a2 a1
multiply 6 7
reduce dot 8 2
input 3 a1
add 9 10
relu 11
input 4 a0 a1
add 12 13
reduce sum 4 2
output 14 0 1
output 11 1 0
output 15 0
""")
    shapes = [(rows, depth), (rows, depth), (depth, columns), (columns,), (rows, columns), (rows,)]
    return program, [drawn("float32", *shape, seed=i) for i, shape in enumerate(shapes)]


def heads(batch: int, heads: int, length: int, keys: int, size: int) -> Given:
    """Scores of attention: queries [batch, length, heads, size], keys [heads, keys, size] for a whole batch."""
    program = from_text("""program 1
axes 0 0 0 0 0
tensor float32 4
tensor float32 3
input 0 a0 a2 a1 a4
constant float32 0.125
multiply 0 1
input 1 a1 a3 a4
multiply 2 3
reduce dot 4 4
output 5 0 1 2 3
""")
    return program, [drawn("float32", batch, length, heads, size), drawn("float32", heads, keys, size, seed=1)]


def together(rows: int, columns: int, depth: int) -> Given:
    """Three products with one left factor, one of them split into heads of 4, and a gate of two products."""
    program = from_text("""program 1
axes 0 0 0
tensor float32 2
tensor float32 2
tensor float32 2
tensor float32 2
tensor float32 2
input 0 a0 a2
input 1 a2 a1
multiply 0 1
reduce dot 2 2
input 2 a2 a1
multiply 0 4
reduce dot 5 2
input 3 a1 a2
multiply 0 7
reduce dot 8 2
input 4 a0 a2
multiply 7 10
reduce dot 11 2
sigmoid 12
multiply 9 13
output 3 0 1
output 6 1 0
output 14 0 1
""")
    shapes = [(rows, depth), (depth, columns), (depth, columns), (columns, depth), (rows, depth)]
    return program, [drawn("float32", *shape, seed=i) for i, shape in enumerate(shapes)]


def attention(heads: int, length: int, size: int) -> Given:
    """Scores, their softmax, and values: products that wait for each other."""
    program = from_text("""program 1
axes 0 0 0 0 0
tensor float32 3
tensor float32 3
tensor float32 3
input 0 a0 a1 a3
input 1 a0 a2 a3
multiply 0 1
reduce dot 2 3
reduce max 3 2
subtract 3 4
exp 5
reduce sum 6 2
divide 6 7
input 2 a0 a2 a4
multiply 8 9
reduce dot 10 2
output 11 0 1 4
""")
    return program, [drawn("float32", heads, length, size, seed=i) for i in range(3)]


def softmax(batch: int, rows: int, columns: int, depth: int) -> Given:
    """Scores with a mask and their softmax, whose rows are those of the product; also the logarithm of the row's sum,
    for each of its elements, and the row's mean."""
    program = from_text("""program 1
axes 0 0 0 0
tensor float32 3
tensor float32 3
tensor float32 2
input 0 a0 a1 a3
input 1 a0 a2 a3
multiply 0 1
reduce dot 2 3
input 2 a1 a2
add 3 4
reduce max 5 2
subtract 5 6
exp 7
reduce sum 8 2
divide 8 9
log 9
subtract 7 11
reduce mean 3 2
multiply 12 13
output 10 0 1 2
output 14 2 0 1
""")
    shapes = [(batch, rows, depth), (batch, columns, depth), (rows, columns)]
    return program, [drawn("float32", *shape, seed=i) for i, shape in enumerate(shapes)]


def exact(program: Program, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """In float64."""
    wide = tuple(Tensor("float64", tensor.rank) for tensor in program.tensors)
    nodes = tuple(
        replace(node, dtype="float64") if isinstance(node, Constant | Cast) else node for node in program.nodes
    )
    return reference.run(replace(program, tensors=wide, nodes=nodes), [tensor.astype(np.float64) for tensor in tensors])
