"""Fusion kernels on a device, given NumPy arrays: what their tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr import reference
from custom_ops.expr.program import Program
from custom_ops.expr.reference import numpy_dtype
from custom_ops.fusion.codegen.kernel import FusionKernel, make
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.bench import PatternLauncher
from custom_ops.fusion.search.space import RowLayout, kernels
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.jit.launch import LoadedKernel, Module
from tests.elementwise_edges import different

Shapes = Sequence[Sequence[int | None]]


@dataclass(frozen=True)
class Case:
    """A kernel to compile and to compare with the definition.

    Attributes:
        shapes: for which it is compiled; None: those of `tensors`.
        resident: CTAs that run at once; 0: as many as the device says.
        more: other tensors that the same kernel is given.
    """

    program: Program
    tensors: Sequence[NDArray[Any]]
    template: str
    threads: int = 64
    vector: int = 1
    rtol: float = 1e-5
    shapes: Shapes | None = None
    resident: int = 0
    wide: bool = False
    more: Sequence[Sequence[NDArray[Any]]] = ()

    def kernel(self, entry: str = "fusion") -> FusionKernel:
        pattern = Pattern.of(self.program, [t.shape for t in self.tensors] if self.shapes is None else self.shapes)
        return make(pattern, PatternConfiguration(self.template, self.threads, self.vector), self.wide, entry)


def compare(device: DeviceContext, cases: Sequence[Case]) -> list[FusionKernel]:
    """Compiles them in one go, runs each, and compares with the definition in NumPy."""
    kernels = [case.kernel(f"fusion_{number}") for number, case in enumerate(cases)]
    code = device.compile_source("\n".join(kernel.source.text for kernel in kernels), device.arch, contract=False)
    module = Module(code, device.driver)
    for case, kernel in zip(cases, kernels, strict=True):
        for tensors in (case.tensors, *case.more):
            check(case, tensors, run(device, kernel, tensors, module, code, case.resident))
    return kernels


def check(case: Case, tensors: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> None:
    for number, (result, expected) in enumerate(zip(found, reference.run(case.program, tensors), strict=True)):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        wrong = different(result.reshape(-1), expected.reshape(-1), case.rtol, atol=case.rtol)
        values = result.reshape(-1)[wrong][:8], expected.reshape(-1)[wrong][:8]
        assert not len(wrong), f"{case.template}: output {number} at {wrong[:8]}: {values[0]}, NumPy {values[1]}"


def run(
    device: DeviceContext,
    kernel: FusionKernel,
    tensors: Sequence[NDArray[Any]],
    module: Module,
    code: bytes,
    resident: int = 0,
    in_place: Mapping[int, int] | None = None,
    tf32: bool = False,
) -> list[NDArray[Any]]:
    """The outputs, as `custom_ops.expr.reference.run` gives them; those of `in_place` lie where the tensors lie."""
    program, source = kernel.plan.pattern.original, kernel.source
    shapes = [tensor.shape for tensor in tensors]
    sizes = program.sizes(shapes)
    threads, cooperative = kernel.plan.configuration.threads, kernel.plan.cooperative
    image = KernelImage(device.arch, source.entry, threads, code, source.shared, cooperative=cooperative)
    compiled = LoadedKernel(image, module)
    outputs = [
        np.empty([sizes[axis] for axis in output.axes], numpy_dtype(program.types[output.node].dtype))
        for output in program.outputs
    ]
    given = [device.upload(_bytes(tensor)) for tensor in tensors]
    made = [device.allocate(output.nbytes) for output in outputs]
    for output, tensor in (in_place or {}).items():
        made[output] = given[tensor]
    PatternLauncher(kernel, compiled, device).prepare(shapes, given, made, resident, tf32)(device.stream)
    return [device.download(place, output) for place, output in zip(made, outputs, strict=True)]


def _bytes(tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor if tensor.dtype.kind in "fi" else np.ascontiguousarray(tensor).view(np.uint8)


def varied(pattern: Pattern, shapes: Sequence[Sequence[int]], most: int = 100, threads: int = 64) -> list[FusionKernel]:
    """Kernels of a pattern that differ in more than a number: in owners, phases, arrays, or what is split."""
    layouts = [
        RowLayout(threads, vector, each, 3, split, cache=True)
        for each in (32, 1, 4)
        for vector in (4, 1)
        for split in (False, True)
    ]
    found: dict[object, FusionKernel] = {}
    for kernel in kernels(pattern, pattern.program.sizes(pattern.merged(shapes)), layouts):
        kinds = {(mapping.owner.kind, mapping.way, mapping.partial) for mapping in kernel.plan.mappings.values()}
        found.setdefault((frozenset(kinds), kernel.plan.phases, kernel.plan.cooperative), kernel)
    return list(found.values())[:most]


def normal(*shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
