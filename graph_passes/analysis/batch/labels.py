"""How a tensor depends on the batch, and how an op reads and makes such tensors.

Rows(axis, inner)   dimension `axis` has batch * inner elements, `inner` of them for each example, in order
Summed(weighted)    the sum of what the pieces of the batch make; weighted: of their means, by the pieces' shares
None                the same for all examples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.refusal import RefusedError
from graph_passes.refusals import Reason


@dataclass(frozen=True)
class Rows:
    """The batch is the leading factor of dimension `axis`, of which each example has `inner` elements."""

    axis: int
    inner: int = 1


@dataclass(frozen=True)
class Summed:
    """What pieces of the batch make has to be added; `weighted`: as means, each by its share of the batch."""

    weighted: bool = False


Label = Rows | Summed | None


@dataclass(frozen=True)
class Separation:
    """How an op works on a piece of the batch.

    Attributes:
        inputs: for each data input, how it is sliced; None where it is read whole.
        outputs: for each output, what the pieces make of it; None: the same in each piece.
        shapes: (input, element, inner): constant numbers among the inputs that count rows; a piece has others.
    """

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Label, ...]
    shapes: tuple[tuple[int, int, int], ...] = ()


class MixesError(RefusedError):
    """An op that cannot work on a piece of the batch."""


@dataclass(frozen=True)
class Asked:
    """An op whose rule is asked, and what is known of its inputs.

    Attributes:
        graph, node: the op.
        batch: how many examples there are.
        labels: of each data input; None where it is not known to depend on the batch.
    """

    graph: Graph
    node: Node
    batch: int
    labels: tuple[Rows | None, ...]

    def refused(self) -> MixesError:
        """The error that the op mixes examples."""
        return MixesError(Reason.SPLIT_MIXES.of(self.node))

    def require(self, holds: bool) -> None:
        """
        Raises:
            MixesError: the condition under which the op treats examples one by one does not hold.
        """
        if not holds:
            raise self.refused()

    def sizes(self, index: int) -> tuple[int, ...]:
        """The static shape of a data input."""
        return self._known(self.node.inputs[index])

    def made(self, index: int = 0) -> tuple[int, ...]:
        """The static shape of an output."""
        return self._known(TensorId(self.node.name, index))

    def _known(self, tensor: TensorId) -> tuple[int, ...]:
        sizes = self.graph.sizes(tensor)
        if sizes is None:
            raise MixesError(Reason.SPLIT_SHAPE(node=self.node.name, op=self.node.op, tensor=str(tensor)))
        return sizes

    def numbers(self, index: int) -> list[int]:
        """The numbers of a constant input."""
        tensor = self.node.inputs[index]
        found = self.graph.constants.get(tensor.node)
        if found is None:
            raise MixesError(Reason.SPLIT_SHAPE(node=self.node.name, op=self.node.op, tensor=str(tensor)))
        return [int(number) for number in found.reshape(-1)]

    def rows(self, size: Sequence[int], axis: int) -> Rows:
        """The batch as the leading factor of a dimension of this shape."""
        self.require(0 <= axis < len(size) and size[axis] > 0 and size[axis] % self.batch == 0)
        return Rows(axis, size[axis] // self.batch)

    def whole(self, *indices: int) -> None:
        """
        Raises:
            MixesError: one of these inputs depends on the batch.
        """
        self.require(all(self.labels[index] is None for index in indices))

    def is_read(self, output: int) -> bool:
        """Whether an op reads this output."""
        return bool(self.graph.uses(TensorId(self.node.name, output)))
