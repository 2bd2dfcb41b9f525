"""Everything but products, as loops over the positions of a node's vectors: one team of threads has one node.

Items of one width share a loop, unless one reads a sum of another, or numbers at other positions than its own. What a
later loop reads again of an earlier one is computed again, if it does not lie in memory anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.dynamic.codegen.segments import SINKS, SOURCES, Ref, SegmentItem
from custom_ops.dynamic.codegen.values import SectionValues
from custom_ops.expr.cuda import emit_cuda, literal
from custom_ops.expr.nodes import Elementwise

_REDUCTIONS = {  # its start, a step, and the team's
    "reduce_sum": (0.0, "{0} + {1}", "sum"),
    "reduce_max": (float("-inf"), "maximum({0}, {1})", "max"),
}
_MOVED = ("concat", "slice", "dot")  # read at other positions than they are computed at


def rows_source(values: SectionValues, places: Sequence[int]) -> list[str]:
    """C++ for one row, within a loop over `row`."""
    return _Rows(values, places).write()


class _Rows:
    def __init__(self, values: SectionValues, places: Sequence[int]) -> None:
        self.values, self.items = values, values.items
        self.left = list(places)
        self.own = set(places)
        self.of_row: dict[Ref, str] = {}  # numbers in variables of the row
        self.parts: set[str] = set()  # numbers of vectors, in variables of the row
        self.fresh: set[int] = set()  # written to memory since the team's threads last met
        self.lines: list[str] = []

    def write(self) -> list[str]:
        self.lines += self.values.indices(self._read_by(self.left))
        while self.left:
            before = len(self.left)
            self._numbers()
            if any(self._width(place) > 1 and self._fits(place, [], []) for place in self.left):
                self._loop()
            assert len(self.left) < before
        return self.lines

    def _read_by(self, places: Sequence[int]) -> list[int]:
        """These items, and all items of the section from which their values may be computed again."""
        found = list(dict.fromkeys(places))
        for place in found:
            found += [r.number for r in self.items[place].values if r.kind == "v" and r.number not in found]
        return found

    def _width(self, place: int) -> int:
        """The width of the loop that an item belongs to."""
        item = self.items[place]
        return self.values.width(item.values[0]) if item.op in _REDUCTIONS else item.width

    def _known(self, ref: Ref) -> bool:
        return ref.kind != "v" or ref.number not in self.left or self.items[ref.number].op in SOURCES

    # ---- numbers of a row ----

    def _numbers(self) -> None:
        again = True
        while again:
            again = False
            for place in list(self.left):
                item = self.items[place]
                if self._width(place) == 1 and all(map(self._known, item.values)):
                    self._meet([place])
                    self.left.remove(place)
                    self._number(place, item)
                    again = True

    def _number(self, place: int, item: SegmentItem) -> None:
        if item.op in SINKS:
            value = self._value(item.values[0], {}, self.lines)
            self.lines.append(f"if (team.rank == 0) {self.values.sink(item)}[0] = {value};")
            return
        value = self._declare(Ref("v", place), {}, self.lines)
        if item.in_memory:
            self.lines.append(f"if (team.rank == 0) {self.values.memory(Ref('v', place))}[0] = {value};")

    # ---- loops ----

    def _loop(self) -> None:
        """A loop over as many items of one width as fit."""
        width = next(self._width(p) for p in self.left if self._width(p) > 1 and self._fits(p, [], []))
        members: list[int] = []
        reductions: list[int] = []
        again = True
        while again:
            again = False
            for place in self.left:
                if self._width(place) != width or place in members or place in reductions:
                    continue
                if self._fits(place, members, reductions):
                    (reductions if self.items[place].op in _REDUCTIONS else members).append(place)
                    again = True
        self.left = [place for place in self.left if place not in members and place not in reductions]
        self._meet(self._read_by([*members, *reductions]))
        body: list[str] = []
        local: dict[Ref, str] = {}
        for place in members:
            item, ref = self.items[place], Ref("v", place)
            if item.op in SINKS:
                body.append(f"{self.values.sink(item)}[j] = {self._value(item.values[0], local, body)};")
                continue
            value = self._value(ref, local, body, compute=True)
            if item.in_memory:
                body.append(f"{self.values.memory(ref)}[j] = {value};")
        for place in reductions:
            step = _REDUCTIONS[self.items[place].op][1]
            value = self._value(self.items[place].values[0], local, body)
            body.append(f"total_{place} = {step.format(f'total_{place}', value)};")
        for place in reductions:
            start = literal(_REDUCTIONS[self.items[place].op][0], "float32")
            self.lines.append(f"float total_{place} = {start};")
        self.lines += [f"for (int j = team.rank; j < {width}; j += team.size) {{", *body, "}"]
        self.fresh.update(place for place in members if self.items[place].in_memory)
        for place in reductions:
            ref = Ref("v", place)
            how = _REDUCTIONS[self.items[place].op][2]
            self.lines.append(f"const float value_{place} = team.{how}(total_{place});")
            self.of_row[ref] = f"value_{place}"
            if self.items[place].in_memory:
                self.lines.append(f"if (team.rank == 0) {self.values.memory(ref)}[0] = value_{place};")

    def _fits(self, place: int, members: Sequence[int], reductions: Sequence[int]) -> bool:
        item = self.items[place]
        for ref in item.values:
            if self._known(ref):
                continue
            # computed in the loop itself, at the same position
            if ref.number not in members or item.op in _MOVED:
                return False
        return not any(ref.kind == "v" and ref.number in reductions for ref in item.values)

    def _meet(self, places: Sequence[int]) -> None:
        """The team's threads wait for each other before one reads what another wrote."""
        refs = [ref for place in places if self.items[place].op in _MOVED for ref in self.items[place].values]
        if any(ref.kind == "v" and ref.number in self.fresh for ref in refs):
            self.lines.append("team.sync();")
            self.fresh.clear()

    # ---- values ----

    def _value(self, ref: Ref, local: dict[Ref, str], body: list[str], *, compute: bool = False) -> str:
        """The name of a number at position `j`, declared in `body` or, if it is the row's, before the loop."""
        if ref.kind == "c":
            return self.values.read(ref, "0")
        if ref in self.of_row:
            return self.of_row[ref]
        if self.values.width(ref) == 1:
            return self._declare(ref, {}, self.lines)
        if ref not in local:
            self._declare(ref, local, body, compute=compute)
        return local[ref]

    def _declare(self, ref: Ref, local: dict[Ref, str], body: list[str], *, compute: bool = False) -> str:
        name = f"{'kept' if ref.kind == 'k' else 'value'}_{ref.number}"
        number = self.values.width(ref) == 1
        item = self.items[ref.number] if ref.kind == "v" else None
        # what lies in memory is read, unless this is where it is computed
        computed = compute or (number and ref.number in self.own)
        if item is None or (item.in_memory and not computed):
            text = self.values.read(ref, "j")
        else:
            text = self._text(item, "0" if number else "j", local, body)
        body.append(f"const float {name} = {text};")
        (self.of_row if number else local)[ref] = name
        return name

    def _text(self, item: SegmentItem, j: str, local: dict[Ref, str], body: list[str]) -> str:
        if item.op in SOURCES:
            return self.values.source(item, j)
        if item.op == "slice":
            return self.values.read(item.values[0], f"({j} + {item.numbers[0]})")
        if item.op == "concat":
            return self._concat(item, j)
        if item.op == "dot":
            return self._dot(item, j, local, body)
        if item.op == "broadcast" or item.op in _REDUCTIONS:  # a sum over one number
            return self._value(item.values[0], local, body)
        arguments = [self._value(ref, local, body) for ref in item.values]
        return _elementwise(item.op, arguments)

    def _concat(self, item: SegmentItem, j: str) -> str:
        text, start = "", 0
        for number, ref in enumerate(item.values):
            width = self.values.width(ref)
            part = self.of_row.get(ref) or self.values.read(ref, f"({j} - {start})")
            last = number == len(item.values) - 1
            text += part if last else f"{j} < {start + width} ? {part} : "
            start += width
        return f"({text})"

    def _dot(self, item: SegmentItem, j: str, local: dict[Ref, str], body: list[str]) -> str:
        """A sum of few products: what is multiplied lies in variables of the row."""
        operand, width = item.values[0], self.values.width(item.values[0])
        terms = [self._value(ref, local, body) for ref in item.values[1:]]
        for k in range(width):
            name = self.of_row.get(operand) if width == 1 else None
            if name is None:
                name = f"{'kept' if operand.kind == 'k' else 'value'}_{operand.number}_{k}"
                if name not in self.parts:
                    self.parts.add(name)
                    self.lines.append(f"const float {name} = {self.values.read(operand, str(k))};")
            terms.append(f"{name} * {self.values.weight(item, j, k)}")
        return " + ".join(terms)


def _elementwise(op: str, arguments: Sequence[str]) -> str:
    """The expression of one op of the table."""
    node = Elementwise(op, tuple(range(1, 1 + len(arguments))))
    dtypes = ["float32"] * (1 + len(arguments))
    (line,) = emit_cuda([node], dtypes, {0: None}, lambda place: arguments[place - 1])
    return line.removeprefix("const float value_0 = ").removesuffix(";")
