"""What can be wrong with a graph, a budget or an option, found before anything runs."""

from custom_ops.errors import TfmemError


class GraphError(TfmemError, ValueError):
    """The graph cannot be captured, planned or rewritten."""


class NoGradientError(GraphError):
    """There is nothing to train in the graph: it holds no gradient, or the loss depends on none of the variables."""


class AlreadyOptimizedError(GraphError):
    """The graph holds tfmem's ops already."""


class GraphInUseError(GraphError):
    """A session ran the graph, so it can no longer be edited in place."""


class UnknownShapeError(GraphError):
    """A tensor that has to be planned has an unknown dimension."""


class ReplicasError(GraphError):
    """The step is one of several replicas, whose tensors cannot be moved."""


class BudgetError(TfmemError, ValueError):
    """The memory budget is unusable."""


class InvalidBudgetError(BudgetError):
    """The budget is zero, negative, over the device's memory, or not a size."""


class InfeasibleBudgetError(BudgetError):
    """No plan meets the budget.

    Attributes:
        smallest_budget: a budget, in bytes, that a plan will meet; the smallest that is safe.
        op: the name of the op whose working set sets it.
        least: bytes of the tensors alone; what an allocator adds is not known exactly, so that a budget between the
            two is tried, too.
    """

    def __init__(self, message: str, smallest_budget: int, op: str, least: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget
        self.op = op
        self.least = smallest_budget if least is None else least


class HostMemoryError(BudgetError):
    """The host cannot hold what a plan would move to it."""


class OptionsError(TfmemError, ValueError):
    """An option has a value that tfmem does not know."""


class SpillDirectoryError(OptionsError):
    """The spill directory is missing, read-only or too small."""


class VerificationError(TfmemError):
    """The optimised object does not compute what the original computes."""
