"""Decides which products take longer in cuBLAS than on tensor cores. Pure: a `ProductPlan` comes out.

The hard case: a product of unknown rows, whose operands have to be cut into two TF32 parts each.

    x [?, 512] ----+                           x -> high, low ---+-> high high + high low + low high
                   +--> MatMul      becomes                      |
    w [512, 2048] -+                           w -> high, low ---+      three products for one, on tensor cores

Cutting reads and writes both operands, so that it pays only for large ones:

    products    those of the nodes that may be replaced which are large enough
    worth_it    whether the time of the cut is less than what tensor cores save
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage
from graph_passes.analysis.cost.device_costs import ProductSizes
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, texts
from graph_passes.refusals import Reason, Refusal

BIAS = ("BiasAdd",)  # what a product may have fused
UNKNOWN = 512  # stands for a size that is unknown before the product runs


@dataclass(frozen=True)
class Needs:
    """What planning takes.

    Attributes:
        among: names of nodes; those that are no products of two float32 matrices stay. None of them is fetched.
        sizes: of products that gain.
        programs: makes those of the GPU that runs the graph, in the op's order. Raises KernelError if it cannot.
    """

    among: Collection[str]
    sizes: ProductSizes
    programs: Callable[[], Sequence[KernelImage]]


@dataclass(frozen=True)
class ProductPlan:
    """Which products are replaced.

    Attributes:
        names: of the nodes.
        programs: that they become; none where they stay, see `reason`.
        reason: why there are no programs.
    """

    names: tuple[str, ...]
    programs: tuple[KernelImage, ...] = ()
    reason: Refusal | None = None

    @property
    def note(self) -> str:
        """The line for the report; "" if there is nothing to say."""
        which = ", ".join(self.names)
        if self.reason:
            return f"matmuls in TensorFlow's float32: {which} ({self.reason})"
        return f"matmuls on tensor cores, as accurate as float32: {which}" if which else ""


def plan_products(source: Readable, needs: Needs) -> tuple[ProductPlan, Graph]:
    """The products to replace, and the graph that they are in."""
    graph = source.read()
    names = products(graph, needs.among, needs.sizes)
    try:
        return ProductPlan(names, tuple(needs.programs()) if names else ()), graph
    except KernelError as error:
        return ProductPlan(names, reason=Reason.PRODUCT_KERNELS(detail=str(error))), graph


def products(graph: Graph, among: Collection[str], sizes: ProductSizes) -> tuple[str, ...]:
    """The products of `among` that take less time on tensor cores."""
    return tuple(name for name in among if name in graph.nodes and _replaced(graph, graph[name], sizes))


def worth_it(rows: int, depth: int, columns: int, sizes: ProductSizes) -> bool:
    """Whether `[rows, depth]` by `[depth, columns]` takes less time on tensor cores."""
    if min(rows, depth, columns) < sizes.least_size:
        return False
    return rows * depth * columns >= sizes.least_multiplications or depth * columns >= sizes.large_operand


def _replaced(graph: Graph, node: Node, sizes: ProductSizes) -> bool:
    if node.op != "MatMul" and (node.op != "_FusedMatMul" or texts(node.attrs["fused_ops"]) != BIAS):
        return False
    left, right = (_matrix(graph, tensor) for tensor in node.inputs[:2])
    if left is None or right is None:
        return False
    rows = left[1 if boolean(node.attrs.get("transpose_a")) else 0]
    depth, columns = right[::-1] if boolean(node.attrs.get("transpose_b")) else right
    return worth_it(rows, depth, columns, sizes)


def _matrix(graph: Graph, tensor: TensorId) -> tuple[int, int] | None:
    """The sizes of a matrix of float32."""
    spec = graph.specs.get(tensor)
    if spec is None or spec.dtype != "float32" or spec.shape is None or len(spec.shape) != 2:
        return None
    rows, columns = (UNKNOWN if size is None else size for size in spec.shape)
    return rows, columns
