"""What nodes compute, in CUDA C++ for NVRTC: declarations of values, for the writer of the kernel around them.

A *port* is what writes that kernel: it knows where values come from and go to. The recurrent kernels' is
`custom_ops.recurrent.codegen.cell_functions`, whose values come from products, exchanges and registers; another walks
over tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from custom_ops.expr.nodes import Cast, Elementwise
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import INTEGERS

# Half types are computed in float; their storage types are in kernels/common.cuh.
HALF_TYPES = {"float16": "Half", "bfloat16": "Bfloat16"}
C_TYPES = {"float64": "double", "float32": "float", "int64": "long long", "int32": "int", "bool": "bool"}
C_TYPES |= dict.fromkeys(HALF_TYPES, "float")
_UNSIGNED = {"int64": "Word", "int32": "unsigned"}


def emit_cuda(
    nodes: Sequence[object], dtypes: Sequence[str], places: Collection[int], read: Callable[[int], str]
) -> list[str]:
    """A declaration `const float value_7 = ...;` for each of `places`.

    Args:
        nodes: of a program or a cell.
        dtypes: of the value of each node.
        places: the nodes to compute here, each after those of them that it reads.
        read: an expression, of a precedence that needs no parentheses, for the value of any other node, and for nodes
            among `places` that are neither elementwise nor casts. A port calls `literal` for constants.

    Returns:
        Lines of C++; they need kernels/math.cuh.
    """

    def value(place: int) -> str:
        return f"value_{place}" if place in places else read(place)

    lines = []
    for place in places:
        node, dtype = nodes[place], dtypes[place]
        if isinstance(node, Elementwise):
            source = dtypes[node.arguments[-1]]
            text = _elementwise(node.op, [value(argument) for argument in node.arguments], source, dtype)
        elif isinstance(node, Cast):
            text = _cast(value(node.operand), dtype)
        else:
            text = read(place)
        lines.append(f"const {C_TYPES[dtype]} value_{place} = {text};")
    return lines


def _elementwise(name: str, arguments: Sequence[str], source: str, dtype: str) -> str:
    """The expression of an op over arguments of dtype `source`; a comparison whose result is no bool gives 1 or 0."""
    op = TABLE[name]
    if op.wraps and dtype in _UNSIGNED:  # C++ says it of unsigned numbers alone, and compilers rely on that
        text = op.cuda.format(*(f"{_UNSIGNED[dtype]}({argument})" for argument in arguments))
        return f"static_cast<{C_TYPES[dtype]}>({text})"
    text = op.cuda.format(*arguments, f="f" if C_TYPES[source] == "float" else "")
    if op.comparison and dtype != "bool":
        return f"{text} ? {literal(1, dtype)} : {literal(0, dtype)}"
    return f"rounded<{HALF_TYPES[dtype]}>({text})" if dtype in HALF_TYPES else text


def _cast(value: str, dtype: str) -> str:
    if dtype == "bool":
        return f"{value} != 0"
    text = f"static_cast<{C_TYPES[dtype]}>({value})"
    return f"rounded<{HALF_TYPES[dtype]}>({text})" if dtype in HALF_TYPES else text


def literal(value: float | int | bool, dtype: str) -> str:
    """A constant, as an expression; one of a half type is rounded to it."""
    if dtype in HALF_TYPES:
        return f"rounded<{HALF_TYPES[dtype]}>({literal(value, 'float32')})"
    if dtype == "bool":
        return str(bool(value)).lower()
    if dtype in INTEGERS:
        return f"static_cast<{C_TYPES[dtype]}>({int(value)}ll)" if value > -(2**63) else "(-9223372036854775807ll - 1)"
    if not math.isfinite(value):
        bits = "7fc00000" if math.isnan(value) else "7f800000" if value > 0 else "ff800000"
        return f"__uint_as_float(0x{bits}u)"
    text = f"{value:.9e}f" if dtype == "float32" else f"{value:.17e}"
    return f"({text})" if value < 0 else text
