"""Graphs that are recorded op by op: every op with its parameters is a kind of node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from custom_ops.dynamic.node_code import Instruction, Kind
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import DynamicError
from tfmem.dynamic.extension import Expression, KindNumbers
from tfmem.dynamic.recorder import Argument, Operation, Recorder, parameter_of


class RecordedKinds:
    """The kinds that recorded graphs had so far."""

    def __init__(self, parameters: Sequence[tf.Variable]) -> None:
        """Start with no kinds."""
        self.parameters = tuple(parameters)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._known = KindNumbers()  # of those that are alike, found at once
        self._kinds: dict[bool, list[Kind]] = {
            True: [],
            False: [],
        }  # of training, where dropout drops, and of inference
        self._positions = {id(variable): number for number, variable in enumerate(self.parameters)}
        self._specs: dict[bool, Spec] = {}

    def spec(self, *, training: bool) -> Spec:
        """The specification of all kinds so far."""
        known, kinds = self._specs.get(training), self._kinds[training]
        if known is None or len(known.kinds) < len(kinds):
            known = self._specs[training] = Spec(tuple(map(parameter_of, self.parameters)), tuple(kinds))
        return known

    def flatten(self, losses: Sequence[Expression]) -> tuple[tuple[bytes, bytes], ...]:
        """Kinds, children and arguments of the graphs under losses, as `from_bytes` takes them.

        Raises:
            DynamicError: one is no recorded number, or uses a variable that is no parameter of this net.
        """
        for loss in losses:
            if not isinstance(loss, Expression) or loss.measured is None:
                raise DynamicError(
                    "an example is no loss recorded outside of a kind; return one, or pass kinds= to specialize"
                )
            if loss.width != 1:
                raise DynamicError(f"the loss of an example has {loss.width} numbers; expected one number")
        return self._known.flatten(losses, self._number_of_new)

    def _number_of_new(self, expression: Expression | None) -> int:
        """The number of an expression's kind; for None, of the kind of node that takes the loss."""
        if expression is None:
            return self._intern(
                ("loss",), lambda recorder, values, _: recorder.builder.sink("put_loss", *values), (1,), ()
            )
        operation = expression.measured.operation
        missing = [variable for variable in expression.variables if id(variable) not in self._positions]
        if missing:
            raise DynamicError(
                f"{operation.name} reads variable '{missing[0].name}', which is none of the {len(self.parameters)} "
                "parameters of this net; add it to the parameters of specialize"
            )
        numbers = tuple(self._positions[id(variable)] for variable in expression.variables)
        widths = tuple(value.width for value in expression.values)

        def write(recorder: Recorder, values: tuple[int, ...], integers: tuple[Argument, ...]) -> None:
            place = operation.emit(recorder, numbers, values, integers)
            if recorder.builder.code[place].op == "constant":
                place = recorder.builder.add(Instruction("broadcast", 1, (place,)))
            recorder.builder.sink("put_state", place, numbers=(0,))

        return self._intern((operation, numbers, widths), write, widths, (expression.width,), len(expression.integers))

    def _intern(
        self, key: tuple[Any, ...], write: Any, widths: tuple[int, ...], state: tuple[int, ...], integers: int = 0
    ) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            name = key[0].name if isinstance(key[0], Operation) else key[0]
            children = tuple((width,) for width in widths)
            for training, kinds in self._kinds.items():
                recorder = Recorder(self.parameters, [None] * integers, training)
                values = tuple(
                    recorder.builder.add(Instruction("child", width, (), (slot, 0)))
                    for slot, width in enumerate(widths)
                )
                write(recorder, values, tuple(Argument(recorder, number) for number in range(integers)))
                bounds = tuple(bound or 1 for bound in recorder.bounds)
                kinds.append(Kind(name, children, bounds, state, (), tuple(recorder.builder.code)))
        return self._numbers[key]
