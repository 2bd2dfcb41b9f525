"""The table of elementwise ops, and what loops and tilings cost on devices, as a C++ header that the build writes.

python -m custom_ops.expr.cpp > elementwise_ops.h
"""

from __future__ import annotations

import json
from pathlib import Path

from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import BOOL, FLOATS, INTEGERS, Op

HEADER = "custom_ops/generated/elementwise_ops.h"  # the name by which it is included; BUILD has it as well
DEVICES = Path(__file__).parents[1] / "devices"
CPU, GPU = DEVICES / "cpu.json", DEVICES / "h200.json"  # on which loops and tilings were measured
_KINDS = {"kFloats": FLOATS, "kIntegers": INTEGERS, "kBools": BOOL}


def header() -> str:
    """Two lists of all ops, and two of costs, for macros that the readers define.

    TFMEM_ELEMENTWISE_OPS(X) has `X(enumerator, name, arity, kinds of dtypes, whether it compares, work)` for each op;
    the work of arithmetic is 1.
    TFMEM_ELEMENTWISE_KERNELS(VECTORS, COMPARISONS, NUMBERS) has `MACRO(enumerator, arity, kinds of dtypes, expression)`
    for each, by what its expression is: of vectors, a mask of vectors, or of numbers.
    TFMEM_CPU_COSTS(X) has `X(constant, value)` for each cost of `devices/cpu.json`.
    TFMEM_TILING_COSTS(X) has the same for the tilings of products on tensor cores in `devices/h200.json`.
    """
    return "\n".join(
        [
            "// Generated from the table of elementwise ops, by custom_ops/expr/cpp.py, which says what this is.",
            "#pragma once",
            "",
            "#define TFMEM_ELEMENTWISE_OPS(X) \\",
            " \\\n".join(map(_entry, TABLE.values())),
            "",
            "#define TFMEM_ELEMENTWISE_KERNELS(VECTORS, COMPARISONS, NUMBERS) \\",
            " \\\n".join(map(_kernel, TABLE.values())),
            "",
            "#define TFMEM_CPU_COSTS(X) \\",
            " \\\n".join(map(_cost, cpu_costs().items())),
            "",
            "#define TFMEM_TILING_COSTS(X) \\",
            " \\\n".join(map(_cost, tiling_costs().items())),
            "",
        ]
    )


def cpu_costs() -> dict[str, float]:
    """What the op library's own loops cost, which `python -m tfmem devices --measure` measures."""
    return _numbers(json.loads(CPU.read_text())["kernels"])


def tiling_costs() -> dict[str, float]:
    """What a tiling of a product on tensor cores takes, by which `BestTiling` compares tilings."""
    return _numbers(json.loads(GPU.read_text())["products"]["tiling"])


def enumerator(name: str) -> str:
    """`multiply_no_nan` is kMultiplyNoNan."""
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def _numbers(costs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in costs.items() if not name.startswith("_")}


def _cost(named: tuple[str, float]) -> str:
    name, value = named
    return f"  X({enumerator(name)}, {value:g})"


def _entry(op: Op) -> str:
    compares, work = str(op.comparison).lower(), 1 if op.cost == "arithmetic" else 10
    return f'  X({enumerator(op.name)}, "{op.name}", {op.arity}, {_kinds(op)}, {compares}, {work})'


def _kernel(op: Op) -> str:
    macro = "NUMBERS" if not op.vectorised else "COMPARISONS" if op.comparison else "VECTORS"
    return f"  {macro}({enumerator(op.name)}, {op.arity}, {_kinds(op)}, ({op.cpp}))"


def _kinds(op: Op) -> str:
    return " | ".join(kind for kind, dtypes in _KINDS.items() if set(dtypes) <= set(op.dtypes))


if __name__ == "__main__":
    print(header(), end="")
