"""Elementwise ops: those of the table, and what is composed of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import FLOATS, INTEGERS
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, floating, text, texts
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.known_numbers import number_of
from graph_passes.lower.program_writer import ProgramWriter, Steps
from graph_passes.lower.rule import Rule, Write, broadcast, elements
from graph_passes.refusals import Reason, Refusal

_SAME = {name: op.name for op in TABLE.values() for name in op.tf_ops}
MOST_DIVISOR = 1 << 32  # of int64: what is left of the first division is then exact in float64
HALVES = ("float16", "bfloat16")
_REVERSED = {name: op.name for op in TABLE.values() for name in op.reversed_tf_ops}


def _table(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    arguments = yield from elements(w, node, at, node.inputs)
    if node.op in _REVERSED:
        return w.apply(_REVERSED[node.op], *reversed(arguments))
    return w.apply(_SAME[node.op], *arguments)


def _squared_difference(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Writes two ops, since half types are rounded after each."""
    x, y = yield from elements(w, node, at, node.inputs)
    return w.apply("square", w.apply("subtract", x, y))


def _softsign(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Writes three ops, since half types are rounded after each."""
    x = yield node.inputs[0], at
    return w.apply("divide", x, w.apply("add", w.apply("absolute", x), w.like(x, 1)))


def _relu(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    return _unary(w, node.op, x)


def _unary(w: ProgramWriter, op: str, x: int) -> int:
    """An op of one argument. The table's ReLU of -0 is 0, as TensorFlow's but that of half types, which is -0."""
    if op not in ("Relu", "Relu6") or w.dtype(x) not in HALVES:
        return w.apply(_SAME[op], x)
    above = w.apply("maximum", w.like(x, 0), x)
    return w.apply("minimum", above, w.like(x, 6)) if op == "Relu6" else above


def _extreme(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """TensorFlow's kernel of half types gives the first of 0 and -0, and the table's op the second."""
    x, y = yield from elements(w, node, at, node.inputs)
    return w.apply(_SAME[node.op], *((y, x) if w.dtype(x) in HALVES else (x, y)))


def _unsupported(graph: Graph, node: Node) -> Refusal | None:
    name = _SAME.get(node.op) or _REVERSED[node.op]
    dtype = graph.specs[node.inputs[-1]].dtype
    return None if dtype in TABLE[name].dtypes else Reason.OP_DTYPE(op=node.op, dtype=dtype)


def _equal(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, y = yield from elements(w, node, at, node.inputs)
    if w.dtype(x) == "bool":
        x, y = w.cast("int32", x), w.cast("int32", y)
    equal = w.apply("equal", x, y)
    return w.apply("logical_not", equal) if node.op == "NotEqual" else equal


def _cast(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    return w.cast(w.shapes.dtype(TensorId(node.name)), x)


def _truncates(graph: Graph, node: Node) -> Refusal | None:
    return Reason.TRUNCATING_CAST() if boolean(node.attrs.get("Truncate")) else None


def _select(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    condition, x, y = node.inputs
    rank = len(w.shapes[condition])
    chosen = yield condition, at[:rank]
    first = yield x, at
    second = yield y, at
    return w.apply("select", chosen, first, second)


def _select_v2(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    condition, x, y = yield from elements(w, node, at, node.inputs)
    return w.apply("select", condition, x, y)


def _add_n(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Adds in TensorFlow's order (aggregate_ops.h): up to nine terms, then sums of eight at a time."""
    terms = yield from elements(w, node, at, node.inputs)
    first = len(terms) % 8 + (8 if len(terms) % 8 < 2 else 0)
    total = _sum(w, terms[:first])
    for start in range(first, len(terms), 8):
        total = w.apply("add", total, _sum(w, terms[start : start + 8]))
    return total


def _sum(w: ProgramWriter, terms: Sequence[int]) -> int:
    total, *rest = terms
    for term in rest:
        total = w.apply("add", total, term)
    return total


def _bias_add(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    channels = 1 if text(node.attrs.get("data_format")) == "NCHW" else len(at) - 1
    x = yield node.inputs[0], at
    bias = yield node.inputs[1], (at[channels],)
    return w.apply("add", x, bias)


def _leaky_relu(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    slope = w.like(x, floating(node.attrs.get("alpha", 0.2)))
    return w.apply("select", w.apply("greater", x, w.like(x, 0.0)), x, w.apply("multiply", x, slope))


def _clip(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, low, high = yield from elements(w, node, at, node.inputs)
    from_above = w.apply("select", w.apply("greater", x, high), high, x)
    return w.apply("select", w.apply("greater", low, from_above), low, from_above)


def _is_nan(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    return w.apply("logical_not", w.apply("equal", x, x))


def _is_inf(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    return w.apply("equal", w.apply("absolute", x), w.like(x, np.inf))


def _is_finite(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = yield node.inputs[0], at
    return w.apply("greater", w.like(x, np.inf), w.apply("absolute", x))


def _logical_xor(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, y = yield from elements(w, node, at, node.inputs)
    return w.apply("logical_not", w.apply("equal", w.cast("int32", x), w.cast("int32", y)))


def _floor_division(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Divide integers by a constant, exactly in float64; for floating point numbers round the quotient down."""
    divisor = number_of(w.graph, node.inputs[1])
    if w.shapes.dtype(node.inputs[0]) not in INTEGERS or divisor is None:
        x, y = yield from elements(w, node, at, node.inputs)
        return w.apply("floor_mod", x, y) if node.op == "FloorMod" else w.apply("floor", w.apply("divide", x, y))
    x = yield node.inputs[0], broadcast(w, node.inputs[0], w.shapes[TensorId(node.name)], at)
    if w.dtype(x) == "int64":  # what is left of a quotient of float64 that is off by few is less than 2^53
        x = w.remainder(x, int(divisor))
    truncated, rest = w.quotient(x, int(divisor)), w.remainder(x, int(divisor))
    if node.op in ("TruncateDiv", "Div"):
        return truncated
    nothing = w.like(x, 0)
    wrong = w.apply("greater", *((nothing, rest) if divisor > 0 else (rest, nothing)))
    if node.op == "FloorMod":
        return w.apply("select", wrong, w.apply("add", rest, w.like(x, int(divisor))), rest)
    return w.apply("select", wrong, w.apply("subtract", truncated, w.like(x, 1)), truncated)


def _floor_division_refusal(graph: Graph, node: Node) -> Refusal | None:
    dtype = graph.specs[node.inputs[0]].dtype
    if dtype in FLOATS and node.op in ("FloorDiv", "FloorMod", "Div"):
        return None
    divisor = number_of(graph, node.inputs[1])
    exact = dtype == "int32" or (dtype == "int64" and node.op == "FloorMod" and abs(divisor or 0) < MOST_DIVISOR)
    return None if exact and divisor not in (None, 0) else Reason.DIVISION(op=node.op, dtype=dtype)


def _division(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    if w.shapes.dtype(node.inputs[0]) in FLOATS:
        return (yield from _table(w, node, output, at))
    return (yield from _floor_division(w, node, output, at))


def _xlogy(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, y = yield from elements(w, node, at, node.inputs)
    nothing = w.like(x, 0.0)
    zero = w.apply("multiply", x, nothing)  # with the sign of x, as TensorFlow's
    return w.apply("select", w.apply("equal", x, nothing), zero, w.apply("multiply", x, w.apply("log", y)))


def _composition(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """What Grappler makes of a chain of unary ops."""
    x = yield node.inputs[0], at
    for name in texts(node.attrs["op_names"]):
        x = _unary(w, name, x)
    return x


def _composition_refusal(graph: Graph, node: Node) -> Refusal | None:
    dtype = graph.specs[node.inputs[0]].dtype
    unknown = [
        name for name in texts(node.attrs["op_names"]) if name not in _SAME or dtype not in TABLE[_SAME[name]].dtypes
    ]
    return Reason.COMPOSITION(op=unknown[0], dtype=dtype) if unknown else None


def _rule(write: Write) -> Rule:
    return Rule(write, OpPattern.ELEMENTWISE)


RULES = {name: Rule(_table, OpPattern.ELEMENTWISE, refusal=_unsupported) for name in (*_SAME, *_REVERSED)} | {
    "Relu": Rule(_relu, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "Relu6": Rule(_relu, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "Maximum": Rule(_extreme, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "Minimum": Rule(_extreme, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "SquaredDifference": Rule(_squared_difference, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "Softsign": Rule(_softsign, OpPattern.ELEMENTWISE, refusal=_unsupported),
    "Equal": _rule(_equal),
    "NotEqual": _rule(_equal),
    "Cast": Rule(_cast, OpPattern.ELEMENTWISE, refusal=_truncates),
    "Select": _rule(_select),
    "SelectV2": _rule(_select_v2),
    "AddN": _rule(_add_n),
    "BiasAdd": _rule(_bias_add),
    "BiasAddV1": _rule(_bias_add),
    "LeakyRelu": _rule(_leaky_relu),
    "ClipByValue": _rule(_clip),
    "IsNan": _rule(_is_nan),
    "IsInf": _rule(_is_inf),
    "IsFinite": _rule(_is_finite),
    "LogicalXor": _rule(_logical_xor),
    "Div": Rule(_division, OpPattern.ELEMENTWISE, refusal=_floor_division_refusal),
    "FloorDiv": Rule(_floor_division, OpPattern.ELEMENTWISE, refusal=_floor_division_refusal),
    "FloorMod": Rule(_floor_division, OpPattern.ELEMENTWISE, refusal=_floor_division_refusal),
    "TruncateDiv": Rule(_floor_division, OpPattern.ELEMENTWISE, refusal=_floor_division_refusal),
    "Xlogy": _rule(_xlogy),
    "_UnaryOpsComposition": Rule(_composition, OpPattern.ELEMENTWISE, refusal=_composition_refusal),
}
