"""What can be wrong with a graph, a budget or an option, found before anything runs."""

from __future__ import annotations

from custom_ops.errors import TfmemError


class GraphError(TfmemError, ValueError):
    """The graph cannot be captured, planned or rewritten."""


class ShapesError(GraphError):
    """Shapes of inputs contradict the graph, which TensorFlow could run with others."""


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


class StalePlanError(GraphError):
    """A plan was made for another graph, so it cannot be carried out on this one."""


class BudgetError(TfmemError, ValueError):
    """The memory budget is unusable."""


class InvalidBudgetError(BudgetError):
    """The budget is zero, negative, over the device's memory, not a size, or for a device not in use."""


class InfeasibleBudgetError(BudgetError):
    """No plan meets the budget.

    Attributes:
        smallest_budget: a budget in bytes that should be enough. On a CPU it includes what the allocator may add; on a
            GPU a convolution's workspace can need slightly more.
        op: the name of the op that sets it.
        least: bytes of the tensors alone. tfmem also tries budgets between `least` and `smallest_budget`.
    """

    def __init__(self, message: str, smallest_budget: int, op: str, least: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget
        self.op = op
        self.least = smallest_budget if least is None else least

    def with_split(self, why: str) -> InfeasibleBudgetError:
        """This error, with the reason why splitting the batch does not help."""
        text = f"{self}; it was not split along the batch: {why}"
        return InfeasibleBudgetError(text, self.smallest_budget, self.op, self.least)


class HostMemoryError(BudgetError):
    """The host cannot hold what a plan would move to it."""


class OptionsError(TfmemError, ValueError):
    """An option has a value that tfmem does not know."""


class SpillDirectoryError(OptionsError):
    """The spill directory is missing, read-only or too small."""


class VerificationError(TfmemError):
    """The optimised object does not compute what the original computes."""
