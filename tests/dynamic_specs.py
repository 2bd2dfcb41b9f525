"""Specs of dynamic nets, without TensorFlow."""

from __future__ import annotations

from custom_ops.dynamic.node_code import Builder, Instruction, Kind, Parameter
from custom_ops.dynamic.spec import Spec
from custom_ops.expr.table import FLOAT_OPS


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


def of_all_ops(units: int) -> Spec:
    """Kinds with every instruction: all ops of the table, dropout, outputs, states of two vectors and of one number."""
    parameters = (Parameter("table", (7, units)), Parameter("kernel", (2 * units, units)), Parameter("bias", (units,)))
    leaf = Builder(parameters)
    word = leaf.add(Instruction("lookup", units, (), (0, 0, 0)))
    drawn = leaf.add(Instruction("random", units, (), (1,)))
    kept = leaf.elementwise("select", leaf.elementwise("greater_equal", drawn, leaf.constant(0.25)), word, drawn)
    leaf.sink("put_state", kept, numbers=(0,))
    leaf.sink("put_state", leaf.reduce_max(kept), numbers=(1,))
    node = Builder(parameters)
    vectors = [node.add(Instruction("child", units, (), (slot, 0))) for slot in range(2)]
    number = node.add(Instruction("child", 1, (), (0, 1)))
    bias = node.add(Instruction("row", units, (), (2, 0)))
    total = node.broadcast(number, units)
    for name, op in FLOAT_OPS.items():
        total = node.elementwise("add", total, node.elementwise(name, *[*vectors, bias][: op.arity]))
    joined = node.concat(node.softmax(total), node.elementwise("tanh", total))
    state = node.elementwise("add", node.product(1, joined, transposed=False), bias)
    node.sink("put_state", state, numbers=(0,))
    node.sink("put_state", node.reduce_sum(node.slice(joined, 1, units)), numbers=(1,))
    node.sink("put_loss", node.cross_entropy(0, node.product(1, state, transposed=True)))
    node.sink("put_output", joined, numbers=(0,))
    both = ((units, 1), (units, 1))
    kinds = (
        Kind("leaf", (), (7,), (units, 1), (), tuple(leaf.code)),
        Kind("node", both, (2 * units,), (units, 1), (2 * units,), tuple(node.code)),
    )
    return Spec(parameters, kinds)
