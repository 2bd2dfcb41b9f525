"""Matmuls of recurrent layers on tensor cores, where TensorFlow multiplies in float32."""

from __future__ import annotations

from dataclasses import replace

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.matmul import kernels as matmul
from graph_passes.analysis.cost.device_costs import product_sizes
from graph_passes.graph.rewrite import NewNode
from graph_passes.passes.products.plan import Needs, ProductPlan
from graph_passes.passes.recurrent.faults import fault
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.pipeline import PassOutcome
from tfmem.devices import Target
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options


def product_needs(plan: RecurrentPlan, target: Target, options: Options) -> Needs | None:
    """What puts products of `plan`, which was carried out, on tensor cores.

    Only where TensorFlow's own would be in float32: in TF32 they are on tensor cores already.
    """
    if not plan.matches or not target.is_gpu or {target.precision, plan.precision} != {"highest"}:
        return None
    ours = [node.name for match in plan.matches for node in match.nodes if isinstance(node, NewNode)]
    return Needs(ours, product_sizes(target.profile.name), lambda: _programs(options, target.ordinal))


def with_products(plan: RecurrentPlan, done: PassOutcome[ProductPlan] | None) -> RecurrentPlan:
    """`plan` with notes on its matmuls."""
    if done is None:
        return plan
    errors = [done.failed] if done.failed else list(done.errors.values())
    faults = [fault("products outside the loops", "MatMul", error) for error in errors]
    notes = (done.plan.note,) if done.plan and done.plan.note and not errors else ()
    return replace(plan, unmatched=(*plan.unmatched, *faults), notes=(*plan.notes, *notes))


def _programs(options: Options, ordinal: int) -> list[KernelImage]:
    """The kernels for matmuls on the GPU of this number.

    Raises:
        KernelError: the GPU is too old, or the compiler is missing.
    """
    with DeviceContext(ordinal) as device, kernel_folder(options.cache_directory) as folder:
        if device.arch < matmul.OLDEST:
            raise KernelError(
                f"{device.name} has compute capability {device.arch / 10}; these products need {matmul.OLDEST / 10}"
            )
        return matmul.build(device.arch, Cache(folder))
