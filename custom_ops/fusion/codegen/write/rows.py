"""C++ of pieces with loops in a row: the threads that own it reduce, by shuffles or through shared memory, and go on
with the result (FusionStitching's warp and block composition)."""

from __future__ import annotations

from custom_ops.expr.cuda import C_TYPES
from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.plan.addresses import offset_along, product
from custom_ops.fusion.codegen.plan.arguments import accumulator, storage
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, RowLoop, counted
from custom_ops.fusion.codegen.plan.pattern import Root
from custom_ops.fusion.codegen.plan.registers import keep
from custom_ops.fusion.codegen.plan.shared import array_axes, array_size, is_array, shared_plan
from custom_ops.fusion.codegen.write.marked_loop import marked_loop
from custom_ops.fusion.codegen.write.piece import Elements, PieceWriter, first_of, if_, used
from custom_ops.fusion.codegen.write.values import Names, axis_name, positions

MOST_STATEMENTS = 512  # of an unrolled loop: NVRTC took 21 s for 64 turns of 234 lines, and 0.7 s for 4 turns of 55


class RowWriter(PieceWriter):
    """Writes a piece whose rows are loops."""

    def __init__(self, plan: KernelPlan, number: int) -> None:
        super().__init__(plan, number)
        self.owner = self.piece.owner
        self.kept = keep(self.pattern, self.piece, self.own)
        self.shared = shared_plan(plan, self.piece)
        self.active = "active" if self.piece.rows and self.owner.rows > 1 else ""
        self.first_lane = "" if self.owner.kind == "thread" else "lane == 0"
        self.one = " && ".join(filter(None, [self.active, self.first_lane]))

    def lines(self) -> list[str]:
        names = Names()
        before = self._numbers(names)
        sums = self._sums()
        row = names.new_child()
        body = self._combined(row)
        for number, loop in enumerate(self.piece.loops):
            body += self._loop(number, loop, row)
        body += [if_(self.one, self.save(place, row)) for place in self.piece.saved if place in row]
        for place in self.piece.saved:
            if place in self.arrays:
                body += self._save_array(place)
        around = self._around([*self._registers(), *body])
        after = [*self._parts_of_rows(), *self.parts_of_numbers()]
        whole = [*self._arrays(), *before, *sums, *around, *after]
        whole = [line for line, last in zip(whole, ["", *whole], strict=False) if line != last or "__sync" not in line]
        return [*self._threads(whole), *whole]

    # ---- The piece

    def _threads(self, body: list[str]) -> list[str]:
        """Declarations of a thread's row and number in the CTA, and of the CTA's slab."""
        owner = self.owner
        rows, threads = owner.rows, owner.threads
        group, lane = {
            "cta": ("0", "threadIdx.x"),
            "thread": ("threadIdx.x", "0"),
            "lanes": (f"threadIdx.x / {threads}", f"threadIdx.x % {threads}"),
            "strided": (f"threadIdx.x % {rows}", f"threadIdx.x / {rows}"),
        }[owner.kind]
        lines = used([f"const int group = {group};", f"const int lane = {lane};"], body)
        if self.piece.slabs > 1:
            slabs = self.piece.slabs
            lines += [f"const int slab = cta % {slabs};", f"cta /= {slabs};", f"ctas /= {slabs};"]
        return lines

    def _arrays(self) -> list[str]:
        """Where arrays within rows lie."""
        lines = []
        for place, at in self.shared.places.items():
            kind = C_TYPES[self.values.dtypes[place]]
            group = f" + group * {array_size(self.plan, self.piece, place)}" if self.owner.rows > 1 else ""
            lines.append(f"{kind}* const array_{place} = reinterpret_cast<{kind}*>(shared + {at}){group};")
        return lines

    def _numbers(self, names: Names) -> list[str]:
        """What does not vary along rows: reductions with one result, and what is computed from them."""
        lines = []
        for place in self.piece.combined:
            if not self.pattern.program.types[place].axes:
                lines += self.combined_number(place)
                names[place] = f"value_{place}"
        if self.piece.rows:
            wanted = self.values.missing(
                map(self.pattern.start, self.piece.roots), names.new_child(dict.fromkeys(self.own, ""))
            )
            wanted = [place for place in wanted if not self.pattern.program.types[place].axes]
            lines += self.values.make(wanted, names)
        return lines

    def _sums(self) -> list[str]:
        """What is accumulated over rows."""
        lines = []
        for number, loop in enumerate(self.piece.loops):
            for root in self._over_rows(loop):
                if root.kept:
                    kind, count = accumulator(self.plan, root.node), self.kept.elements[number]
                    lines += [f"{kind} sums_{root.node}[{count}];", "#pragma unroll"]
                    lines.append(f"for (int k = 0; k < {count}; ++k) sums_{root.node}[k] = {self.start(root.node)};")
                else:
                    lines.append(self.start_sum(root.node))
        return lines

    def _over_rows(self, loop: RowLoop) -> list[Root]:
        return [root for root in loop.roots if root.output is None and self.plan.mappings[root.name].over_rows]

    def _parts_of_rows(self) -> list[str]:
        lines = []
        for loop in self.piece.loops:
            for root in self._over_rows(loop):
                if root.kept:
                    size = self.pattern.static(loop.axes)
                    form = f"{self.values.operation(root.node)}, {self.owner.rows}, {self.owner.threads}, {loop.vector}"
                    parts = f"parts_{root.node} + Index(cta) * {size}"
                    lines.append(f"leave_parts<{form}>({parts}, {size}, sums_{root.node}, exchange);")
        return lines

    # ---- A row

    def _around(self, body: list[str]) -> list[str]:
        """The loop over rows; backward in every second phase, which begins with what the one before has left in L2."""
        piece, at_once = self.piece, self.owner.rows
        if not piece.rows:
            return ["{", *body, "}"]
        before = {other.phase for other in self.plan.pieces if other.looped and other.rows == piece.rows}
        backward = sum(phase < piece.phase for phase in before) % 2 == 1
        name, step, first = "row", "ctas", "cta"
        if at_once > 1:
            name, step, first = "first", f"Index(ctas) * {at_once}", f"Index(cta) * {at_once}"
        if backward:
            first = f"((rows + {at_once - 1}) / {at_once} - 1 - cta) * {at_once}" if at_once > 1 else "rows - 1 - cta"
        there, sign = (">= 0", "-") if backward else ("< rows", "+")
        ahead = []
        if self.kept.ahead:
            after = f"{name} {sign} {step}"
            now = [f"const auto now_{place} = next_{place};" for place in self.kept.ahead]
            body = [*now, f"if ({after} {there}) load_row({after});", *body]
            ahead = [*self._ahead(name), f"if ({first} {there}) load_row({first});"]
        return [
            f"const Index rows = {product([self.pattern.size(axis) for axis in piece.rows])};",
            *ahead,
            f"for (Index {name} = {first}; {name} {there}; {name} {sign}= {step}) {{",
            *self._row(body),
            "}",
        ]

    def _row(self, body: list[str]) -> list[str]:
        """The body, after the declarations of the row of the thread's group and of its position along each axis."""
        at = positions(self.pattern, self.piece.rows, "row")
        if self.owner.rows > 1:
            active = "const bool active = first + group < rows;  // others compute the last row, and store nothing"
            at = [active, "const Index row = active ? first + group : rows - 1;", *at]
        return [*used(at, body), *body]

    def _ahead(self, name: str) -> list[str]:
        """What loads the first loop's inputs of a row before its turn comes."""
        loop = self.piece.loops[0]
        axis, width, count = loop.axes[-1], loop.vector, self.kept.elements[0] // loop.vector
        at = first_of(axis, width)
        declared, loads = [], []
        for place in self.kept.ahead:
            node = self.pattern.program.nodes[place]
            assert isinstance(node, Input)
            kind = storage(self.pattern.program.tensors[node.tensor].dtype)
            declared.append(f"Packs<{kind}, {width}, {count}> next_{place};")
            loads.append(f"next_{place}.at[k] = {self.values.load(node, width, at)};")
        inside = [f"const Index i = {self._place(loop)};", *used(positions(self.pattern, loop.axes, "i", at), loads)]
        if not self._is_full(loop):
            loads = [f"if (i < {self._size(loop.axes)}) {{", *loads, "}"]
        body = ["#pragma unroll", f"for (int k = 0; k < {count}; ++k) {{", *inside, *loads, "}"]
        return [*declared, f"const auto load_row = [&](Index {name}) {{", *self._row(body), "};"]

    def _combined(self, row: Names) -> list[str]:
        """Reductions that have a result for each row, of the parts that CTAs left."""
        lines = []
        for place in self.piece.combined:
            if self.pattern.program.types[place].axes:
                text = self.combined_element(place, "lane", str(self.owner.threads))
                lines += self._finished(place, text, row)
        return lines

    def _registers(self) -> list[str]:
        lines = []
        for number, places in enumerate(self.kept.made):
            for place in sorted(places):
                kind = C_TYPES[self.values.dtypes[place]]
                lines.append(f"{kind} kept_{place}[{self.kept.elements[number]}];")
        return lines

    def _finished(self, place: int, text: str, row: Names) -> list[str]:
        """A reduction's result, of what each thread of the row has."""
        total = f"{self._reduce(place)}({text}{self._exchange()})"
        row[place] = f"value_{place}"
        return [f"const {accumulator(self.plan, place)} value_{place} = {self.values.finished(place, total)};"]

    def _reduce(self, place: int) -> str:
        operation, owner = self.values.operation(place), self.owner
        return {
            "cta": f"reduce_cta<{operation}, {self.threads}>",
            "thread": "",
            "lanes": f"reduce_lanes<{operation}, {owner.threads}>",
            "strided": f"reduce_strided<{operation}, {owner.rows}, {self.threads}>",
        }[owner.kind]

    def _exchange(self) -> str:
        return ", exchange" if self.owner.kind in ("cta", "strided") else ""

    # ---- A loop

    def _loop(self, number: int, loop: RowLoop, row: Names) -> list[str]:
        """One loop, with what it needs of its row before and the results of its reductions after it."""
        inside = (*loop.axes, *loop.serial)
        found = row.new_child(dict.fromkeys(self.kept.values[number], ""))
        missing = self.values.missing(map(self.pattern.start, loop.roots), found)
        before = self.values.make([place for place in missing if not self.values.varies(place, inside)], row)
        if not loop.axes:
            return [*before, *self._once(loop, row)]
        arrays = [root for root in loop.roots if is_array(root, self.plan.mappings[root.name])]
        meet = [self._barrier()] if arrays else []
        if loop.serial:
            lines = [*before, *meet, *self._nested(loop, row), *meet]
            self.arrays.update({root.node: self.array(root.node) for root in arrays})
            return lines
        reduced = [root for root in loop.roots if root.node in self.own and root.reduced]
        split = [root for root in loop.roots if root.output is None and self.plan.mappings[root.name].over_slabs]
        lines = [*before, *(self.start_sum(root.node) for root in [*reduced, *split])]
        if marked := counted(self.pattern, self.piece, loop):
            lines += marked_loop(self, loop, marked, row, self.active)
            return lines + [line for root in reduced for line in self._finished(root.node, f"sum_{root.node}", row)]
        lines += [*meet, *self._positions(number, loop, row), *meet]
        self.arrays.update({root.node: self.array(root.node) for root in arrays})
        for root in reduced:
            lines += self._finished(root.node, f"sum_{root.node}", row)
        for root in split:
            lines += self._left(root)
        return lines

    def _once(self, loop: RowLoop, row: Names) -> list[str]:
        """What is done once for each row."""
        lines = []
        for root, start in zip(loop.roots, map(self.pattern.start, loop.roots), strict=True):
            if root.output is not None:
                lines.append(if_(self.one, self.write(root, row)))
            else:
                lines.append(if_(self.one, self.joined(root.node, f"sum_{root.node}", self.values.text(start, row))))
        return lines

    def _positions(self, number: int, loop: RowLoop, row: Names) -> list[str]:
        """The loop over positions, unrolled where a thread keeps what it sees in registers."""
        threads, width, size = self.owner.threads, loop.vector, self.pattern.static(loop.axes)
        count = self.kept.elements[number]
        lane = "0" if self.owner.kind == "thread" else "lane"
        element = ("k" if width == 1 else f"k * {width} + j") if count else ""
        self.sum_element = element
        exact = size is not None and size % width == 0
        left = "" if exact else "size - i"
        loaded = {place: f"now_{place}.at[k]" for place in self.kept.ahead} if number == 0 else {}
        found = Elements(loop.axes, width, "i", left if width > 1 else "", self.active, element, loaded)
        body = self.elements(found, loop.roots, row, sorted(self.kept.values[number]), sorted(self.kept.made[number]))
        by = f" * {width}" if width > 1 else ""
        total = self._size(loop.axes)
        declared = used([f"const Index size = {total};"], body)
        if count:
            inside = [f"const Index i = {self._place(loop)};"]
            if not self._is_full(loop):
                body = [f"if (i < {total}) {{", *body, "}"]
            unroll = self._unroll(number, loop, count // width, width * len(body))
            lines = [*declared, unroll, f"for (int k = 0; k < {count // width}; ++k) {{", *inside, *body, "}"]
        else:
            slabs = self.piece.slabs
            first = f"(Index(slab) * {threads} + lane){by}" if slabs > 1 else f"{lane}{by}"
            step = slabs * threads * width
            lines = [*declared, "#pragma unroll 4", f"for (Index i = {first}; i < {total}; i += {step}) {{", *body, "}"]
        return ["{", *lines, "}"] if declared else lines

    def _unroll(self, number: int, loop: RowLoop, count: int, statements: int) -> str:
        """How far a loop of so many turns is unrolled: whole where registers are indexed by its counter, which they can
        be in no other way. Else up to `MOST_STATEMENTS`: more keeps the compiler busy, and saves nothing."""
        kept = self.kept.values[number] or self.kept.made[number] or (self.kept.ahead and number == 0)
        split = any(root.output is None and self.plan.mappings[root.name].over_slabs for root in loop.roots)
        turns = 1 << (max(1, MOST_STATEMENTS // max(statements, 1)).bit_length() - 1)
        return "#pragma unroll" if kept or split or turns >= count else f"#pragma unroll {turns}"

    def _is_full(self, loop: RowLoop) -> bool:
        """Whether all threads have as many elements of a row."""
        size = self.pattern.static(loop.axes)
        return size is not None and size % (self.owner.threads * loop.vector) == 0

    def _place(self, loop: RowLoop) -> str:
        """Where the k-th of a thread's elements in a row are."""
        at = "k" if self.owner.kind == "thread" else f"k * {self.owner.threads} + lane"
        if loop.vector == 1:
            return at
        return f"({at}) * {loop.vector}" if " " in at else f"{at} * {loop.vector}"

    def _barrier(self) -> str:
        """The barrier of the threads that own a row."""
        return "__syncwarp();" if self.owner.kind in ("lanes", "thread") else "__syncthreads();"

    def _nested(self, loop: RowLoop, row: Names) -> list[str]:
        """Reductions at each of the positions that threads or warps share."""
        by_warps = loop.way == "warps"
        first, step = ("threadIdx.x / 32", self.threads // 32) if by_warps else ("lane", self.owner.threads)
        lane, lanes = ("threadIdx.x % 32", 32) if by_warps else ("0", 1)
        outside = row.new_child()
        missing = self.values.missing(map(self.pattern.start, loop.roots), outside)
        before = self.values.make([place for place in missing if not self.values.varies(place, loop.serial)], outside)
        inside = self.elements(Elements(loop.serial, 1, "s"), loop.roots, outside)
        after = []
        for root in loop.roots:
            total = f"reduce_lanes<{self.values.operation(root.node)}, 32>" if by_warps else ""
            kind = accumulator(self.plan, root.node)
            after.append(f"const {kind} total_{root.node} = {total}(sum_{root.node});")
            store = f"{self.array(root.node)} = {self.values.finished(root.node, f'total_{root.node}')};"
            after.append(if_("threadIdx.x % 32 == 0" if by_warps else "", store))
        count, each = self._size(loop.axes), self._size(loop.serial)
        body = [
            *before,
            *(self.start_sum(root.node) for root in loop.roots),
            f"for (Index s = {lane}; s < {each}; s += {lanes}) {{",
            *inside,
            "}",
            *after,
        ]
        at = used(positions(self.pattern, loop.axes, "i"), body)
        return [f"for (Index i = {first}; i < {count}; i += {step}) {{", *at, *body, "}"]

    def _save_array(self, place: int) -> list[str]:
        """Stores an array within a row for later phases."""
        axes = array_axes(self.plan, self.piece, place)
        types = self.pattern.program.types[place].axes
        store = f"saved_{place}[{offset_along(self.pattern, types, axis_name)}] = {self.array(place)};"
        lane = "0" if self.owner.kind == "thread" else "lane"
        head = f"for (Index i = {lane}; i < {self._size(axes)}; i += {self.owner.threads}) {{"
        return [head, *positions(self.pattern, axes, "i"), if_(self.active, store), "}"]

    def _size(self, axes: tuple[int, ...]) -> str:
        return product([self.pattern.size(axis) for axis in axes])

    def _left(self, root: Root) -> list[str]:
        """What a CTA has of a reduction that is split over several."""
        total = f"{self._reduce(root.node)}(sum_{root.node}{self._exchange()})"
        kind = accumulator(self.plan, root.node)
        store = f"parts_{root.node}[Index(slab) * rows + row] = total_{root.node};"
        return [f"const {kind} total_{root.node} = {total};", if_(self.one, store)]
