"""What a step costs by estimate, before anything ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graph_passes.analysis.cost.folded import folded
from graph_passes.analysis.cost.model import Roofline, held
from graph_passes.analysis.memory.calls import WithCalls
from graph_passes.analysis.memory.timeline import COUNTED
from graph_passes.graph.ir import Graph, Node
from tfmem.devices import Target
from tfmem.options import workspace_limits


@dataclass(frozen=True)
class Estimate:
    """A roofline, and what the allocator holds already; a `CostModel`."""

    roofline: Roofline
    in_use: int

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`."""
        return self.roofline.seconds(graph, node)

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`."""
        return WithCalls(self.roofline).workspace(graph, node)

    def base(self, graph: Graph) -> int:
        """See `CostModel`: variables exist already, or will, and so will what TensorFlow makes a constant."""
        small = 0 if self.roofline.is_gpu else held(graph, COUNTED)  # the allocator does not count these
        return max(self.roofline.base(graph), self.in_use + small) + folded(graph)


@dataclass(frozen=True)
class TimedCosts:
    """Run times and workspace that were measured, by op; the rest by estimate. A `CostModel`.

    Attributes:
        node_seconds: by name of the node.
        estimate: of what was not measured.
        node_workspace: bytes by name of the node.
    """

    node_seconds: Mapping[str, float]
    estimate: Estimate
    node_workspace: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`."""
        found = self.node_seconds.get(node.name)
        return self.estimate.seconds(graph, node) if found is None else found

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`."""
        found = self.node_workspace.get(node.name)
        return self.estimate.workspace(graph, node) if found is None else found

    def base(self, graph: Graph) -> int:
        """See `CostModel`."""
        return self.estimate.base(graph)


def estimate(target: Target, in_use: int, workspace: bool) -> Estimate:
    """Costs before anything ran.

    Args:
        target: the device.
        in_use: bytes of its memory that are taken.
        workspace: whether convolutions are charged with what cuDNN may take.
    """
    limits = workspace_limits() if workspace and target.is_gpu else (0, 0)
    return Estimate(Roofline(target.profile, limits, target.is_gpu), in_use)
