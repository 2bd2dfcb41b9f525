"""Where the kernel finds things: words of the table that each batch brings, and of the kernel's parameter.

ops/dynamic/gpu_tables.cc writes both, in this order. Places are in floats from the beginning of a batch's memory, lists
in words from the beginning of what is sent; both have four bytes.

The table: for each type of state the place of each vector, the list of first parents, the list of parents; for each
kind its number of nodes, the lists of their numbers, examples and rows of states, of each child's row, of each
argument, and the places of kept values, of spilled values, of outputs, of what is put for each vector of each child, of
the losses; for each parameter the lists of rows looked up, of the first entry of each, of entries; of the batch the
lists of first nodes and of losses.

The parameter, 64 bits each: what is sent; memory; status; seed; rule; gradients of losses or 0; rates, two and two;
losses; 1 + the type of the states whose gradients are given, or 0; a word of host memory for a failure, or 0; then
pointers to parameters, to gradients or the
first slots, to the second slots, to outputs, to states, to gradients of states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from custom_ops.dynamic.codegen.segments import KindCode
from custom_ops.dynamic.spec import Spec

SENT, MEMORY, STATUS, SEED, RULE, LOSS_GRADIENTS, RATES, MORE_RATES, LOSSES, GRADIENT_TYPE, FAILURE, POINTERS = range(
    12
)


@dataclass
class KindTable:
    """Positions of a kind's words."""

    count: int = 0
    nodes: int = 0
    examples: int = 0
    states: int = 0
    children: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    spilled: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    puts: list[list[int]] = field(default_factory=list)
    loss: int = 0


@dataclass
class TypeTable:
    """Positions of a type's words."""

    states: list[int] = field(default_factory=list)
    first_parent: int = 0
    parents: int = 0


class Table:
    """Positions of all words; `size` is their number."""

    def __init__(self, spec: Spec, kinds: Sequence[KindCode]) -> None:
        self.size = 0
        self.types: list[TypeTable] = []
        self.kinds: list[KindTable] = []
        for widths in spec.types:
            self.types.append(TypeTable(self._words(len(widths)), self._word(), self._word()))
        for kind, code in zip(spec.kinds, kinds, strict=True):
            table = KindTable(self._word(), self._word(), self._word(), self._word())
            table.children = self._words(len(kind.children))
            table.arguments = self._words(len(kind.arguments))
            table.kept = self._words(len(code.kept))
            table.spilled = self._words(len(code.spilled))
            table.outputs = self._words(len(kind.outputs))
            table.puts = [self._words(len(child)) for child in kind.children]
            table.loss = self._word()
            self.kinds.append(table)
        self.looked_up = [self._words(3) for _ in spec.parameters]
        self.first_node, self.losses = self._word(), self._word()

    def _word(self) -> int:
        self.size += 1
        return self.size - 1

    def _words(self, count: int) -> list[int]:
        return [self._word() for _ in range(count)]


@dataclass(frozen=True)
class ParameterPointers:
    """Positions of the parameter's pointers."""

    parameters: int
    outputs: int
    states: int

    def parameter(self, number: int) -> int:
        return POINTERS + number

    @property
    def first_output(self) -> int:
        return POINTERS + 3 * self.parameters

    def state_gradient(self, number: int) -> int:
        return self.first_output + self.outputs + self.states + number

    @property
    def words(self) -> int:
        return self.first_output + self.outputs + 2 * self.states


def pointers_of(spec: Spec) -> ParameterPointers:
    outputs = max((len(kind.outputs) for kind in spec.kinds), default=0)
    return ParameterPointers(len(spec.parameters), outputs, max((len(widths) for widths in spec.types), default=0))
