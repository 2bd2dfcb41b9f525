"""The order in which a kind's instructions run, and the places of their values, decided once for each kind.

Nodes of a kind that have the same depth are computed together, as the rows of matrices. What does not depend on a child
is computed for all nodes of the kind at once, before the first level; what no state depends on, after the last. So
there are six sections of a kind's code:

    0  forward, before the levels       3  backward, before the levels: what needs no adjoint of a state
    1  forward, level by level          4  backward, level by level from the last
    2  forward, after the levels        5  backward, after the levels

and section 6 sums the gradients of parameters over all nodes of the kind: the outer products of a weight matrix are one
product of matrices.

A value that another section reads is *kept* for all nodes; any other lies in *scratch*, which is as small as a block of
rows. What is only read from somewhere (a child's state, a row of a table) is read again in each section.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from custom_ops.dynamic.node_code import Instruction, Kind
from custom_ops.expr.table import FLOAT_OPS

BEFORE, LEVEL, AFTER, BACK_BEFORE, BACK_LEVEL, BACK_AFTER, GRADIENTS = range(7)
_GRADIENTS = ("outer", "column_sum", "put_lookup")
_READ_AGAIN = ("child", "lookup", "row", "one_hot", "random", "adjoint")


@dataclass(frozen=True)
class ValuePlace:
    """Where a value lies: "k" kept, "s" scratch, "c" a constant, each with its number."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"


@dataclass(frozen=True)
class SectionStep:
    """An instruction with the places of its target, if it has one, and of its values."""

    op: str
    target: ValuePlace | None
    values: tuple[ValuePlace, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Sections:
    """A kind's code as the op runs it.

    Attributes:
        kept: the width of each kept value.
        scratch: the width of each place of scratch.
        constants: their numbers.
        steps: of each of the seven sections.
    """

    kept: tuple[int, ...]
    scratch: tuple[int, ...]
    constants: tuple[float, ...]
    steps: tuple[tuple[SectionStep, ...], ...]


def sections(kind: Kind, code: tuple[Instruction, ...], together: bool = False) -> Sections:
    """The sections of the kind with `code`, which `differentiate` returned.

    Args:
        kind: the kind.
        code: its code, with the backward pass.
        together: whether products follow each other where they can, for a CPU's scripts. A GPU's segments find products
            wherever they are.
    """
    return _Writer(code, _sections_of(kind, code), together).write()


def _sections_of(kind: Kind, code: tuple[Instruction, ...]) -> list[int]:
    """The section of each instruction; -1 of those that nothing needs."""
    forward = len(kind.code)
    from_child: list[bool] = []
    from_adjoint: list[bool] = []
    from_loss: list[bool] = []
    for instruction in code:
        reads = instruction.values
        from_child.append(instruction.op == "child" or any(from_child[value] for value in reads))
        from_adjoint.append(instruction.op == "adjoint" or any(from_adjoint[value] for value in reads))
        from_loss.append(instruction.op == "loss_adjoint" or any(from_loss[value] for value in reads))
    for_state = _needed(code, ("put_state",))
    for_child = _needed(code, ("put_child",))
    needed = _needed(code, tuple({i.op for i in code if i.width == 0}))
    found: list[int] = []
    for place, instruction in enumerate(code):
        if not needed[place]:
            found.append(-1)
        elif instruction.op in _GRADIENTS:
            found.append(GRADIENTS)
        elif place < forward:
            found.append((LEVEL if for_state[place] else AFTER) if from_child[place] else BEFORE)
        elif from_adjoint[place]:
            found.append(BACK_LEVEL if for_child[place] else BACK_AFTER)
        else:
            found.append(BACK_BEFORE)
    # What the backward pass computes of forward values alone is computed where it is read first.
    readers: dict[int, list[int]] = {}
    for place in reversed(range(len(code))):
        pure = place >= forward and not from_adjoint[place] and not from_loss[place] and code[place].width > 0
        sections_of_readers = [found[reader] for reader in readers.get(place, ()) if found[reader] >= 0]
        if pure and found[place] >= 0 and sections_of_readers and min(sections_of_readers) != GRADIENTS:
            found[place] = min(sections_of_readers)
        for value in code[place].values:
            readers.setdefault(value, []).append(place)
    return found


def _needed(code: tuple[Instruction, ...], sinks: tuple[str, ...]) -> list[bool]:
    needed = [instruction.op in sinks and instruction.width == 0 for instruction in code]
    for place in reversed(range(len(code))):
        if needed[place]:
            for value in code[place].values:
                needed[value] = True
    return needed


class _Writer:
    def __init__(self, code: tuple[Instruction, ...], found: list[int], together: bool) -> None:
        self.code, self.found, self.together = code, found, together
        readers: list[set[int]] = [set() for _ in code]
        for place, instruction in enumerate(code):
            if found[place] >= 0:
                for value in instruction.values:
                    readers[value].add(found[place])
        self.readers = readers
        self.constants: list[float] = []
        self.kept: list[int] = []
        self.scratch: list[int] = []
        self.places: dict[int, ValuePlace] = {}
        for place, instruction in enumerate(code):
            if found[place] < 0 or instruction.width == 0:
                continue
            if instruction.op == "constant":
                self.places[place] = ValuePlace("c", len(self.constants))
                self.constants.append(instruction.number)
            elif GRADIENTS in readers[place] or (readers[place] - {found[place]} and not self.read_again(place)):
                self.places[place] = ValuePlace("k", len(self.kept))
                self.kept.append(instruction.width)

    def read_again(self, place: int) -> bool:
        return self.code[place].op in _READ_AGAIN and GRADIENTS not in self.readers[place]

    def write(self) -> Sections:
        steps = tuple(tuple(self.section(number)) for number in range(7))
        return Sections(tuple(self.kept), tuple(self.scratch), tuple(self.constants), steps)

    def section(self, number: int) -> list[SectionStep]:
        """The steps of one section; scratch is shared by values that do not live at the same time."""
        members = [place for place in range(len(self.code)) if self.runs(place, number)]
        members = self.in_order(members) if self.together else members
        last: dict[int, int] = {}
        for position, place in enumerate(members):
            for value in self.code[place].values:
                last[value] = position
        free: dict[int, list[int]] = {}
        for place, width in enumerate(self.scratch):
            free.setdefault(width, []).append(place)
        local: dict[int, ValuePlace] = {}
        steps = []
        for position, place in enumerate(members):
            instruction = self.code[place]
            values = tuple(local.get(value) or self.places[value] for value in instruction.values)
            dying = [
                (value, local[value])
                for value in dict.fromkeys(instruction.values)
                if value in local and last[value] == position
            ]
            target = None
            if instruction.width:
                in_place = instruction.op in FLOAT_OPS or instruction.op == "product"
                if place in self.places:
                    target = self.places[place]
                else:
                    reusable = [old for value, old in dying if self.code[value].width == instruction.width]
                    if instruction.op == "product":
                        base = instruction.values[1:]
                        reusable = [old for value, old in dying if value in base and value != instruction.values[0]]
                    target = reusable[0] if in_place and reusable else self.allocate(free, instruction.width)
                    local[place] = target
            for value, old in dying:
                del local[value]
                if old != target:
                    heapq.heappush(free.setdefault(self.scratch[old.number], []), old.number)
            if target is not None and target.kind == "s" and place not in last:
                heapq.heappush(free.setdefault(self.scratch[target.number], []), target.number)
            steps.append(SectionStep(instruction.op, target, values, instruction.numbers))
        return steps

    def in_order(self, members: list[int]) -> list[int]:
        """Products that wait for equally many others follow each other, behind all else that waits for no more: so
        they can be dealt to processors at once. What is added to a product does not count.

        Of `a = x W; b = tanh(a); c = y V; d = c + b` the order is both products, then `b` and `d`.
        """
        waves: dict[int, int] = {}
        for place in members:
            product = self.is_product(place)
            wave = 0
            for position, value in enumerate(self.code[place].values):
                base = product and position > 0
                wave = max(wave, waves.get(value, 0) + (self.is_product(value) and not base))
            waves[place] = wave
        return sorted(members, key=lambda place: (waves[place], self.is_product(place)))

    def is_product(self, place: int) -> bool:
        return self.code[place].op == "product"

    def runs(self, place: int, number: int) -> bool:
        """Whether the instruction runs in the section."""
        if self.found[place] < 0 or self.code[place].op == "constant":
            return False
        if self.found[place] == number:
            # what is read again in each section that needs it, is computed in none that does not
            return place in self.places or not self.read_again(place) or number in self.readers[place]
        return place not in self.places and self.read_again(place) and number in self.readers[place]

    def allocate(self, free: dict[int, list[int]], width: int) -> ValuePlace:
        """A free place of scratch of this width."""
        if free.get(width):
            return ValuePlace("s", heapq.heappop(free[width]))
        self.scratch.append(width)
        return ValuePlace("s", len(self.scratch) - 1)
