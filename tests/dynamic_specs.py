"""Specs of dynamic nets, without TensorFlow."""

from __future__ import annotations

from custom_ops.dynamic.program import Builder, Instruction, Kind, Parameter
from custom_ops.dynamic.spec import Spec


def tree_rnn(units: int, words: int = 9, classes: int = 3) -> Spec:
    """p = tanh(W [l; r] + b) over pairs of phrases, words from a table, and a label at each pair."""
    parameters = (
        Parameter("table", (words, units)),
        Parameter("kernel", (units, 2 * units)),
        Parameter("bias", (units,)),
        Parameter("output", (classes, units)),
    )
    leaf = Builder(parameters)
    word = leaf.add(Instruction("lookup", units, (), (0, 0, 0)))
    leaf.sink("put_state", leaf.elementwise("tanh", word), numbers=(0,))
    pair = Builder(parameters)
    left, right = (pair.add(Instruction("child", units, (), (slot, 0))) for slot in range(2))
    product = pair.product(1, pair.concat(left, right), transposed=True)
    bias = pair.add(Instruction("row", units, (), (2, 0)))
    state = pair.elementwise("tanh", pair.elementwise("add", product, bias))
    pair.sink("put_state", state, numbers=(0,))
    pair.sink("put_loss", pair.cross_entropy(0, pair.product(3, state, transposed=True)))
    kinds = (
        Kind("leaf", (), (words,), (units,), (), tuple(leaf.code)),
        Kind("pair", ((units,), (units,)), (classes,), (units,), (), tuple(pair.code)),
    )
    return Spec(parameters, kinds)
