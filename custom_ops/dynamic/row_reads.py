"""Which integer arguments of nodes choose a row of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from custom_ops.dynamic.node_code import Instruction, Kind


@dataclass(frozen=True)
class RowReads:
    """Which arguments read rows of one parameter.

    Attributes:
        flags: for each kind, for each of its arguments, whether it does.
        shared: kinds and arguments that read something else as well.
    """

    flags: tuple[tuple[bool, ...], ...]
    shared: tuple[tuple[str, int], ...]

    def of_nodes(self, kinds: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_] | None:
        """The flags of all arguments of nodes, one after the other; None if a kind does not exist.

        Args:
            kinds: of the nodes.
        """
        starts, lengths, flat = self._flat
        if kinds.size and not 0 <= kinds.min() <= kinds.max() < len(lengths):
            return None
        counts = lengths[kinds]
        ends = np.cumsum(counts)
        places = np.repeat(starts[kinds] - ends + counts, counts)
        places += np.arange(places.size)
        return flat[places]

    @cached_property
    def _flat(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where the flags of each kind begin, how many it has, and all of them."""
        lengths = np.array([len(flags) for flags in self.flags], np.int64)
        return np.cumsum(lengths) - lengths, lengths, np.array([f for flags in self.flags for f in flags], np.bool_)


def row_reads(kinds: Sequence[Kind], number: int) -> RowReads:
    """Which arguments of `kinds` read rows of parameter `number`."""
    flags, shared = list[tuple[bool, ...]](), list[tuple[str, int]]()
    for kind in kinds:
        read = {i.numbers[1] for i in kind.code if i.op == "lookup" and i.numbers[0] == number}
        others = {at for i in kind.code for at in _others(i, number)}
        flags.append(tuple(at in read for at in range(len(kind.arguments))))
        shared += [(kind.name, at) for at in sorted(read & others)]
    return RowReads(tuple(flags), tuple(shared))


def _others(instruction: Instruction, number: int) -> tuple[int, ...]:
    """The arguments by which an instruction reads something else than rows of a parameter."""
    if instruction.op == "one_hot":
        return instruction.numbers[:1]
    return instruction.numbers[1:2] if instruction.op == "lookup" and instruction.numbers[0] != number else ()
