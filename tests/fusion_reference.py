"""What a region computes, in NumPy: the definition that every other reader is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from custom_ops.errors import RegionError
from custom_ops.expr import reference
from custom_ops.expr.table_entry import Array
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, Shape, View
from custom_ops.fusion.region_check import check, fits

# Runs a call: takes its inputs, and the values of its variables, which it may set.
CallFunction = Callable[[Call, Sequence[Array], list[Array]], Sequence[Array]]


def run(region: Region, inputs: Sequence[Array], variables: list[Array], call: CallFunction) -> list[Array]:
    """The outputs; `variables` are updated.

    Args:
        region: what to run.
        inputs: of the declared dtypes and shapes.
        variables: the value of each variable.
        call: what `Call`s compute; `products` (below) knows the ops that multiply matrices.

    Raises:
        RegionError: the region is malformed, or a value's dtype or shape is not the declared one.
        ProgramError: tensors do not fit a program.
    """
    check(region)
    if len(inputs) != region.inputs or len(variables) != len(region.variables):
        raise RegionError(
            f"expected {region.inputs} inputs and {len(region.variables)} variables, "
            f"found {len(inputs)} and {len(variables)}"
        )
    values: list[Array] = []

    def add(*results: Array) -> None:
        for result in results:
            declared = region.values[len(values)]
            if str(result.dtype) != declared.dtype or not fits(declared.shape, result.shape):
                raise RegionError(f"value {len(values)} is {result.dtype} of shape {result.shape}; expected {declared}")
            values.append(result)

    add(*inputs)
    for step in region.steps:
        match step:
            case Kernel(program=program, inputs=read):
                add(*reference.run(program, [values[place] for place in read]))
            case Call(inputs=read, variables=touched):
                held = [variables[place] for place in touched]
                add(*call(step, [values[place] for place in read], held))
                for place, value in zip(touched, held, strict=True):
                    variables[place] = value
            case View(input=read_from, output=output):
                add(values[read_from].reshape(view_shape(region.values[output].shape, values[read_from].size)))
            case Read(variable=variable):
                add(variables[variable])
            case Assign(variable=variable, value=place):
                variables[variable] = values[place]
    return [values[place] for place in region.outputs]


def view_shape(shape: Shape, count: int) -> tuple[int, ...]:
    """A view's shape, for so many numbers.

    Raises:
        RegionError: they do not make up such a shape.
    """
    known = int(np.prod([size for size in shape if size is not None], dtype=np.int64))
    missing = count // known if known else 0
    found = tuple(missing if size is None else size for size in shape)
    if int(np.prod(found, dtype=np.int64)) != count:
        raise RegionError(f"{count} numbers do not make up shape {shape}")
    return found


def product(call: Call, attrs: dict[str, object], inputs: Sequence[Array]) -> list[Array]:
    """MatMul, BatchMatMulV2, and _FusedMatMul with BiasAdd and Relu: of integers exact, else of float64, rounded once.

    Args:
        call: the call.
        attrs: its attributes, read: `transpose_a`, `adj_x`, `fused_ops` and the like.
        inputs: of one dtype.

    Raises:
        RegionError: it is another op, or fuses others.
    """
    if call.op not in ("MatMul", "BatchMatMulV2", "_FusedMatMul"):
        raise RegionError(f"'{call.op}' is no product that the reference knows")
    left, right, *others = inputs
    if attrs.get("adj_x") or attrs.get("transpose_a"):
        left = left.swapaxes(-1, -2).conj() if attrs.get("adj_x") else left.swapaxes(-1, -2)
    if attrs.get("adj_y") or attrs.get("transpose_b"):
        right = right.swapaxes(-1, -2).conj() if attrs.get("adj_y") else right.swapaxes(-1, -2)
    wide = left.dtype if left.dtype.kind in "iuc" else np.result_type(left.dtype, np.float64)
    result = np.matmul(left.astype(wide), right.astype(wide))
    fused = attrs.get("fused_ops", [])
    for op in fused if isinstance(fused, list) else []:
        if op == "BiasAdd":
            result = result + others.pop(0).astype(wide)
        elif op == "Relu":
            result = np.where(result > 0, result, np.where(np.isnan(result), result, 0.0))
        else:
            raise RegionError(f"'{call.op}' with '{op}' is no product that the reference knows")
    return [result.astype(inputs[0].dtype)]
