"""GPU programs of TfmemMatMul: float32 products on tensor cores (kernels/matmul.cuh), the same for all shapes."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource

OLDEST = 80  # compute capability 8.0: copies that need no registers, and products of depth 16
LINE_BYTES = 128  # 32 numbers along the depth of a split operand


@dataclass(frozen=True)
class MatmulKernel:
    """One of the three.

    Attributes:
        name: its entry.
        call: of the template that it runs.
        threads: of a CTA.
        resident: CTAs that registers are to suffice for.
        tile: rows and columns of the result that a CTA makes; 0: none.
        stages: of a tile's operands in shared memory, one line each.
        template: the file with it.
        features: of the architecture that it needs; see `nvrtc.compile_source`.
    """

    name: str
    call: str
    threads: int
    resident: int
    tile: int = 0
    stages: int = 0
    template: str = "matmul.cuh"
    features: str = ""

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: a line of each row and each column of the tile, for each stage."""
        return self.stages * 2 * self.tile * LINE_BYTES

    @property
    def source(self) -> str:
        shared = "  TFMEM_DYNAMIC_SHARED(uint4, shared);\n" if self.tile else ""
        return (
            f'#include "{self.template}"\n\nnamespace matmul = tfmem::matmul;\n\n'
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.resident})\n'
            f"    {self.name}(const __grid_constant__ matmul::Arguments arguments) {{\n"
            f"{shared}  matmul::{self.call};\n}}\n"
        )


SPLIT = MatmulKernel("matmul_split", "split(arguments)", 256, resident=4, template="matmul_split.cuh")
LARGE = MatmulKernel("matmul_large", "multiply<matmul::Large>(arguments, shared)", 256, resident=1, tile=128, stages=3)
SMALL = MatmulKernel("matmul_small", "multiply<matmul::Small>(arguments, shared)", 128, resident=2, tile=64, stages=4)
HOPPER = MatmulKernel(
    "matmul_large",
    "multiply<matmul::Hopper>(arguments, shared)",
    256,
    resident=1,
    tile=128,
    stages=6,
    template="matmul_hopper.cuh",
    features="a",
)


def build(
    arch: int, cache: Cache | None = None, compile_source: CompileSource = nvrtc.compile_source
) -> list[KernelImage]:
    """What the op takes as `programs`, compiled or taken from `cache`.

    Raises:
        KernelError: the compiler is missing or rejects a source.
    """
    kernels = (SPLIT, HOPPER if arch == 90 else LARGE, SMALL)
    codes = [code_of(kernel.source, arch, cache, kernel.features, compile_source) for kernel in kernels]
    return [
        KernelImage(arch, kernel.name, kernel.threads, code, shared=kernel.shared)
        for kernel, code in zip(kernels, codes, strict=True)
    ]
