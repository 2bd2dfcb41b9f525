"""Which arguments of nodes choose rows of a parameter: for kinds, and for the nodes of a batch."""

from __future__ import annotations

import numpy as np

from custom_ops.dynamic.node_code import Instruction, Kind
from custom_ops.dynamic.row_reads import row_reads


def lookup(parameter: int, argument: int) -> Instruction:
    return Instruction("lookup", 4, (), (parameter, argument))


def kind(name: str, arguments: int, *code: Instruction) -> Kind:
    return Kind(name, (), (9,) * arguments, (4,), (), code)


KINDS = (
    kind("none", 0),
    kind("first", 2, lookup(1, 0), lookup(0, 1)),
    kind("both", 3, lookup(1, 0), lookup(1, 2)),
    kind("other", 1, lookup(0, 0)),
)


def test_flags_of_kinds_and_nodes() -> None:
    reads = row_reads(KINDS, 1)
    assert reads.flags == ((), (True, False), (True, False, True), (False,))
    assert reads.shared == ()
    dice = np.random.default_rng(0)
    for count in (0, 1, 50):
        nodes = dice.integers(0, len(KINDS), count).astype(np.int32)
        expected = [flag for node in nodes for flag in reads.flags[node]]
        np.testing.assert_array_equal(reads.of_nodes(nodes), np.array(expected, bool))


def test_kinds_that_there_are_not() -> None:
    reads = row_reads(KINDS, 1)
    assert reads.of_nodes(np.array([0, 4], np.int32)) is None
    assert reads.of_nodes(np.array([-1], np.int32)) is None


def test_an_argument_that_chooses_something_else_as_well() -> None:
    shared = kind("shared", 2, lookup(1, 1), lookup(0, 1))
    one_hot = kind("one_hot", 1, lookup(1, 0), Instruction("one_hot", 5, (), (0, 5)))
    assert row_reads((*KINDS, shared, one_hot), 1).shared == (("shared", 1), ("one_hot", 0))
