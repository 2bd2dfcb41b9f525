"""What a convolution of a small state makes of the numbers of a row: a product for each number of the result."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from custom_ops.recurrent.cell import Product, Term
from graph_passes.graph.ir import Node, TensorId, integers, text
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.hoist import FIXED
from graph_passes.passes.recurrent.lower.number_sums import matrix_of, term_of
from graph_passes.passes.recurrent.lower.numbers import NumberReader, Row, Rule
from graph_passes.refusals import Reason


def _convolved(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    """A convolution with a weight, channels last."""
    row = reader.operand(node)
    padding, layout = text(node.attrs.get("padding")), text(node.attrs.get("data_format")) or "NHWC"
    if row.batch != 0 or layout != "NHWC" or padding not in ("SAME", "VALID") or row.numbers.ndim != 3:
        raise Unreadable(Reason.CELL_OP.of(node))
    if reader.hoister.level(node.inputs[1]) != FIXED or None in reader.hoister.shape(node.inputs[1]):
        raise Unreadable(Reason.CELL_PRODUCT.of(node))
    matrix, kernel = matrix_of(reader, node.inputs[1])
    strides, dilations = (integers(node.attrs.get(name))[1:3] or (1, 1) for name in ("strides", "dilations"))
    height, width, channels = row.numbers.shape
    if channels != kernel[2]:  # convolutions by groups
        raise Unreadable(Reason.CELL_OP.of(node))
    sides = list(zip((height, width), kernel[:2], strides, dilations, strict=True))
    places = [list(_taps(size, taps, stride, dilation, padding)) for size, taps, stride, dilation in sides]
    found = np.empty([len(places[0]), len(places[1]), kernel[3]], object)
    for at in np.ndindex(found.shape):
        terms: list[Term] = []
        for (k, y), (m, x), channel in product(places[0][at[0]], places[1][at[1]], range(channels)):
            terms.append(term_of(reader, row.numbers[y, x, channel], matrix, kernel, (k, m, channel, at[2])))
        found[at] = reader.builder.add(Product(tuple(terms))) if terms else reader.builder.constant(0.0)
    return Row(found, 0)


def _taps(size: int, taps: int, stride: int, dilation: int, padding: str) -> Iterator[list[tuple[int, int]]]:
    """For each place of a result along one side: which tap of the kernel meets which place of the operand."""
    reach = (taps - 1) * dilation + 1
    count = -(-size // stride) if padding == "SAME" else max(-(-(size - reach + 1) // stride), 0)
    before = max((count - 1) * stride + reach - size, 0) // 2 if padding == "SAME" else 0
    for place in range(count):
        first = place * stride - before
        yield [(tap, first + tap * dilation) for tap in range(taps) if 0 <= first + tap * dilation < size]


CONVOLUTIONS: dict[str, Rule] = {"Conv2D": _convolved}
