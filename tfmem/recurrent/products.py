"""Products of recurrent layers that run on tensor cores though TensorFlow is to multiply in float32."""

from __future__ import annotations

from dataclasses import replace

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from custom_ops.jit.image import KernelImage
from custom_ops.matmul import kernels as matmul
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import NewNode
from graph_passes.matmul.apply import apply_products
from graph_passes.matmul.plan import plan_products
from graph_passes.recurrent.match import RecurrentPlan
from tfmem.devices import Target
from tfmem.options import Options
from tfmem.recurrent.kernels import kernel_folder
from tfmem.tf_internals.build import FeedShapes, shaped_graph
from tfmem.tf_internals.captured import Captured


def with_tensor_cores(
    captured: Captured,
    plan: RecurrentPlan,
    target: Target,
    options: Options,
    feed_shapes: FeedShapes | None = None,
) -> tuple[Captured, RecurrentPlan]:
    """`captured` with products that `plan` put into it on tensor cores, and `plan` with a note that says so.

    Only where TensorFlow's own would be in float32: in TF32 they are on tensor cores already.

    Args:
        captured: the graph that `plan` was applied to.
        plan: names the products.
        target: the device that will run it.
        options: the user's.
        feed_shapes: as `replace_recurrent` has them.
    """
    if not target.is_gpu or {target.precision, plan.precision} != {"highest"}:
        return captured, plan
    ours = [node.name for match in plan.matches for node in match.nodes if isinstance(node, NewNode)]
    inferred = shaped_graph(captured, feed_shapes=feed_shapes)
    graph = serde.from_graph_def(captured.graph_def, inferred=inferred, functions=True)
    products = plan_products(graph, ours)
    if not products.names:
        return captured, plan
    which = ", ".join(products.names)
    try:
        products = replace(products, programs=tuple(_programs(options, target.ordinal)))
    except KernelError as error:
        return captured, replace(plan, notes=(*plan.notes, f"in TensorFlow's float32: {which} ({error})"))
    apply_products(products, graph)
    note = f"on tensor cores, as accurate as float32: {which}"
    return _written(captured, graph), replace(plan, notes=(*plan.notes, note))


def _programs(options: Options, ordinal: int) -> list[KernelImage]:
    """Of the GPU.

    Raises:
        KernelError: it is too old, or the compiler is missing.
    """
    with Device(ordinal) as device, kernel_folder(options.cache_directory) as folder:
        if device.arch < matmul.OLDEST:
            raise KernelError(
                f"{device.name} has compute capability {device.arch / 10}; these products need {matmul.OLDEST / 10}"
            )
        return matmul.build(device.arch, Cache(folder))


def _written(captured: Captured, graph: Graph) -> Captured:
    graph_def = serde.to_graph_def(graph, captured.graph_def)
    return replace(captured, graph_def=graph_def, creation_order=tuple(node.name for node in graph_def.node))
