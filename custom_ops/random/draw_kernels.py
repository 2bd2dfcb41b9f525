"""GPU programs of TfmemStepDraws (kernels/step_draws.cuh): numbers of TensorFlow's stateless random ops, for all steps.

A truncated normal is not among them: TensorFlow's kernel draws again what is out of bounds, by counters that depend on
how many threads the GPU runs.
"""

from __future__ import annotations

from typing import Literal

from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource

THREADS = 256
_ENTRY = "step_draws"
_FLOATS = {"float16": "tfmem::Half", "bfloat16": "tfmem::Bfloat16", "float32": "float", "float64": "double"}
_INTEGERS = {"int32": "int", "int64": "long long"}
_UNSIGNED = {"int32": "unsigned", "int64": "tfmem::Word"}


def distribution(op: str, dtype: str) -> str:
    """The template that draws the numbers of a stateless random op; "" if there is none."""
    kind = op.removeprefix("StatelessRandom").removesuffix("V2")
    if kind in ("Uniform", "Normal") and dtype in _FLOATS:
        return f"{kind}<{_FLOATS[dtype]}>"
    if kind == "UniformInt" and dtype in _INTEGERS:
        return f"UniformInt<{_INTEGERS[dtype]}, {_UNSIGNED[dtype]}>"
    return f"FullInt<{_INTEGERS[dtype]}>" if kind == "UniformFullInt" and dtype in _INTEGERS else ""


def build(
    op: str,
    dtype: str,
    arch: int,
    kind: Literal["cubin", "ptx"] = "cubin",
    cache: Cache | None = None,
    compile_source: CompileSource = nvrtc.compile_source,
) -> KernelImage:
    """A program of the op, compiled or taken from `cache`.

    Args:
        op: the stateless random op, which has a `distribution`.
        dtype: what it draws.
        arch: the compute capability, 90 for 9.0; of PTX the least.
        kind: see `KernelImage`.
        cache: of compiled kernels; it takes no PTX.
        compile_source: as NVRTC's.

    Raises:
        KernelError: the compiler is missing or rejects the source.
    """
    source = (
        '#include "step_draws.cuh"\n\nnamespace draws = tfmem::step_draws;\n\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS})\n'
        f"    {_ENTRY}(const __grid_constant__ draws::Arguments arguments) {{\n"
        f"  draws::draw<draws::{distribution(op, dtype)}>(arguments);\n}}\n"
    )
    if kind == "ptx":
        return KernelImage(arch, _ENTRY, THREADS, nvrtc.compile_ptx(source, arch), kind=kind)
    return KernelImage(arch, _ENTRY, THREADS, code_of(source, arch, cache, compile_source=compile_source))
