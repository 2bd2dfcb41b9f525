"""A kind's sections as a GPU runs them: segments between which processors wait for each other.

On a GPU the outputs of a product are dealt to all processors, while what is elementwise runs for some nodes on one of
them. So a section is cut into *segments*: the products whose operands are there, each a segment, or everything else
that can be computed then. Segments of the same *round* wait for nothing of each other.

What is only read from somewhere (a child's state, a row of a table) is no separate step but is read where it is
needed. Products that add up over parts of one vector, or give parts of one, are one product again. A sum of few
products, a "dot", is not worth a barrier, and is computed with everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from custom_ops.dynamic.sections import GRADIENTS, Sections, SectionStep

SOURCES = ("child", "lookup", "row", "one_hot", "random", "adjoint", "loss_adjoint")
SINKS = ("put_state", "put_loss", "put_output", "put_child")
MOST_OF_A_DOT = 8


@dataclass(frozen=True)
class Ref:
    """What an item reads: "v" an item of its section, "k" a value that an earlier section kept, "c" a constant."""

    kind: str
    number: int


@dataclass(frozen=True)
class SegmentItem:
    """A step whose values are named by where they are computed.

    Attributes:
        width: of its value; of a sink that of what it puts.
        kept: the number of the kept value that it is, or -1.
        spilled: the number of the memory that its value has because other segments read it, or -1.
    """

    op: str
    width: int
    values: tuple[Ref, ...]
    numbers: tuple[int, ...]
    kept: int = -1
    spilled: int = -1

    @property
    def in_memory(self) -> bool:
        """Whether its value lies in memory."""
        return self.kept >= 0 or self.spilled >= 0


@dataclass(frozen=True)
class MatrixView:
    """A block of a matrix as a product reads it: `outputs` sums of `depth` products.

    Attributes:
        transposed: whether outputs are rows of the parameter, and else its columns.
        first, outputs: of its rows or columns.
        start, depth: of what is summed over.
    """

    parameter: int
    transposed: bool
    start: int
    depth: int
    first: int
    outputs: int

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        return self.depth * self.outputs


@dataclass(frozen=True)
class ProductPart:
    """Outputs of a product that are one value.

    Attributes:
        first: of the outputs of the matrix.
        item: whose value it is.
        base: what is added.
        sinks: where the value is put as well.
    """

    first: int
    item: int
    base: Ref | None
    sinks: tuple[int, ...]


@dataclass(frozen=True)
class ProductCall:
    """One product: the vector that `operands` are side by side, times a view."""

    view: MatrixView
    operands: tuple[Ref, ...]
    parts: tuple[ProductPart, ...]


@dataclass(frozen=True)
class Segment:
    """What runs between two barriers: a product, or the items of `rows`."""

    round: int
    call: ProductCall | None = None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class SectionCode:
    """Items of a section, and its segments."""

    items: tuple[SegmentItem, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class KindCode:
    """All sections of a kind but the last, whose steps are `gradients`."""

    kept: tuple[int, ...]
    spilled: tuple[int, ...]
    constants: tuple[float, ...]
    sections: tuple[SectionCode, ...]
    gradients: tuple[SectionStep, ...]


def kind_code(how: Sections) -> KindCode:
    """The segments of a kind whose sections are `how`."""
    spilled: list[int] = []
    sections = tuple(_Cutter(how, number, spilled).cut() for number in range(GRADIENTS))
    return KindCode(how.kept, tuple(spilled), how.constants, sections, how.steps[GRADIENTS])


@dataclass(frozen=True)
class _Product:
    """Products of one matrix that add up to the value of `item`."""

    view: MatrixView
    operands: tuple[Ref, ...]
    item: int
    base: Ref | None


class _Cutter:
    def __init__(self, how: Sections, number: int, spilled: list[int]) -> None:
        self.how, self.spilled = how, spilled
        self._widths = [item.width for item in _named(how, number)]
        self.items = [self._dot(item) for item in _named(how, number)]
        self.readers: list[list[int]] = [[] for _ in self.items]
        for place, item in enumerate(self.items):
            for ref in item.values:
                if ref.kind == "v":
                    self.readers[ref.number].append(place)
        self.merged: set[int] = set()  # products that are part of another
        self.products = self._products()

    # ---- products ----

    def _dot(self, item: SegmentItem) -> SegmentItem:
        if item.op != "product":
            return item
        operand = item.values[0]
        depth = self.how.kept[operand.number] if operand.kind == "k" else self._widths[operand.number]
        return replace(item, op="dot") if depth <= MOST_OF_A_DOT else item

    def _products(self) -> dict[int, _Product]:
        found: dict[int, _Product] = {}
        for place in reversed(range(len(self.items))):
            if self.items[place].op != "product" or place in self.merged:
                continue
            chain = [place]
            while (below := self._below(chain[-1])) is not None:
                chain.append(below)
            whole = self._joined(chain)
            if whole is None:
                whole = self._joined(chain[:1])
                assert whole is not None
            else:
                self.merged.update(chain[1:])
            found[place] = whole
        return dict(sorted(found.items()))

    def _below(self, place: int) -> int | None:
        """The product to which this one only adds a part."""
        item = self.items[place]
        if len(item.values) < 2 or item.values[1].kind != "v":
            return None
        below = item.values[1].number
        other = self.items[below]
        same = other.op == "product" and self._outputs(other) == self._outputs(item)
        return below if same and self.readers[below] == [place] and other.kept < 0 else None

    def _outputs(self, item: SegmentItem) -> tuple[int, int, int, int]:
        parameter, row, column, transposed = item.numbers
        return parameter, transposed, row if transposed else column, item.width

    def _joined(self, chain: list[int]) -> _Product | None:
        """One product, if what these sum over lies side by side."""
        parts = []
        for place in chain:
            item = self.items[place]
            _, row, column, transposed = item.numbers
            parts.append((column if transposed else row, self.width(item.values[0]), item.values[0]))
        parts.sort(key=lambda part: part[0])
        if any(a[0] + a[1] != b[0] for a, b in pairwise(parts)):
            return None
        parameter, transposed, first, width = self._outputs(self.items[chain[0]])
        depth = sum(part[1] for part in parts)
        last = self.items[chain[-1]].values
        view = MatrixView(parameter, bool(transposed), parts[0][0], depth, first, width)
        return _Product(view, tuple(part[2] for part in parts), chain[0], last[1] if len(last) > 1 else None)

    def width(self, ref: Ref) -> int:
        return self.how.kept[ref.number] if ref.kind == "k" else self.items[ref.number].width

    # ---- rounds ----

    def cut(self) -> SectionCode:
        done = {place for place, item in enumerate(self.items) if item.op in SOURCES}
        left = [place for place in range(len(self.items)) if place not in done and place not in self.merged]
        left += [place for place in sorted(done) if self.items[place].kept >= 0]  # which have to be copied
        segments: list[Segment] = []
        where: dict[int, int] = {}  # the segment of each item
        rounds = 0
        while left:
            ready = [p for p in left if p in self.products and self._ready_product(self.products[p], done)]
            if ready:
                for call in self._calls(ready):
                    members = {part.item for part in call.parts} | {sink for part in call.parts for sink in part.sinks}
                    where.update(dict.fromkeys(members, len(segments)))
                    segments.append(Segment(rounds, call))
                    left = [place for place in left if place not in members]
                done.update(ready)
            else:
                rows = self._rows(left, done)
                where.update(dict.fromkeys(rows, len(segments)))
                segments.append(Segment(rounds, None, tuple(rows)))
                done.update(rows)
                left = [place for place in left if place not in set(rows)]
            rounds += 1
        self._place(where)
        return SectionCode(tuple(self.items), tuple(segments))

    def _ready_product(self, product: _Product, done: set[int]) -> bool:
        refs = (*product.operands, *([product.base] if product.base else []))
        return all(ref.kind != "v" or ref.number in done for ref in refs)

    def _calls(self, ready: list[int]) -> Iterator[ProductCall]:
        groups: dict[object, list[_Product]] = {}
        for place in ready:
            product = self.products[place]
            view = product.view
            groups.setdefault((view.parameter, view.transposed, view.start, view.depth, product.operands), []).append(
                product
            )
        for group in groups.values():
            first = min(product.view.first for product in group)
            end = max(product.view.first + product.view.outputs for product in group)
            parts = []
            for product in sorted(group, key=lambda product: product.view.first):
                sinks = tuple(r for r in self.readers[product.item] if self.items[r].op in SINKS)
                parts.append(ProductPart(product.view.first, product.item, product.base, sinks))
            yield ProductCall(replace(group[0].view, first=first, outputs=end - first), group[0].operands, tuple(parts))

    def _rows(self, left: list[int], done: set[int]) -> list[int]:
        """All that can be computed without another product, in order."""
        found: list[int] = []
        there = set(done)
        for place in sorted(left):
            if place in self.products:
                continue
            if all(ref.kind != "v" or ref.number in there for ref in self.items[place].values):
                found.append(place)
                there.add(place)
        return found

    def _place(self, where: dict[int, int]) -> None:
        """Memory for what other segments read, and for what an item reads at other positions than its own."""
        for place, item in enumerate(self.items):
            if item.op in SOURCES or item.width == 0 or item.kept >= 0 or place in self.merged or item.op in SINKS:
                continue
            readers = [r for r in self.readers[place] if not (item.op == "product" and self.items[r].op in SINKS)]
            crossing = any(where.get(self._owner(r)) != where[place] for r in readers)
            moved = item.width > 1 and any(self._moves(self.items[r], place) for r in readers)
            if (crossing or moved or item.op == "product") and readers:
                self.items[place] = replace(item, spilled=len(self.spilled))
                self.spilled.append(item.width)

    @staticmethod
    def _moves(reader: SegmentItem, place: int) -> bool:
        """Whether an item reads another at other positions than its own."""
        return reader.op in ("concat", "slice") or (reader.op == "dot" and reader.values[0] == Ref("v", place))

    def _owner(self, place: int) -> int:
        """The product that this one is part of."""
        while place in self.merged:
            place = self.readers[place][0]
        return place


def _named(how: Sections, number: int) -> Iterator[SegmentItem]:
    """The steps of a section, each value with its name."""
    scratch: dict[int, int] = {}
    kept: dict[int, int] = {}
    widths: list[int] = []
    for place, step in enumerate(how.steps[number]):
        values = []
        for value in step.values:
            if value.kind == "s":
                values.append(Ref("v", scratch[value.number]))
            elif value.kind == "k" and value.number in kept:
                values.append(Ref("v", kept[value.number]))
            else:
                values.append(Ref(value.kind, value.number))
        target = step.target
        if target is not None:
            (kept if target.kind == "k" else scratch)[target.number] = place
            width = (how.kept if target.kind == "k" else how.scratch)[target.number]
        else:
            ref = values[0]
            width = 1 if ref.kind == "c" else how.kept[ref.number] if ref.kind == "k" else widths[ref.number]
        widths.append(width)
        yield SegmentItem(
            step.op, width, tuple(values), step.numbers,
            target.number if target is not None and target.kind == "k" else -1,
        )  # fmt: skip
