"""Programs in CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.expr.table import TABLE


def expression_on_floats(op: str, arguments: Sequence[str]) -> str:
    """An op of floats, as a cell has it: a comparison gives 1 or 0."""
    text = TABLE[op].cuda.format(*arguments, f="f")
    return f"{text} ? 1.0f : 0.0f" if TABLE[op].comparison else text
