"""Values of a kind's code as CUDA expressions: where an item's number at a position of a row is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from custom_ops.dynamic.codegen.batch_table import KindTable, ParameterPointers, Table
from custom_ops.dynamic.codegen.segments import SOURCES, KindCode, Ref, SectionCode, SegmentItem
from custom_ops.dynamic.node_code import Parameter
from custom_ops.dynamic.spec import Spec
from custom_ops.expr.cuda import literal


def stride_of(width: int) -> int:
    """How far rows of a value lie apart, as ops/dynamic/spec.h says."""
    return 1 if width == 1 else (width + 15) // 16 * 16


class SectionValues:
    """Where the values of one section of one kind are; `row` is the kind's row."""

    def __init__(
        self, spec: Spec, table: Table, pointers: ParameterPointers, number: int, code: KindCode, section: int
    ) -> None:
        self.spec, self.table, self.pointers, self.code = spec, table, pointers, code
        self.kind = spec.kinds[number]
        self.words: KindTable = table.kinds[number]
        self.section: SectionCode = code.sections[section]

    @property
    def items(self) -> tuple[SegmentItem, ...]:
        return self.section.items

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self.spec.parameters

    def width(self, ref: Ref) -> int:
        """0: a constant."""
        if ref.kind == "c":
            return 0
        return self.code.kept[ref.number] if ref.kind == "k" else self.items[ref.number].width

    def memory(self, ref: Ref) -> str:
        """A pointer to the row of a value that lies in memory."""
        if ref.kind == "k":
            return self._row(self.words.kept[ref.number], self.code.kept[ref.number])
        item = self.items[ref.number]
        place = self.words.kept[item.kept] if item.kept >= 0 else self.words.spilled[item.spilled]
        return self._row(place, item.width)

    def _row(self, word: int, width: int, row: str = "row") -> str:
        return f"net.row({word}, {row}, {stride_of(width)})"

    def sink(self, item: SegmentItem) -> str:
        """A pointer to where an item puts a row."""
        numbers = item.numbers
        match item.op:
            case "put_state":
                kind_type = self.spec.types.index(self.kind.state)
                return self._row(self.table.types[kind_type].states[numbers[0]], item.width, "state")
            case "put_loss":
                return self._row(self.words.loss, 1)
            case "put_output":
                return self._row(self.words.outputs[numbers[0]], item.width)
            case "put_child":
                return self._row(self.words.puts[numbers[0]][numbers[1]], item.width)
        raise AssertionError(item.op)

    def read(self, ref: Ref, j: str) -> str:
        """The number at position `j`."""
        if ref.kind == "c":
            return literal(self.code.constants[ref.number], "float32")
        if ref.kind == "v" and self.items[ref.number].op in SOURCES:
            return self.source(self.items[ref.number], j)
        return f"{self.memory(ref)}[{'0' if self.width(ref) == 1 else j}]"

    def source(self, item: SegmentItem, j: str) -> str:
        """What is read from outside of the kind's values."""
        n, width = item.numbers, item.width
        j = "0" if width == 1 else j
        match item.op:
            case "child" | "lookup" | "row":
                return f"({self._pointer_to_source(item)})[{j}]"
            case "one_hot":
                return f"(argument_{n[0]} == {j} ? 1.0f : 0.0f)"
            case "random":
                return f"net.random({n[0]}ull, node, {j})"
            case "loss_adjoint":
                return "net.loss_gradient(example)"
            case "adjoint":
                number = self.spec.types.index(self.kind.state)
                types = self.table.types[number]
                given = f"{number}, {self.pointers.state_gradient(n[0])}, node"
                return (
                    f"net.adjoint({types.first_parent}, {types.parents}, state, {n[0]}, {width}, {stride_of(width)}, "
                    f"{j}, {given})"
                )
        raise AssertionError(item.op)

    def pointer(self, ref: Ref) -> str | None:
        """A pointer to the first number of a contiguous row; None for a value that is no vector in memory."""
        if ref.kind == "k":
            return self.memory(ref)
        if ref.kind != "v":
            return None
        item = self.items[ref.number]
        if item.op in ("child", "lookup", "row"):
            return self._pointer_to_source(item)
        if item.op in SOURCES:
            return None
        return self.memory(ref) if item.in_memory else None

    def _pointer_to_source(self, item: SegmentItem) -> str:
        n = item.numbers
        match item.op:
            case "child":
                state = self.table.types[self.spec.types.index(self.kind.children[n[0]])].states[n[1]]
                return f"net.row({state}, child_{n[0]}, {stride_of(item.width)})"
            case "lookup":
                columns = self.parameters[n[0]].shape[-1]
                at = f"static_cast<long long>(argument_{n[1]}) * {columns} + {n[2]}"
                return f"net.parameter({self.pointers.parameter(n[0])}) + {at}"
            case "row":
                return f"net.parameter({self.pointers.parameter(n[0])}) + {n[1]}"
        raise AssertionError(item.op)

    def weight(self, item: SegmentItem, j: str, k: int) -> str:
        """What a product multiplies number `k` by for its output `j`."""
        parameter, row, column, transposed = item.numbers
        columns = self.parameters[parameter].shape[-1]
        at = f"({row} + {j}) * {columns} + {column + k}" if transposed else f"{(row + k) * columns + column} + {j}"
        return f"net.parameter({self.pointers.parameter(parameter)})[{at}]"

    def indices(self, places: Collection[int]) -> Iterator[str]:
        """Declarations of what the expressions of these items, and of the sources that they read, name."""
        wanted: dict[str, int] = {}
        for place in sorted(
            {*places, *(ref.number for p in places for ref in self.items[p].values if ref.kind == "v")}
        ):
            item = self.items[place]
            n = item.numbers
            match item.op:
                case "child":
                    wanted[f"child_{n[0]}"] = self.words.children[n[0]]
                case "lookup":
                    wanted[f"argument_{n[1]}"] = self.words.arguments[n[1]]
                case "one_hot":
                    wanted[f"argument_{n[0]}"] = self.words.arguments[n[0]]
                case "random":
                    wanted["node"] = self.words.nodes
                case "loss_adjoint":
                    wanted["example"] = self.words.examples
                case "adjoint":
                    wanted["state"] = self.words.states
                    wanted["node"] = self.words.nodes
                case "put_state":
                    wanted["state"] = self.words.states
        for name, word in wanted.items():
            yield f"const int {name} = net.index({word}, row);"
