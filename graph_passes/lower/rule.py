"""What a rule says of one type of op."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.lower.access import FIRST, Access
from graph_passes.lower.writer import Demand, LoweringError, Steps, Writer


class Kind(Enum):
    """The work that an op does, as FusionStitching (arXiv 1911.11576) tells patterns apart.

    The reductions are told apart by which dimensions they sum up: the innermost ones, the outermost ones, or all;
    `REDUCTION` is any other choice. An op that holds several reductions (a softmax, a batch norm) counts as what it
    reduces over.
    """

    CONSTANT = "constant"  # the same number everywhere, written into programs
    ELEMENTWISE = "elementwise"
    LAYOUT = (
        "layout"  # each element is one of an input's, at a place that is known: broadcasts, transposes, slices, ...
    )
    ROW_REDUCTION = "row reduction"
    COLUMN_REDUCTION = "column reduction"
    SCALAR_REDUCTION = "scalar reduction"
    REDUCTION = "reduction"
    GATHER = "gather"
    UPDATE = "update"  # gives variables values: arithmetic in a kernel, then an `Assign`
    VIEW = "view"  # the same numbers in another shape: a step of its own, or a member of a kernel
    READ = "read"  # the value of a variable: a step of its own, or, after an update of it, a member of a kernel
    PRODUCT = "product"
    BATCHED_PRODUCT = "batched product"
    CALL = "call"  # no rule, but TensorFlow's own kernel can run it inside of a region on a CPU
    OPAQUE = "opaque"  # stays outside


REDUCTIONS = frozenset({Kind.ROW_REDUCTION, Kind.COLUMN_REDUCTION, Kind.SCALAR_REDUCTION, Kind.REDUCTION})

# Kinds of ops that can be members of a kernel.
IN_KERNELS = REDUCTIONS | {Kind.CONSTANT, Kind.ELEMENTWISE, Kind.LAYOUT, Kind.GATHER, Kind.UPDATE, Kind.VIEW}

# One element of an output, or, of an op that updates variables, of what it gives the variable of that input.
Write: TypeAlias = Callable[[Writer, Node, int, Access], Steps]


def _accepted(graph: Graph, node: Node) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """How one type of op is written.

    Attributes:
        write: its element.
        kind: what it does.
        operands: the inputs whose numbers it reads: from which on, and up to which.
        refusal: why a node of this type cannot be written, or "".
        reads, writes: positions of inputs that are variables.
        outputs: how many of the outputs can be written, if not all.
        states: whether the operands are the state of a random generator, which no program computes with.
    """

    write: Write
    kind: Kind | Callable[[Graph, Node], Kind]
    operands: tuple[int, int | None] = (0, None)
    refusal: Callable[[Graph, Node], str] = _accepted
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    outputs: int | None = None
    states: bool = False

    def kind_of(self, graph: Graph, node: Node) -> Kind:
        """What a node of this type does."""
        return self.kind if isinstance(self.kind, Kind) else self.kind(graph, node)


def broadcast(w: Writer, value: TensorId, shape: Sequence[int], at: Access) -> Access:
    """Where to read a tensor for the element `at` of a tensor of `shape` that it is broadcast to.

    Raises:
        LoweringError: one of the sizes is not known, and may be 1.
    """
    own = w.shapes[value]
    first = len(shape) - len(own)
    found = []
    for size, wide, index in zip(own, shape[first:], at[first:], strict=True):
        if size != wide and size != 1 and (size < 0 or wide >= 0):
            raise LoweringError(f"nothing tells before the step runs whether '{value}' is broadcast")
        found.append(FIRST if size == 1 else index)
    return tuple(found)


def elements(w: Writer, node: Node, at: Access, operands: Sequence[TensorId]) -> Generator[Demand, int, list[int]]:
    """One element of each operand, all broadcast to the node's first output."""
    shape = w.shapes[TensorId(node.name)]
    found = []
    for operand in operands:
        element = yield operand, broadcast(w, operand, shape, at)
        found.append(element)
    return found
