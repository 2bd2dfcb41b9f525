"""CostModel: seconds, workspace and base memory of ops. `Roofline` estimates, `MeasuredCosts` reads them off a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from graph_passes.analysis.cost import cpu
from graph_passes.analysis.cost.device_costs import Device
from graph_passes.analysis.cost.region_costs import region_costs
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, text


class CostModel(Protocol):
    """What a timeline needs to know of a graph's ops."""

    def seconds(self, graph: Graph, node: Node) -> float:
        """Run time of `node` on the device."""

    def workspace(self, graph: Graph, node: Node) -> int:
        """Bytes `node` allocates while it runs, beyond its outputs."""

    def base(self, graph: Graph) -> int:
        """Bytes alive all the time: variables, constants, the caller's inputs."""


@dataclass(frozen=True)
class Roofline:
    """Estimates: the larger of flops over rate and bytes over bandwidth, plus the launch.

    Attributes:
        device: the device's profile.
        workspace_limits: the most workspace that a convolution takes, and one that is fused with what follows, in bytes
            (cuDNN picks; the graph alone does not determine it).
        is_gpu: whether TensorFlow's GPU kernels run; some allocate their output twice (`ops.ALLOCATES_TWICE`).
    """

    device: Device
    workspace_limits: tuple[int, int] = (0, 0)
    is_gpu: bool = False

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`. Views and constants cost nothing."""
        if node.op in ops.VIEWS or node.op in ops.EXTERNAL or ops.shares_rows(node):
            return 0.0
        region = region_costs(node)
        if region is not None:
            rates = self.device
            work = sum(max(flops / rates.flops, moved / rates.bandwidth) for moved, flops in region.steps)
            return rates.launch + work
        moved = _moved(graph, node)
        work = max(flops(graph, node) / self.device.flops, moved / self.device.bandwidth)
        return self.device.launch + work if moved else 0.0

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`. A convolution takes about its operands' bytes, in another layout, within the limit."""
        region = region_costs(node)
        if region is not None:
            return region.workspace
        if not self.is_gpu:
            return cpu.workspace(graph, node)
        again = 0
        if node.op in ops.ALLOCATES_TWICE:
            again = graph.nbytes(TensorId(node.name)) + graph.nbytes(node.inputs[ops.FILTER])
        if node.op not in ops.CONVOLUTIONS:
            return again
        alone, fused = self.workspace_limits
        return again + min(fused if "Fused" in node.op else alone, _moved(graph, node))

    def base(self, graph: Graph) -> int:
        """See `CostModel`. Each variable once, each placeholder and constant once."""
        return held(graph)


@dataclass(frozen=True)
class MeasuredCosts:
    """Read off an observed step; ops the step did not have fall back on the estimate.

    Attributes:
        node_seconds: run time by node name.
        node_workspace: workspace bytes by node name.
        base_bytes: bytes alive before the first op.
        estimate: what to use for nodes that were not observed.
    """

    node_seconds: Mapping[str, float]
    node_workspace: Mapping[str, int]
    base_bytes: int
    estimate: Roofline = field(repr=False)

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`."""
        found = self.node_seconds.get(node.name)
        return self.estimate.seconds(graph, node) if found is None else found

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`."""
        return self.node_workspace.get(node.name, 0)

    def base(self, graph: Graph) -> int:
        """See `CostModel`."""
        return self.base_bytes


def held(graph: Graph, below: int | None = None) -> int:
    """Bytes of what a step finds in memory: variables, placeholders and constants; those smaller than `below`."""
    found: dict[object, int] = {}
    for node in graph:
        if node.op == "ReadVariableOp":
            found[node.inputs[0]] = graph.nbytes(TensorId(node.name))
        elif node.op == "VarHandleOp":  # an optimizer's slots are written, and never read, by name
            handle = graph.specs.get(TensorId(node.name))
            behind = handle.behind if handle is not None else None
            found.setdefault(TensorId(node.name), (behind.nbytes or 0) if behind is not None else 0)
        elif node.op in ops.EXTERNAL:
            found.update((tensor, graph.nbytes(tensor)) for tensor in graph.tensors(node))
    return sum(nbytes for nbytes in found.values() if below is None or nbytes < below)


def _moved(graph: Graph, node: Node) -> int:
    """Bytes that `node` reads and makes."""
    if node.op == ops.WRITES_ROWS:
        return 2 * graph.nbytes(node.inputs[2])
    if node.op == "Empty":
        return 0
    return sum(map(graph.nbytes, (*node.inputs, *graph.tensors(node))))


def flops(graph: Graph, node: Node) -> float:
    """Floating-point operations of a product or convolution; other ops are bound by memory and count as zero, as does
    what has an unknown shape."""
    shapes = [graph.sizes(tensor) for tensor in node.inputs]
    output = graph.sizes(TensorId(node.name))
    if output is None or len(shapes) < 2:
        return 0.0
    if node.op == "Einsum":
        return 2.0 * _multiplied(text(node.attrs["equation"]), shapes)
    if node.op in ops.MATRIX_PRODUCTS:
        first = shapes[0]
        turned = any(boolean(node.attrs.get(name)) for name in ("transpose_a", "adj_x"))
        return 2.0 * prod(output) * first[-2 if turned else -1] if first and len(first) > 1 else 0.0
    if node.op in ops.CONVOLUTIONS:
        # All three convolutions of a layer multiply each pixel of y with the whole filter.
        y = shapes[2] if "Backprop" in node.op and len(shapes) > 2 else output
        filters = output if "BackpropFilter" in node.op else shapes[1]
        if y and filters:
            channels = filters[-1] * (filters[-2] if "Depthwise" in node.op else 1)
            return 2.0 * prod(y) * prod(filters) / max(channels, 1)
    return 0.0


def _multiplied(equation: str, shapes: Sequence[tuple[int, ...] | None]) -> int:
    """How many numbers an Einsum multiplies: the product of the sizes of all labels; 0 while a shape is unknown."""
    sizes: dict[str | int, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        if shape is None:
            return 0
        before, _, after = labels.strip().partition("...")
        behind = len(shape) - len(after)
        # Axes of an ellipsis are broadcast, the last to the last.
        places = [*before, *range(len(before) - behind, 0), *after]
        for label, size in zip(places, shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    return prod(sizes.values())
