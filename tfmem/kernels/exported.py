"""Programs for recurrent layers on GPUs that are not here: chosen by the cost model, compiled, and PTX for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.compilers import Compilers
from custom_ops.machine import Machine
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram, build, build_ptx
from custom_ops.recurrent.search.ranking import candidates
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from graph_passes.analysis.cost.device_costs import machine

CLUSTERS_FROM = 90  # the first compute capability with thread-block clusters
TIME_STEPS = 100


def exported_programs(
    spec: RecurrentSpec, folder: Path, batches: Sequence[int], architectures: Sequence[int]
) -> tuple[RecurrentProgram, ...]:
    """A program for each batch size and compute capability, then PTX of the oldest for all later ones.

    The op takes the first program that loads and is for its batch. What is for another GPU does not load.

    Args:
        spec: what the kernels compute.
        folder: of the cache of compiled kernels.
        batches: sizes to choose for, as for `tuned_kernels`.
        architectures: compute capabilities, 90 for 9.0.

    Raises:
        KernelError: no kernel fits one of them, or there is no compiler.
    """
    cache, compiled = Cache(folder), Compilers()
    found: list[RecurrentProgram] = []
    sizes = sorted(set(batches))
    limits = [*sizes[:-1], ANY_BATCH]
    for arch in architectures:
        for size, limit in zip(sizes, limits, strict=True):
            chosen = best(spec, arch, size)
            found.append(build(spec, chosen, arch, cache, limit, compiled))
    oldest = architectures[:1]
    return (*found, *(build_ptx(spec, best(spec, arch, sizes[-1], anywhere=True), arch) for arch in oldest))


def best(spec: RecurrentSpec, arch: int, batch: int, anywhere: bool = False) -> Configuration:
    """The configuration that the model ranks first, of those whose CTAs need not all run at once.

    Args:
        spec: what the kernel computes.
        arch: the compute capability.
        batch: of a call.
        anywhere: whether later GPUs have to run it, too, so that it may use no cluster.

    Raises:
        KernelError: none fits.
    """
    ranked = [configuration for configuration, _ in candidates(described(arch), spec, batch, TIME_STEPS)]
    suited = [each for each in ranked if each.exchange != "grid" and not (anywhere and each.cluster > 1)]
    if not suited:
        raise KernelError(f"no kernel for compute capability {arch / 10} keeps {spec.units} units in one group of CTAs")
    return suited[0]


def described(arch: int) -> Machine:
    """A machine of a compute capability, by the one of its kind that was measured."""
    measured = machine("h200" if arch >= CLUSTERS_FROM else "v100")
    return replace(measured, name=f"sm_{arch}", arch=arch)
