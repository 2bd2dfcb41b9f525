"""What a rule says of one type of op."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from custom_ops.expr.nodes import Index
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import FIRST, Access
from graph_passes.lower.program_writer import Demand, LoweringError, ProgramWriter, Steps
from graph_passes.refusals import Reason, Refusal

# One element of an output, or, of an op that updates variables, of what it gives the variable of that input.
Write: TypeAlias = Callable[[ProgramWriter, Node, int, Access], Steps]


def _accepted(graph: Graph, node: Node) -> Refusal | None:
    return None


@dataclass(frozen=True)
class Rule:
    """How one type of op is written.

    Attributes:
        write: its element.
        pattern: what it does.
        operands: the inputs whose numbers it reads: from which on, and up to which.
        refusal: why a node of this type cannot be written, if it cannot.
        reads, writes: positions of inputs that are variables.
        unread: positions of inputs among the operands whose numbers it does not read.
        reserved: outputs that cannot be written: what TensorFlow's kernels keep for each other.
        states: whether the operands are the state of a random generator, which no program computes with.
    """

    write: Write
    pattern: OpPattern | Callable[[Graph, Node], OpPattern]
    operands: tuple[int, int | None] = (0, None)
    refusal: Callable[[Graph, Node], Refusal | None] = _accepted
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    states: bool = False

    def pattern_of(self, graph: Graph, node: Node) -> OpPattern:
        """What a node of this type does."""
        return self.pattern if isinstance(self.pattern, OpPattern) else self.pattern(graph, node)


def broadcast(w: ProgramWriter, value: TensorId, shape: Sequence[int], at: Access) -> Access:
    """Where to read a tensor for the element `at` of a tensor of `shape` that it is broadcast to.

    Raises:
        LoweringError: one of the sizes is not known, and may be 1.
    """
    return broadcast_sizes(value, w.shapes[value], shape, at)


def broadcast_sizes(value: TensorId, own: Sequence[int], shape: Sequence[int], at: Sequence[Index]) -> Access:
    """`broadcast` of some dimensions of a tensor, whose sizes are `own`. Raises what it raises."""
    first = len(shape) - len(own)
    found = []
    for size, wide, index in zip(own, shape[first:], at[first:], strict=True):
        if size != wide and size != 1 and (size < 0 or wide >= 0):
            raise LoweringError(Reason.BROADCAST(tensor=value))
        found.append(FIRST if size == 1 else index)
    return tuple(found)


def elements(
    w: ProgramWriter, node: Node, at: Access, operands: Sequence[TensorId]
) -> Generator[Demand, int, list[int]]:
    """One element of each operand, all broadcast to the node's first output."""
    shape = w.shapes[TensorId(node.name)]
    found = []
    for operand in operands:
        element = yield operand, broadcast(w, operand, shape, at)
        found.append(element)
    return found
