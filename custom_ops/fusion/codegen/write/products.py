"""C++ of pieces that are products of matrices: a CTA computes a tile (`contraction.py`), its factors as they are loaded
(the prologue), and what is made of the result before it is stored (the epilogue). FusionStitching's block composition.
"""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.expr.cuda import C_TYPES, HALF_TYPES
from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.plan.addresses import At, is_packed, lies_along, product
from custom_ops.fusion.codegen.plan.arguments import accumulator
from custom_ops.fusion.codegen.plan.contraction import LANES, Contraction
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, RowLoop, tile_axes
from custom_ops.fusion.codegen.plan.mapping import WARP
from custom_ops.fusion.codegen.plan.pattern import Root
from custom_ops.fusion.codegen.plan.registers import ahead, is_exact
from custom_ops.fusion.codegen.write.piece import BEGIN, PieceWriter, used
from custom_ops.fusion.codegen.write.values import Names, axis_name, positions

EARLY = 16  # registers of a thread for what the epilogue reads
QUAD = 4  # numbers along the depth that a lane has of a chunk
FACTORS = {"float32": "kTf32", "float16": "kHalf", "bfloat16": "kBfloat16"}


class ProductWriter(PieceWriter):
    """Writes a piece whose rows are tiles."""

    def __init__(self, plan: KernelPlan, number: int) -> None:
        super().__init__(plan, number)
        assert self.piece.tile is not None
        self.tile, self.warps = self.piece.tile, self.threads // 32
        self.batch, self.rows, self.columns = tile_axes(plan, self.piece)
        self.lanes = min(self.tile.columns, WARP)  # of a row of the tile
        self.width = self.tile.columns // self.lanes  # elements of a row that a thread has
        self.rows_each = -(-self.tile.rows * self.lanes // self.threads)  # rows of which a thread has elements
        self.elements_each = self.rows_each * self.width

    def lines(self) -> list[str]:
        names, before = Names(), list[str]()
        for place in self.piece.combined:
            before += self.combined_number(place)
            names[place] = f"value_{place}"
        body = [
            f"const Index first_row = tile / wide % high * {self.tile.rows};",
            f"const Index first_column = tile % wide * {self.tile.columns};",
            *positions(self.pattern, self.batch, "other"),
        ]
        early, body_before = self._early()
        body += body_before
        element = names.new_child(early)
        for loop in self.piece.loops:
            body += self._loop_of(loop, names, element)
        body += self._stored([self.save(place, element) for place in self.piece.saved])
        return [
            *before,
            f"const Index rows = {self._size(self.rows)};",
            f"const Index columns = {self._size(self.columns)};",
            f"const Index high = (rows + {self.tile.rows - 1}) / {self.tile.rows};",
            f"const Index wide = (columns + {self.tile.columns - 1}) / {self.tile.columns};",
            f"const Index tiles = {self._size(self.batch)} * high * wide;",
            "for (Index tile = cta; tile < tiles; tile += ctas) {",
            *used(["const Index other = tile / (wide * high);"], body),
            *body,
            "}",
        ]

    def _size(self, axes: Sequence[int]) -> str:
        return product([self.pattern.size(axis) for axis in axes])

    # ---- A product

    def _product(self, found: Contraction, names: Names) -> list[str]:
        """Leaves a thread's elements of the tile in registers."""
        dtype = self.values.dtypes[found.node]
        kind = C_TYPES[dtype]
        chunks = ahead(self.pattern, found, self.tile, self.warps)
        exact = str(is_exact(self.pattern, found, self.tile, self.warps)).lower()
        shape = f"Tile<{self.tile.rows}, {self.tile.columns}, {self.warps}, {{}}, {exact}>"
        shapes = [f"using Shape = {shape.format(chunks)};"]
        if self.tile.tensor:  # of what tensor cores may not do each thread has more rows
            shapes.append(f"using Plain = {shape.format(1)};")
        total, inside = f"total_{found.node}", "total_of<Shape>(sums, down, along)"
        if not self._exact:
            inside = f"down < {self.tile.rows} ? {inside} : {kind}(0)"
        return [
            f"{kind} {total}[{self.elements_each}];",
            "{",
            *shapes,
            f"const Index depth = {self._size(found.depth)};",
            *self._factor("left", found, found.left, self.rows, names),
            *self._factor("right", found, found.right, self.columns, names),
            f"{kind}* const sums = reinterpret_cast<{kind}*>(shared);",
            "__syncthreads();  // all have read what was there",
            *self._multiplied(found, kind),
            "__syncthreads();",
            *self._loop("i", str(self.elements_each), [*self._within(), f"{total}[i] = {inside};"]),
            "}",
        ]

    @property
    def _exact(self) -> bool:
        """Whether all threads have as many elements of the tile."""
        return self.tile.rows * self.lanes % self.threads == 0

    def _within(self) -> list[str]:
        """The place of a thread's element `i` in the tile: neighbouring lanes have a row."""
        turn, part = ("i", "") if self.width == 1 else (f"i / {self.width}", f"i % {self.width} * {self.lanes} + ")
        return [
            f"const int down = {turn} * {self.threads // self.lanes} + threadIdx.x / {self.lanes};",
            f"const int along = {part}threadIdx.x % {self.lanes};",
        ]

    def _multiplied(self, found: Contraction, kind: str) -> list[str]:
        arguments = "(left, right, first_row, first_column, depth, sums);"
        form = "Plain" if self.tile.tensor else "Shape"
        plain = f"multiply_rows<{form}, {min(4 if self.threads > 512 else 8, self.tile.rows)}, {kind}>{arguments}"
        if not self.tile.tensor or kind != "float":
            return [plain]
        # Numbers of a half type are multiplied exactly by either; float32 is where TensorFlow lets it be rounded.
        allowed = "kTensorCores" if found.factors in HALF_TYPES else "kTensorCores && tf32"
        factors = f"Factors::{FACTORS[found.factors]}"
        return [f"if ({allowed}) {{", f"multiply_by_tensor_cores<Shape, {factors}>{arguments}", "} else {", plain, "}"]

    def _factor(self, name: str, found: Contraction, place: int, own: Sequence[int], names: Names) -> list[str]:
        """A function that computes a factor's numbers: those of neighbours along its own axes, four along the depth."""
        each = self.tile.rows if own == self.rows and not self.tile.tensor else self._lane_share(own)
        along_depth, along_own = self._along(place, found.depth), self._along(place, own)
        width = min(each, self._width(own, along_own))
        if self._width(found.depth, along_depth) == QUAD and len(along_depth) >= len(along_own):
            body = self._along_depth(found, place, own, names)
        elif width > 1:
            body = self._along_own(found, place, own, width, names)
        else:
            body = self._one_by_one(found, place, own, names)
        return [f"const auto {name} = [&](Index first, Index k, auto& block) {{", *body, "};"]

    def _lane_share(self, own: Sequence[int]) -> int:
        return (self.tile.rows if own == self.rows else self.tile.columns) // LANES

    def _along(self, place: int, axes: Sequence[int]) -> list[Input]:
        """The inputs of a factor that lie along the last of some axes."""
        nodes = (self.pattern.program.nodes[each] for each in self._needed(place))
        return [node for node in nodes if isinstance(node, Input) and axes and lies_along(self.pattern, node, axes[-1])]

    def _width(self, axes: Sequence[int], inputs: Sequence[Input]) -> int:
        """How many of their numbers along the last of `axes` can be loaded at once."""
        size = self.pattern.sizes[axes[-1]] if axes else None
        for width in (4, 2):
            packed = (is_packed(self.pattern, node, axes[-1], width) for node in inputs)
            if size is not None and size % width == 0 and any(packed):
                return width
        return 1

    def _needed(self, place: int) -> list[int]:
        return self.values.missing([place], Names())

    def _own_positions(self, own: Sequence[int], index: str, width: int = 1) -> list[str]:
        """The positions along a factor's own axes; beyond their end, those of another place, which is then unused."""
        if not own:
            return []
        size, tile = self._size(own), self.tile.rows if own == self.rows else self.tile.columns
        known = self.pattern.static(own)
        inside = known is not None and known % tile == 0
        text = index if inside else f"min({index}, Index({size} - {width}))"
        return [f"const Index at = {text};", *positions(self.pattern, own, "at", _begin(own, width))]

    def _depth_positions(self, found: Contraction, index: str, width: int = 1) -> tuple[list[str], str]:
        """The positions along the depth, and the condition that holds within it, or ""."""
        known = self.pattern.static(found.depth)
        inside = known is not None and known % 16 == 0
        text = index if inside else f"min({index}, Index(depth - {width}))"
        at = positions(self.pattern, found.depth, "deep", _begin(found.depth, width))
        lines = [f"const Index deep = {text};", *at]
        return lines, "" if inside else f"{index} < depth"

    def _numbers(self, place: int, outer: Names, packs: dict[int, str] | None = None) -> tuple[list[str], str]:
        """What computes a value in the innermost scope, and its text."""
        inner = outer.new_child()
        lines = self.values.make(self.values.missing([place], inner), inner, packs)
        return lines, self.values.text(place, inner)

    def _along_depth(self, found: Contraction, place: int, own: Sequence[int], names: Names) -> list[str]:
        axis, scope = found.depth[-1], names.new_child()
        deep, inside = self._depth_positions(found, "k", QUAD)
        places = self._needed(place)
        packs, packed = self.values.packs(places, axis, QUAD, _begin(found.depth, QUAD), "")
        outside = self.values.make([p for p in places if not self.values.varies(p, [axis])], scope)
        lines, text = self._numbers(place, scope, packed)
        body = [
            *self._own_positions(own, "first + i"),
            *outside,
            *packs,
            *self._unrolled(
                "j", QUAD, [f"const Index {axis_name(axis)} = {BEGIN} + j;", *lines], "i", "j", text, inside
            ),
        ]
        return [*used(deep, body), *self._loop("i", "count_of(block)", body)]

    def _along_own(self, found: Contraction, place: int, own: Sequence[int], width: int, names: Names) -> list[str]:
        axis, scope = own[-1], names.new_child()
        deep, inside = self._depth_positions(found, "k + d")
        places = self._needed(place)
        packs, packed = self.values.packs(places, axis, width, _begin(own, width), "")
        outside = self.values.make([p for p in places if not self.values.varies(p, [axis])], scope)
        lines, text = self._numbers(place, scope, packed)
        declared = [f"const Index {axis_name(axis)} = {BEGIN} + j;", *lines]
        body = [
            *self._own_positions(own, "first + i", width),
            *outside,
            *packs,
            *self._unrolled("j", width, declared, "i + j", "d", text, inside),
        ]
        inner = ["#pragma unroll", f"for (int i = 0; i < count_of(block); i += {width}) {{", *body, "}"]
        return self._loop("d", str(QUAD), [*used(deep, inner), *inner])

    def _one_by_one(self, found: Contraction, place: int, own: Sequence[int], names: Names) -> list[str]:
        deep, inside = self._depth_positions(found, "k + j")
        lines, text = self._numbers(place, names)
        here = [*used(deep, lines), *lines, self._put("i", "j", text, inside)]
        body = [*self._own_positions(own, "first + i"), *self._loop("j", str(QUAD), here)]
        return self._loop("i", "count_of(block)", body)

    def _unrolled(
        self, name: str, count: int, lines: list[str], row: str, column: str, text: str, inside: str
    ) -> list[str]:
        put = self._put(row, column, text, inside)
        return self._loop(name, str(count), [*used(lines[:1], [*lines[1:], put]), *lines[1:], put])

    def _put(self, row: str, column: str, text: str, inside: str) -> str:
        return f"block[{row}][{column}] = {f'{inside} ? {text} : 0' if inside else text};"

    @staticmethod
    def _loop(name: str, count: str, body: Sequence[str]) -> list[str]:
        return ["#pragma unroll", f"for (int {name} = 0; {name} < {count}; ++{name}) {{", *body, "}"]

    # ---- What is made of it

    def _early(self) -> tuple[dict[int, str], list[str]]:
        """Loads what the epilogue reads before the product is computed, if registers hold it; and the names of that."""
        roots = [root for root in self.piece.roots if root.node not in self.pattern.products or root.output is not None]
        nodes, places = self.pattern.program.nodes, self.pattern.closure(map(self.pattern.start, roots))
        read = [place for place in places if isinstance(node := nodes[place], Input) and not _gathers(node)]
        if not read or len(read) * self.elements_each > EARLY:
            return {}, []
        element = Names()
        lines = self.values.make(read, element)
        lines += [f"early_{place}[i] = {element[place]};" for place in read]
        declared = [f"{C_TYPES[self.values.dtypes[place]]} early_{place}[{self.elements_each}];" for place in read]
        return {place: f"early_{place}[i]" for place in read}, [*declared, *self._at_elements(lines)]

    def _loop_of(self, loop: RowLoop, names: Names, element: Names) -> list[str]:
        """Products, then reductions of their rows, then what is stored, of those that can be computed by now."""
        lines: list[str] = []
        for root in loop.roots:
            if root.reduced and root.node in self.pattern.products:
                lines += self._product(self.pattern.products[root.node], names)
                element[root.node] = f"total_{root.node}[i]"
        for root in loop.roots:
            if root.reduced and root.node not in self.pattern.products:
                lines += self._reduced(root, element)
                element[root.node] = f"row_{root.node}[{'i' if self.width == 1 else f'i / {self.width}'}]"
        outputs = [root for root in loop.roots if root.output is not None]
        own = element.new_child()
        made = self.values.make(self.values.missing([root.node for root in outputs], own), own)
        return [*lines, *self._stored([*made, *(self.write(root, own) for root in outputs)])]

    def _reduced(self, root: Root, element: Names) -> list[str]:
        """A reduction over the tile's columns: by a thread over its own, then by the lanes that have the row."""
        place, own = root.node, element.new_child()
        kind, turn = accumulator(self.plan, place), "i" if self.width == 1 else f"i / {self.width}"
        start = self.pattern.start(root)
        made = self.values.make(self.values.missing([start], own), own)
        taken = self.joined(place, f"row_{place}[{turn}]", self.values.text(start, own))
        total = f"reduce_lanes<{self.values.operation(place)}, {self.lanes}>(row_{place}[i])"
        count = str(self.rows_each)
        return [
            f"{kind} row_{place}[{count}];",
            *self._loop("i", count, [f"row_{place}[i] = {self.start(place)};"]),
            *self._at_elements([*made, taken]),
            *self._loop("i", count, [f"row_{place}[i] = {self.values.finished(place, total)};"]),
        ]

    def _stored(self, lines: list[str]) -> list[str]:
        return self._at_elements(lines) if lines else []

    def _at_elements(self, lines: list[str]) -> list[str]:
        """Lines for each of a thread's elements of the tile."""
        at = [*positions(self.pattern, self.rows, "row"), *positions(self.pattern, self.columns, "column")]
        conditions = [] if self._exact else [f"down < {self.tile.rows}"]
        conditions += ["row < rows", "column < columns"]
        return self._loop(
            "i",
            str(self.elements_each),
            [
                *self._within(),
                "const Index row = first_row + down, column = first_column + along;",
                f"if ({' && '.join(conditions)}) {{",
                *used(at, lines),
                *lines,
                "}",
            ],
        )


def _begin(axes: Sequence[int], width: int) -> At:
    """Names of positions along some axes, of which along the last so many are loaded at once."""
    return lambda axis: BEGIN if width > 1 and axis == axes[-1] else axis_name(axis)


def _gathers(node: Input) -> bool:
    return any(index.nodes for index in node.index)
