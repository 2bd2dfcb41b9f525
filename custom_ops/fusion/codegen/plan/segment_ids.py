"""Sums of segments: results for which few of the numbers that they look at count, since an id has to be their position.

    result[s, d] = sum over n of (ids[n] == s ? data[n, d] : 0)

Where each thread has a result, a CTA looks at as many ids at once as it has threads. It marks those that are a position
of one of its results, and its threads go through the marked ones alone, in their order. So each number is added up in
the order of the ids, as TensorFlow's kernel on a CPU does it, whatever the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from custom_ops.expr.nodes import Constant, Elementwise, Position, Reduce
from custom_ops.expr.program import Program
from custom_ops.expr.table_entry import INTEGER_RANGES

CHUNK_OPERATIONS = 12  # elementary operations of a thread for an id that it looks at, counted in the source


@dataclass(frozen=True)
class Segments:
    """What a reduction counts.

    Attributes:
        ids: the value that has to be equal to a position; varies along reduced axes alone.
        axis: of that position, which the result keeps.
    """

    ids: int
    axis: int


def segments_of(program: Program, place: int) -> Segments | None:
    """What a node counts, if it is a sum or a maximum of segments."""
    node = program.nodes[place]
    operand = program.nodes[node.operand] if isinstance(node, Reduce) else None
    if not isinstance(node, Reduce) or not isinstance(operand, Elementwise) or operand.op != "select":
        return None
    condition, _, otherwise = operand.arguments
    hit = program.nodes[condition]
    if not isinstance(hit, Elementwise) or hit.op != "equal" or not _is_start(program, node.kind, otherwise):
        return None
    for ids, position in (hit.arguments, hit.arguments[::-1]):
        found, axes = program.nodes[position], set(program.types[ids].axes)
        if isinstance(found, Position) and found.axis not in node.axes and axes and axes <= set(node.axes):
            return Segments(ids, found.axis)
    return None


def _is_start(program: Program, kind: str, place: int) -> bool:
    """Whether a value changes nothing that it is added to."""
    node = program.nodes[place]
    if not isinstance(node, Constant):
        return False
    if kind == "sum":
        return node.value == 0 and math.copysign(1.0, node.value) > 0
    return kind == "max" and node.dtype in INTEGER_RANGES and node.value == INTEGER_RANGES[node.dtype][0]
