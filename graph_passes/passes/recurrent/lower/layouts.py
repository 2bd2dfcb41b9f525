"""How values of other widths than the hidden size lie in columns of a cell.

Every column of a cell has the same number of lanes, the hidden size. A value `[batch, width]` is a row of *segments*:
each begins with a new column, and its last column may be padded. So every place where a step cuts or joins a value
has to be an end of a segment. Example, 8 lanes: LSTMP's gates `[batch, 20]`, four of 5 units each, are 4 columns, of
which 3 lanes are padding each.

A segment of width 1 is one number a row, which meets the lanes of every column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import gcd

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import scalar_value
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.lower.hoist import STATE, Hoister
from graph_passes.passes.recurrent.lower.layer_norm import normalised_operand
from graph_passes.passes.recurrent.lower.rowwise import column_range
from graph_passes.refusals import Reason

PRODUCTS = frozenset({"MatMul", "BatchMatMulV2", "_FusedMatMul"})
MOST = 63  # cuts of a value
_PARTS = frozenset({"Split", "SplitV", "Slice", "StridedSlice"})
_OVERHEAD = 8  # of a block, in rows and columns: so much smaller a block has to be to be worth one more


@dataclass(frozen=True)
class ColumnSegment:
    """A part of a value.

    Attributes:
        start: its first number in the value.
        width: how many numbers.
        column: its first column.
        columns: how many.
    """

    start: int
    width: int
    column: int
    columns: int


@dataclass(frozen=True)
class ColumnLayout:
    """The segments of a value, and the lanes of a column."""

    widths: tuple[int, ...]
    units: int

    @property
    def width(self) -> int:
        """How many numbers the value has."""
        return sum(self.widths)

    @property
    def columns(self) -> int:
        """How many columns it takes."""
        return sum(-(-width // self.units) for width in self.widths)

    @property
    def exact(self) -> bool:
        """Whether the numbers lie side by side, without padding, so that nothing has to be moved."""
        return all(width % self.units == 0 for width in self.widths)

    def is_narrow(self, width: int) -> bool:
        """Whether a segment is one number a row."""
        return width == 1 and self.units != 1

    def segments(self) -> Iterator[ColumnSegment]:
        """The segments, first to last."""
        start = column = 0
        for width in self.widths:
            columns = -(-width // self.units)
            yield ColumnSegment(start, width, column, columns)
            start, column = start + width, column + columns

    def lanes(self) -> list[int]:
        """For each column how many lanes are no padding; 1 for a number a row, which has all lanes alike."""
        found = []
        for segment in self.segments():
            found += [self.units] * (segment.columns - 1)
            found.append(segment.width - self.units * (segment.columns - 1))
        return found

    def narrow(self) -> list[bool]:
        """For each column whether it is one number a row."""
        return [self.is_narrow(segment.width) for segment in self.segments() for _ in range(segment.columns)]

    def part(self, start: int, end: int) -> tuple[int, int, ColumnLayout] | None:
        """The columns of the numbers from `start` to `end`, and their layout; None if these are no whole segments."""
        inside = [
            segment for segment in self.segments() if start <= segment.start and segment.start + segment.width <= end
        ]
        if not inside or inside[0].start != start or inside[-1].start + inside[-1].width != end:
            return self._cut(start, end)
        last = inside[-1]
        widths = tuple(segment.width for segment in inside)
        return inside[0].column, last.column + last.columns, ColumnLayout(widths, self.units)

    def _cut(self, start: int, end: int) -> tuple[int, int, ColumnLayout] | None:
        if not self.exact or start % self.units or end % self.units or not 0 <= start < end <= self.width:
            return None
        return start // self.units, end // self.units, ColumnLayout((end - start,), self.units)


class Cuts:
    """Where the values of a step that states depend on are cut."""

    def __init__(self, loop: Loop, variables: Variables, hoister: Hoister, one_row: bool) -> None:
        """
        Args:
            loop: the loop.
            variables: what its variables are.
            hoister: says what depends on states.
            one_row: whether the batch has a single row.
        """
        self._body, self._hoister, self._one_row = loop.body.graph, hoister, one_row
        self._found: dict[TensorId, frozenset[int]] = {}
        self._results = {loop.body.arguments[place]: loop.body.results[place] for place in variables.states}
        used = self._body.reached({result.node for result in self._results.values()}, self._body.predecessors)
        used |= {result.node for result in self._results.values()}
        self.used = {name for name in used if hoister.level(TensorId(name)) == STATE} | set(self._results)
        changed = True
        while changed:
            changed = sum(self._meet(one, other, offset) for one, other, offset in self._relations()) > 0

    def widths(self, tensor: TensorId) -> tuple[int, ...] | None:
        """The segments of `tensor`; None if its width is unknown, or no state depends on it."""
        width = self._width(tensor)
        if width is None or tensor.node not in self.used:
            return None
        ends = [0, *sorted(self._found.get(tensor, ())), width]
        return tuple(after - before for before, after in pairwise(ends) if after > before)

    def units(self) -> int:
        """The number of lanes with which the products of a step take the least work."""
        products: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        found: dict[int, None] = {}
        for name in sorted(self.used):
            node = self._body[name]
            for tensor in self._body.tensors(node):
                found |= dict.fromkeys(width for width in self.widths(tensor) or () if width > 1)
            if node.op in PRODUCTS:
                sides = (self.widths(node.inputs[0]), self.widths(TensorId(name)))
                if all(sides):
                    products.append((sides[0] or (), sides[1] or ()))
        states = {sum(self.widths(TensorId(name)) or ()) for name in self._results}
        if len(states) == 1 and 0 not in states and all(width % min(states) == 0 for width in found):
            return min(states)
        if not found:
            return 1
        candidates = sorted({reduce(gcd, found), *found} - {1}, reverse=True) or [max(found)]

        def work(units: int) -> int:
            blocks = sum(_columns(rows, units) * _columns(columns, units) for rows, columns in products)
            lanes = sum(_columns((width,), units) for width in found)
            return blocks * (units + _OVERHEAD) ** 2 + lanes * (units + _OVERHEAD)

        return min(candidates, key=work)

    def _width(self, tensor: TensorId) -> int | None:
        spec = self._body.specs.get(tensor)
        if spec is None or spec.shape is None:
            return None
        if len(spec.shape) == 1:
            row = spec.shape[0] if self._one_row else None  # Keras drops the dimension of a batch of one
            return row or 1
        return spec.shape[1] if len(spec.shape) == 2 else None if spec.shape else 1

    def _relations(self) -> Iterator[tuple[TensorId, TensorId, int]]:
        """Values of which one is a part of the other, or as wide: (whole, part, where the part begins)."""
        for argument, result in self._results.items():
            yield result, TensorId(argument), 0
        for name in sorted(self.used):
            node = self._body[name]
            if node.op in _PARTS:
                source = node.inputs[1 if node.op == "Split" else 0]
                for tensor in self._body.tensors(node):
                    try:
                        start, _ = column_range(self._body, node, tensor.index, self._hoister.shape(source))
                    except Unreadable:
                        continue
                    yield source, tensor, start
            elif concatenation_axis(self._body, node) == 1:
                start = 0
                for source in node.inputs[:-1]:
                    yield TensorId(name), source, start
                    start += self._width(source) or 0
            elif node.op == "Reshape" and (normal := normalised_operand(self._body, node)) is not None:
                yield TensorId(name), normal.tensor, 0
            elif node.op not in PRODUCTS and node.outputs == 1:
                for source in node.inputs:
                    if self._width(source) == self._width(TensorId(name)) != 1:
                        yield TensorId(name), source, 0

    def _meet(self, whole: TensorId, part: TensorId, start: int) -> bool:
        """Gives both the cuts of either; whether that was new."""
        large, small = self._width(whole), self._width(part)
        if large is None or small is None:
            return False
        ends = {start, start + small} | {start + cut for cut in self._found.get(part, ())}
        cuts = self._found.get(whole, frozenset()) | {cut for cut in ends if 0 < cut < large}
        inner = self._found.get(part, frozenset()) | {cut - start for cut in cuts if start < cut < start + small}
        if len(cuts) > MOST:
            raise Unreadable(Reason.CELL_CUTS.of(self._body[whole.node], count=len(cuts) + 1, most=MOST + 1))
        changed = len(cuts) > len(self._found.get(whole, ())) or len(inner) > len(self._found.get(part, ()))
        self._found[whole], self._found[part] = frozenset(cuts), frozenset(inner)
        return changed


def _columns(widths: Sequence[int], units: int) -> int:
    return sum(-(-width // units) for width in widths)


def concatenation_axis(body: Graph, node: Node) -> int | None:
    """The axis along which `node` joins matrices."""
    spec = body.specs.get(TensorId(node.name))
    axis = scalar_value(body, node.inputs[-1]) if node.op == "ConcatV2" else None
    return None if axis is None or spec is None or spec.shape is None or len(spec.shape) != 2 else int(axis) % 2
