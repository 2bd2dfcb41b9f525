"""The gradient of a kind's code, written as code, by the derivative rules of the table of elementwise ops."""

from __future__ import annotations

from custom_ops.dynamic.node_code import Builder, Instruction, Kind, Parameter
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.expr.table_entry import Derivation

_CONSTANT = ("constant", "one_hot", "random")


def differentiate(parameters: tuple[Parameter, ...], kind: Kind) -> tuple[Instruction, ...]:
    """The kind's code, and behind it what computes the gradients of `parameters` that are trained, from `adjoint` and
    `loss_adjoint`."""
    return _Backward(parameters, kind).run()


class _Backward:
    def __init__(self, parameters: tuple[Parameter, ...], kind: Kind) -> None:
        self.builder = Builder(parameters, kind.code)
        self.kind = kind
        self.trained = _trained(parameters, kind.code)
        self.adjoints: dict[int, list[int]] = {}
        self.parts: dict[int, list[tuple[int, int]]] = {}  # of values that are sliced: where, and the adjoint

    def run(self) -> tuple[Instruction, ...]:
        for instruction in self.kind.code:
            if instruction.op == "put_state":
                width = self.builder.width(instruction.values[0])
                adjoint = self.builder.add(Instruction("adjoint", width, (), instruction.numbers))
                self.give(instruction.values[0], adjoint)
            elif instruction.op == "put_loss":
                self.give(instruction.values[0], self.builder.add(Instruction("loss_adjoint", 1)))
        for place in reversed(range(len(self.kind.code))):
            total = self.adjoint_of(place)
            if total is not None:
                self.pass_on(place, self.kind.code[place], total)
        return tuple(self.builder.code)

    def give(self, value: int, adjoint: int) -> None:
        if self.trained[value]:
            width = self.builder.width(value)
            if width == 1 and self.builder.width(adjoint) > 1:
                adjoint = self.builder.reduce_sum(adjoint)
            self.adjoints.setdefault(value, []).append(self.builder.broadcast(adjoint, width))

    def adjoint_of(self, value: int) -> int | None:
        given = self.adjoints.get(value, [])
        if value in self.parts:
            given = [*given, *self._from_parts(value)]
        if not given:
            return None
        total = given[0]
        for other in given[1:]:
            total = self.builder.elementwise("add", total, other)
        return total

    def _from_parts(self, value: int) -> list[int]:
        """Adjoints of slices as adjoints of the whole: side by side if they do not overlap, else one by one."""
        parts, width = sorted(self.parts[value]), self.builder.width(value)
        ends = [first + self.builder.width(adjoint) for first, adjoint in parts]
        if all(end <= first for end, (first, _) in zip(ends, parts[1:], strict=False)):
            return [self._padded(parts, width)]
        return [self._padded([part], width) for part in parts]

    def _padded(self, parts: list[tuple[int, int]], width: int) -> int:
        pieces, at = [], 0
        for first, adjoint in [*parts, (width, -1)]:
            if first > at:
                pieces.append(self.builder.add(Instruction("broadcast", first - at, (self.builder.constant(0),))))
            if adjoint >= 0:
                pieces.append(adjoint)
                at = first + self.builder.width(adjoint)
        return self.builder.concat(*pieces)

    def pass_on(self, place: int, instruction: Instruction, adjoint: int) -> None:
        builder, values, numbers = self.builder, instruction.values, instruction.numbers
        adjoint = builder.broadcast(adjoint, instruction.width)
        match instruction.op:
            case "child":
                builder.sink("put_child", adjoint, numbers=numbers)
            case "lookup":
                builder.sink("put_lookup", adjoint, numbers=numbers)
            case "row":
                builder.sink("column_sum", adjoint, numbers=numbers)
            case "product":
                self._product(instruction, adjoint)
            case "broadcast":
                self.give(values[0], builder.reduce_sum(adjoint))
            case "concat":
                first = 0
                for value in values:
                    self.give(value, builder.slice(adjoint, first, builder.width(value)))
                    first += builder.width(value)
            case "slice":
                if self.trained[values[0]]:
                    self.parts.setdefault(values[0], []).append((numbers[0], adjoint))
            case "reduce_sum":
                self.give(values[0], adjoint)
            case "reduce_max":
                if not numbers[0]:
                    # TensorFlow's: all that are the maximum share its gradient
                    largest = builder.elementwise("equal", values[0], place)
                    share = builder.elementwise("divide", largest, builder.reduce_sum(largest))
                    self.give(values[0], builder.elementwise("multiply", share, adjoint))
            case _:
                self._elementwise(place, instruction, adjoint)

    def _product(self, instruction: Instruction, adjoint: int) -> None:
        operand, (parameter, row, column, transposed) = instruction.values[0], instruction.numbers
        pair = (adjoint, operand) if transposed else (operand, adjoint)
        if self.builder.parameters[parameter].trained:
            self.builder.sink("outer", *pair, numbers=(parameter, row, column))
        for base in instruction.values[1:]:
            self.give(base, adjoint)
        if self.trained[operand]:
            width = self.builder.width(operand)
            self.give(
                operand,
                self.builder.product_of_block(parameter, adjoint, row, column, not transposed, width),
            )

    def _elementwise(self, place: int, instruction: Instruction, adjoint: int) -> None:
        derivation = Derivation(self.builder.elementwise, self.builder.constant, adjoint, place, instruction.values)
        given = FLOAT_OPS[instruction.op].derivative(derivation)
        for value, gradient in zip(instruction.values, given, strict=True):
            if gradient is not None:
                self.give(value, gradient)


def _trained(parameters: tuple[Parameter, ...], code: tuple[Instruction, ...]) -> list[bool]:
    """Flags, for each value, whether it depends on a trained parameter or on a child."""
    trained: list[bool] = []
    for instruction in code:
        reads = any(trained[value] for value in instruction.values)
        if instruction.op in {"lookup", "row", "product"}:
            reads = reads or parameters[instruction.numbers[0]].trained
        trained.append(instruction.op not in _CONSTANT and (reads or instruction.op == "child"))
    return trained
