"""The cells of TensorFlow Addons, for tests: vectors, sums over a row, products that are multiplied, several states."""

from __future__ import annotations

from collections.abc import Sequence as Many

from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.cells import Mask, activate, add_products, carry, finish


def peephole_lstm(activation: str = "tanh", recurrent_activation: str = "sigmoid", mask: Mask = None) -> Cell:
    """`tfa.rnn.PeepholeLSTMCell`: gates i, f, c, o; states h, c; vectors: the peepholes of i, f, o."""
    builder = CellBuilder()
    gates = builder.sequence(4)
    h, c = builder.state(), builder.state()
    peepholes = [builder.vector(1)[0] for _ in range(3)]
    i, f, candidate, o = add_products(builder, gates, h, builder.matrix(1, 4))

    def gate(value: int, peephole: int, carry: int) -> int:
        seen = builder.apply("multiply", peephole, carry)
        return activate(builder, recurrent_activation, builder.apply("add", value, seen))

    i, f = gate(i, peepholes[0], c), gate(f, peepholes[1], c)
    new_c = carry(builder, f, c, i, activate(builder, activation, candidate))
    new_h = builder.apply("multiply", gate(o, peepholes[2], new_c), activate(builder, activation, new_c))
    return finish(builder, (h, c), (new_h, new_c), new_h, mask)


def layer_norm_lstm(
    units: int,
    epsilon: float = 1e-3,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    mask: Mask = None,
) -> Cell:
    """`tfa.rnn.LayerNormLSTMCell` of `units` (Ba, Kiros and Hinton, 2016); gates i, f, c, o; states h, c.

    The sequence is the input's product after its own normalisation, which no state enters, and with the bias added.
    Vectors: gain and offset of the recurrent products, 4 columns each; gain and offset of c. What is normalised becomes
    the next c, as in Addons.
    """
    builder = CellBuilder()
    gates = builder.sequence(4)
    h, c = builder.state(), builder.state()
    gain, offset, c_gain, c_offset = (builder.vector(columns) for columns in (4, 4, 1, 1))
    matrix = builder.matrix(1, 4)
    products = [builder.product(h, matrix, column=column) for column in range(4)]
    normal = _layer_norm(builder, products, units, epsilon, gain, offset)
    i, f, candidate, o = (builder.apply("add", *pair) for pair in zip(gates, normal, strict=True))
    i, f, o = (activate(builder, recurrent_activation, gate) for gate in (i, f, o))
    carried = carry(builder, f, c, i, activate(builder, activation, candidate))
    (new_c,) = _layer_norm(builder, (carried,), units, epsilon, c_gain, c_offset)
    new_h = builder.apply("multiply", o, activate(builder, activation, new_c))
    return finish(builder, (h, c), (new_h, new_c), new_h, mask)


def layer_norm_simple_rnn(units: int, epsilon: float = 1e-5, activation: str = "tanh", mask: Mask = None) -> Cell:
    """`tfa.rnn.LayerNormSimpleRNNCell` of `units`; vectors: gain, bias (which is added after the normalisation)."""
    builder = CellBuilder()
    gates = builder.sequence(1)
    h = builder.state()
    gain, bias = builder.vector(1), builder.vector(1)
    sums = add_products(builder, gates, h, builder.matrix(1, 1))
    (normal,) = _layer_norm(builder, sums, units, epsilon, gain, bias)
    new_h = activate(builder, activation, normal)
    return finish(builder, (h,), (new_h,), new_h, mask)


def nas(use_bias: bool = False, mask: Mask = None) -> Cell:
    """`tfa.rnn.NASCell` without a projection (Zoph and Le, 2017): 8 gates; states c, m; vector: the bias if used."""
    builder = CellBuilder()
    inputs = builder.sequence(8)
    c, m = builder.state(), builder.state()
    matrix = builder.matrix(1, 8)
    state = [builder.product(m, matrix, column=column) for column in range(8)]
    if use_bias:  # of the state's products, one of which is multiplied: it cannot join the input's
        state = [builder.apply("add", *pair) for pair in zip(state, builder.vector(8), strict=True)]
    joins = ["add", "add", "add", "multiply", "add", "add", "add", "add"]
    activations = ["sigmoid", "relu", "sigmoid", "relu", "tanh", "sigmoid", "tanh", "sigmoid"]
    first = [
        builder.apply(activation, builder.apply(join, *pair))
        for activation, join, *pair in zip(activations, joins, inputs, state, strict=True)
    ]
    second = [
        builder.apply(activation, builder.apply(join, first[2 * pair], first[2 * pair + 1]))
        for pair, (join, activation) in enumerate(
            [("multiply", "tanh"), ("add", "tanh"), ("multiply", "tanh"), ("add", "sigmoid")]
        )
    ]
    injected = builder.apply("tanh", builder.apply("add", second[0], c))
    new_c = builder.apply("multiply", injected, second[1])
    other = builder.apply("tanh", builder.apply("add", second[2], second[3]))
    new_m = builder.apply("tanh", builder.apply("multiply", new_c, other))
    return finish(builder, (c, m), (new_c, new_m), new_m, mask)


def esn(leaky: float = 1.0, activation: str = "tanh", mask: Mask = None) -> Cell:
    """`tfa.rnn.ESNCell`, an echo state network's reservoir: `(1 - leaky) * h + leaky * activation(x + h @ R)`."""
    builder = CellBuilder()
    gates = builder.sequence(1)
    h = builder.state()
    (gate,) = add_products(builder, gates, h, builder.matrix(1, 1))
    new_h = activate(builder, activation, gate)
    if leaky != 1:
        new_h = carry(builder, builder.constant(1 - leaky), h, builder.constant(leaky), new_h)
    return finish(builder, (h,), (new_h,), new_h, mask)


def _layer_norm(
    builder: CellBuilder, values: Many[int], units: int, epsilon: float, gain: Many[int], offset: Many[int]
) -> list[int]:
    """Normalises one row of all `values` together. In two passes, as TensorFlow does: one would cancel digits."""
    share = builder.constant(1 / (units * len(values)))
    mean = builder.apply("multiply", builder.row_sum(builder.sum(*values)), share)
    centred = [builder.apply("subtract", value, mean) for value in values]
    squares = builder.sum(*(builder.apply("square", value) for value in centred))
    variance = builder.apply("multiply", builder.row_sum(squares), share)
    scale = builder.apply("reciprocal_sqrt", builder.apply("add", variance, builder.constant(epsilon)))
    return [
        builder.apply("add", builder.apply("multiply", builder.apply("multiply", value, scale), g), b)
        for value, g, b in zip(centred, gain, offset, strict=True)
    ]
