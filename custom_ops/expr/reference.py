"""What a program computes, in NumPy: the definition that every other reader is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from custom_ops.errors import ProgramError
from custom_ops.expr.nodes import Cast, Constant, Elementwise, Index, Input, Position, Random, Reduce
from custom_ops.expr.philox import draw, seeded
from custom_ops.expr.program import Program
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import INTEGERS, Array

HALF_TYPES = ("float16", "bfloat16")


def run(program: Program, tensors: Sequence[Array]) -> list[Array]:
    """The outputs, for tensors of the declared dtypes and ranks.

    Half types are computed in float32 and rounded after each node; reductions of them are rounded once.

    Raises:
        ProgramError: dtypes or shapes do not fit the program, or an index is out of bounds.
    """
    found, expected = [str(tensor.dtype) for tensor in tensors], [tensor.dtype for tensor in program.tensors]
    if found != expected:
        raise ProgramError(f"expected tensors of dtypes {expected}, found {found}")
    sizes = program.sizes([tensor.shape for tensor in tensors])
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"):  # infinity and NaN are values like others
        for place in range(len(program.nodes)):
            if program.live[place]:
                result = _value(program, place, values, tensors, sizes)
                values[place] = result.astype(numpy_dtype(program.types[place].dtype), copy=False)
    results = []
    for output in program.outputs:
        axes = sorted(output.axes)
        order = [axes.index(axis) for axis in output.axes]
        narrow = _along(values[output.node], program.types[output.node].axes, axes).transpose(order)
        results.append(np.array(np.broadcast_to(narrow, [sizes[axis] for axis in output.axes])))
    return results


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype by the name that programs use."""
    if name == "bfloat16":
        import ml_dtypes  # TensorFlow's own, so that arrays of one can be given to the other

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _along(value: Array, own: Sequence[int], axes: Sequence[int]) -> Array:
    """A value with dimensions along its `own` axes, with one for each of `axes`: of size 1 where it does not vary."""
    size = dict(zip(own, value.shape, strict=True))
    return value.reshape([size.get(axis, 1) for axis in axes])


def _value(
    program: Program, number: int, values: dict[int, Array], tensors: Sequence[Array], sizes: Sequence[int]
) -> Array:
    """A node's value, with one dimension for each axis along which it varies: all axes may be too many for NumPy."""
    node, axes = program.nodes[number], program.types[number].axes
    if isinstance(node, Reduce):
        axes = tuple(sorted({*program.types[node.operand].axes, *node.axes}))

    def position(axis: int) -> Array:
        return _along(np.arange(sizes[axis]), (axis,), axes)

    def value(place: int) -> Array:
        return _along(values[place], program.types[place].axes, axes)

    def indices(index: Index, end: int) -> Array:
        total = np.full([1] * len(axes), index.offset)
        for term in index.terms:
            moved = position(term.axis) // term.divisor
            total = total + term.factor * (moved % term.modulus if term.modulus else moved)
        for place in index.nodes:
            total = total + value(place).astype(np.int64)
        if total.size and not 0 <= total.min() <= total.max() < end:
            raise ProgramError(f"{node}: index {total.min()} to {total.max()} of a dimension of size {end}")
        return total

    def wide(place: int) -> Array:
        found = value(place)
        return found.astype(np.float32) if str(found.dtype) in HALF_TYPES else found

    match node:
        case Input(tensor=tensor, index=index):
            read = tensors[tensor]
            return read[tuple(np.broadcast_arrays(*map(indices, index, read.shape)))] if index else read
        case Constant(dtype=dtype, value=constant):
            return np.array(constant, numpy_dtype(dtype))
        case Position(axis=axis):
            return position(axis)
        case Random(dtype=dtype, key=key, counter=counter, index=place):
            state = seeded(tensors[key]) if key == counter else (tensors[key], tensors[counter])
            found = draw(dtype, *state, indices(place, 1 << 62))
            return found.astype(numpy_dtype(dtype), copy=False)
        case Cast(operand=operand):
            return values[operand]
        case Reduce(kind=kind, operand=operand, axes=over):
            whole = np.broadcast_to(wide(operand), [sizes[axis] for axis in axes])
            return _reduce(kind, whole, tuple(axes.index(axis) for axis in over))
        case Elementwise(op=op, arguments=arguments):
            return np.asarray(TABLE[op].numpy(*map(wide, arguments)))


def _reduce(kind: str, value: Array, axes: tuple[int, ...]) -> Array:
    match kind:
        case "sum" | "dot" | "product":
            function = np.prod if kind == "product" else np.sum
            return function(value, axes, dtype=value.dtype)
        case "mean":
            return value.sum(axes, dtype=value.dtype) / np.prod([value.shape[axis] for axis in axes])
        case "max" | "min":
            extreme: Any = np.inf
            if str(value.dtype) in INTEGERS:
                extreme = np.iinfo(value.dtype).min if kind == "max" else np.iinfo(value.dtype).max
            elif kind == "max":
                extreme = -np.inf
            return (np.max if kind == "max" else np.min)(value, axes, initial=extreme)
        case _:
            return (np.any if kind == "any" else np.all)(value, axes)
