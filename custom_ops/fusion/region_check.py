"""Whether a region is one that its readers can run: what C++ checks too (custom_ops/ops/fusion/region.cc)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from custom_ops.errors import RegionError
from custom_ops.expr.program import DTYPES
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, Shape, TensorType, View

# The dtypes of values; programs compute with `DTYPES`, calls and views take the others, too.
VALUE_DTYPES = (*DTYPES, "int8", "int16", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128")

_MOST_NUMBERS = 1 << 59  # of the largest dtype


def check(region: Region) -> None:
    """Checks what can be known before the region runs.

    Raises:
        RegionError: it is no region that a reader could run; the message names the step and what is wrong with it.
    """
    _require(0 <= region.inputs <= len(region.values), "inputs", f"{region.inputs} of {len(region.values)} values")
    for kind, types in (("value", region.values), ("variable", region.variables)):
        for number, found in enumerate(types):
            what = f"{kind} {number}"
            _require(found.dtype in VALUE_DTYPES, what, f"dtype '{found.dtype}'; expected one of {VALUE_DTYPES}")
            sizes = [size for size in found.shape if size is not None]
            _require(all(size >= 0 for size in sizes), what, f"shape {found.shape}; expected sizes of 0 or more")
            numbers = math.prod(max(size, 1) for size in sizes)
            _require(numbers < _MOST_NUMBERS, what, f"shape {found.shape}, of more bytes than 64 bits count")
    known = region.inputs
    for number, step in enumerate(region.steps):
        what = f"step {number} ({type(step).__name__})"
        inputs, outputs, variables = numbers_of(step)
        late = [value for value in inputs if not 0 <= value < known]
        _require(not late, what, f"reads values {late}; by then there are {known}")
        expected = tuple(range(known, known + len(outputs)))
        _require(
            outputs == expected,
            what,
            f"gives values {outputs}; expected {expected}, since values are numbered in order",
        )
        known += len(outputs)
        _require(known <= len(region.values), what, f"gives value {known - 1} of {len(region.values)}")
        unknown = [variable for variable in variables if not 0 <= variable < len(region.variables)]
        _require(not unknown, what, f"has variables {unknown} of {len(region.variables)}")
        _check_types(region, step, what)
        if isinstance(step, Kernel | Call):
            odd = [name for name in step.members if not _is_word(name)]
            _require(not odd, what, f"members named {odd}; expected names of nodes")
    _require(known == len(region.values), "values", f"there are {len(region.values)}; inputs and steps give {known}")
    beyond = [value for value in region.outputs if not 0 <= value < known]
    _require(not beyond, "outputs", f"values {beyond} of {known}")


def numbers_of(step: object) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The values that a step reads, those that it gives, and its variables."""
    match step:
        case Kernel(inputs=inputs, outputs=outputs):
            return inputs, outputs, ()
        case Call(inputs=inputs, outputs=outputs, variables=variables):
            return inputs, outputs, variables
        case View(input=value, output=output):
            return (value,), (output,), ()
        case Read(variable=variable, output=output):
            return (), (output,), (variable,)
        case Assign(variable=variable, value=value):
            return (value,), (), (variable,)
    raise RegionError(f"{step!r} is no step of a region")


def _check_types(region: Region, step: object, what: str) -> None:
    match step:
        case Kernel(program=program, inputs=inputs, outputs=outputs):
            expected = [(tensor.dtype, tensor.rank) for tensor in program.tensors]
            _require(
                _forms(region, inputs) == expected, what, f"takes {_forms(region, inputs)}; its program {expected}"
            )
            expected = [(program.types[output.node].dtype, len(output.axes)) for output in program.outputs]
            _require(
                _forms(region, outputs) == expected, what, f"gives {_forms(region, outputs)}; its program {expected}"
            )
        case Call(op=op):
            _require(_is_word(op), what, f"an op named '{op}'")
        case View(input=value, output=output):
            before, after = region.values[value], region.values[output]
            _require(before.dtype == after.dtype, what, f"is of {before.dtype} and gives {after.dtype}")
            _require(
                after.shape.count(None) <= 1,
                what,
                f"gives shape {after.shape}, of which at most one size may be unknown",
            )
        case Read(variable=variable, output=value) | Assign(variable=variable, value=value):
            declared, found = region.variables[variable], region.values[value]
            _require(_compatible(declared, found), what, f"the variable is {declared}, the value {found}")


def _is_word(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _forms(region: Region, values: Sequence[int]) -> list[tuple[str, int]]:
    return [(region.values[value].dtype, len(region.values[value].shape)) for value in values]


def _compatible(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and fits(a.shape, b.shape)


def fits(a: Shape, b: Shape) -> bool:
    """Whether two shapes may be of one tensor."""
    sizes = zip(a, b, strict=False)
    return len(a) == len(b) and all(x is None or y is None or x == y for x, y in sizes)


def _require(holds: bool, what: str, problem: str) -> None:
    if not holds:
        raise RegionError(f"{what}: {problem}")
