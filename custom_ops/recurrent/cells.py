"""Recurrent cells by name: Keras's and cuDNN's.

The products with the input are not in them: one GEMM over the whole sequence makes those, biases included, before the
recurrence starts. So every cell reads a sequence `[time, batch, gates * units]`, and multiplies its state with a matrix
`[units, gates * units]`, gates in the order of the layer. Every cell puts out h, `[time, batch, units]`.

With a mask, the last sequence is a scalar `[time, batch]`. Where it is 0 the states stay as they are and the output
repeats the previous step's ("repeat", Keras's default: before the first step that is 0, so it is one more state, the
last, which starts from zeros) or is 0 ("zero", Keras's `zero_output_for_mask`, and cuDNN past a sequence's length)."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Literal

from custom_ops.errors import CellError
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder

Mask = Literal["repeat", "zero"] | None


def lstm(activation: str = "tanh", recurrent_activation: str = "sigmoid", mask: Mask = None) -> Cell:
    """`keras.layers.LSTM`: gates i, f, c, o; states h, c."""
    builder = CellBuilder()
    gates = builder.sequence(4)
    h, c = builder.state(), builder.state()
    i, f, candidate, o = add_products(builder, gates, h, builder.matrix(1, 4))
    i, f, o = (activate(builder, recurrent_activation, gate) for gate in (i, f, o))
    new_c = carry(builder, f, c, i, activate(builder, activation, candidate))
    new_h = builder.apply("multiply", o, activate(builder, activation, new_c))
    return finish(builder, (h, c), (new_h, new_c), new_h, mask)


def gru(
    reset_after: bool = True, activation: str = "tanh", recurrent_activation: str = "sigmoid", mask: Mask = None
) -> Cell:
    """`keras.layers.GRU`: gates z, r, h; one state.

    With `reset_after` there is the recurrent bias, a vector of 3 columns, for one part of it is multiplied with the
    reset gate; and one synchronisation a step instead of two.
    """
    builder = CellBuilder()
    gates = builder.sequence(3)
    h = builder.state()
    matrix = builder.matrix(1, 3)
    bias = builder.vector(3) if reset_after else ()
    recurrent = [builder.product(h, matrix, column=column) for column in range(3 if reset_after else 2)]
    recurrent = [builder.apply("add", *pair) for pair in zip(recurrent, bias, strict=True)] if bias else recurrent
    z, r = (
        activate(builder, recurrent_activation, builder.apply("add", gates[gate], recurrent[gate])) for gate in (0, 1)
    )
    if reset_after:
        inner = builder.apply("multiply", r, recurrent[2])
    else:
        inner = builder.product(builder.apply("multiply", r, h), matrix, column=2)
    candidate = activate(builder, activation, builder.apply("add", gates[2], inner))
    rest = builder.apply("subtract", builder.constant(1), z)
    new_h = carry(builder, z, h, rest, candidate)
    return finish(builder, (h,), (new_h,), new_h, mask)


def simple_rnn(activation: str = "tanh", mask: Mask = None) -> Cell:
    """`keras.layers.SimpleRNN`."""
    builder = CellBuilder()
    gates = builder.sequence(1)
    h = builder.state()
    (gate,) = add_products(builder, gates, h, builder.matrix(1, 1))
    new_h = activate(builder, activation, gate)
    return finish(builder, (h,), (new_h,), new_h, mask)


def activate(builder: CellBuilder, name: str, value: int) -> int:
    """A Keras activation: an elementwise op of one argument, `linear` or `hard_sigmoid` (Keras 3's).

    Raises:
        CellError: it is none of these.
    """
    if name == "linear":
        return value
    if name == "hard_sigmoid":
        shifted = builder.apply("relu", builder.apply("add", value, builder.constant(3)))
        clipped = builder.apply("minimum", shifted, builder.constant(6))
        return builder.apply("multiply", clipped, builder.constant(1 / 6))
    known = sorted(name for name, op in FLOAT_OPS.items() if op.arity == 1)
    if name not in known:
        raise CellError(f"no activation '{name}'; there are linear, hard_sigmoid, {', '.join(known)}")
    return builder.apply(name, value)


def add_products(builder: CellBuilder, gates: Many[int], h: int, matrix: int) -> list[int]:
    return [builder.apply("add", gate, builder.product(h, matrix, column=k)) for k, gate in enumerate(gates)]


def carry(builder: CellBuilder, keep: int, old: int, write: int, new: int) -> int:
    """`keep * old + write * new`."""
    return builder.apply("add", builder.apply("multiply", keep, old), builder.apply("multiply", write, new))


def finish(builder: CellBuilder, old: Many[int], new: Many[int], output: int, mask: Mask) -> Cell:
    """Ends a cell whose states go from `old` to `new`, masked or not."""
    if mask is None:
        return builder.build(new, ((output,),))
    (valid,) = builder.sequence(0)
    new = [builder.apply("select", valid, *pair) for pair in zip(new, old, strict=True)]
    if mask == "zero":
        return builder.build(new, ((builder.apply("select", valid, output, builder.constant(0)),),))
    previous = builder.state()
    output = builder.apply("select", valid, output, previous)
    return builder.build([*new, output], ((output,),))
