"""GPU programs of TfmemMatMul: float32 products on tensor cores (kernels/matmul.cuh), the same for all shapes.

The kernels' parameter is a struct, in words of 64 bits:
    0: rows | columns << 32; 1: depth | lines << 32, where a line is 32 numbers along the depth of a split operand
    2, 3: where the split operands lie; 4, 5: where what takes the scaling of rows and of columns back
    6: bias, or 0; 7: result; 8, 9: both operands
    10: strides of A's rows and of its depth; 11: of B's columns and of its depth
    12: tiles | parts of each << 32; 13: sums of the parts; 14: an unsigned int of each tile, how many are there"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from custom_ops.jit import launch, nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource

OLDEST = 80  # compute capability 8.0: copies that need no registers, and products of depth 16
LINE_NUMBERS, LINE_BYTES = 32, 128
SPLIT_ROWS = 8  # of an operand, for a block of `split`
MOST_PARTS = 16  # of a tile's depth
MOST_TURNS = 2  # of CTAs on all multiprocessors, where tiles are in parts: sums of parts need room


@dataclass(frozen=True)
class Kernel:
    """One of the three.

    Attributes:
        name: its entry.
        call: of the template that it runs.
        threads: of a block.
        resident: blocks that registers are to suffice for.
        tile: rows and columns of the result that a block makes; 0: none.
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


SPLIT = Kernel("matmul_split", "split(arguments)", 256, resident=4, template="matmul_split.cuh")
LARGE = Kernel("matmul_large", "multiply<matmul::Large>(arguments, shared)", 256, resident=1, tile=128, stages=3)
SMALL = Kernel("matmul_small", "multiply<matmul::Small>(arguments, shared)", 128, resident=2, tile=64, stages=4)
HOPPER = Kernel(
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


@dataclass(frozen=True)
class Shape:
    """Of one product, `[rows, depth]` by `[depth, columns]`.

    Attributes:
        transpose_left: whether the left operand lies as `[depth, rows]`.
        transpose_right: whether the right one lies as `[columns, depth]`.
    """

    rows: int
    depth: int
    columns: int
    transpose_left: bool = False
    transpose_right: bool = False

    @property
    def lines(self) -> int:
        """Of a row of a split operand: an even number."""
        return -(-self.depth // (2 * LINE_NUMBERS)) * 2

    def tiles(self, tile: int) -> int:
        return -(-self.rows // tile) * -(-self.columns // tile)


@dataclass(frozen=True)
class Tiling:
    """How a product is divided among CTAs.

    Attributes:
        small: whether tiles are the small ones.
        parts: of the depth, each for a CTA of its own.
    """

    small: bool
    parts: int

    @property
    def tile(self) -> int:
        return (SMALL if self.small else LARGE).tile

    def sums_bytes(self, shape: Shape) -> int:
        """Of the sums of all parts, where there are several of a tile."""
        return shape.tiles(self.tile) * self.parts * self.tile**2 * 4 if self.parts > 1 else 0

    def memory_bytes(self, shape: Shape) -> int:
        """Of both operands split, of parts' sums, of what takes operands' scaling back, of each tile's count."""
        operands = (shape.rows + shape.columns) * (shape.lines * LINE_BYTES + 4)
        return operands + self.sums_bytes(shape) + shape.tiles(self.tile) * 4


def tilings(shape: Shape, processors: int) -> Iterator[Tiling]:
    """All that there are for so many multiprocessors, each part with some of the depth."""
    pairs = shape.lines // 2
    for small in (False, True):
        yield Tiling(small, parts=1)
        most = MOST_TURNS * processors // max(shape.tiles(Tiling(small, 1).tile), 1)
        for parts in range(2, min(pairs, MOST_PARTS, most) + 1):
            if -(-pairs // -(-pairs // parts)) == parts:
                yield Tiling(small, parts)


def nanoseconds(shape: Shape, tiling: Tiling, processors: int) -> int:
    """What a product takes once its operands are split, to compare tilings.

    Fitted to tilings of 58 shapes on an H200 (docs/benchmarks.md): for each 64 of the depth a large tile takes 1,500,
    and 4,000 besides; small ones 600, but one alone on its multiprocessor 870; sums of parts 3,000, and 1 a KB."""
    pairs = -(-shape.lines // (2 * tiling.parts))
    turns = -(-shape.tiles(tiling.tile) * tiling.parts // processors)
    small = pairs * max(870, 600 * turns) + -(-turns // 2) * 3000
    large = turns * (pairs * 1500 + 4000)
    gathering = 3000 + tiling.sums_bytes(shape) // 1000 if tiling.parts > 1 else 0
    return (small if tiling.small else large) + gathering


def best_tiling(shape: Shape, processors: int) -> Tiling:
    """The one that should take the least time on so many multiprocessors."""
    return min(tilings(shape, processors), key=lambda tiling: nanoseconds(shape, tiling, processors))


class Multiplier:
    """The programs, loaded into the current CUDA context, by the rules that the op follows too."""

    def __init__(self, programs: list[KernelImage], processors: int, driver: Any = None) -> None:
        """`processors`: of the device; `driver`: as of a `launch.Module`.

        Raises:
            KernelError: the device cannot load them.
        """
        self._split, self._large, self._small = (
            launch.Kernel(image, launch.Module(image.code, driver)) for image in programs
        )
        self._processors = processors

    def tiling(self, shape: Shape) -> Tiling:
        """See `best_tiling`."""
        return best_tiling(shape, self._processors)

    def prepare(
        self, shape: Shape, tiling: Tiling, left: int, right: int, bias: int, result: int, memory: int
    ) -> launch.Enqueue:
        """One product, to be enqueued on a CUDA stream as often as its tensors are there.

        Args:
            shape: of it.
            tiling: one of `tilings`.
            left, right, bias, result: device pointers; the bias' may be 0, for none.
            memory: device memory of `tiling.memory_bytes(shape)`, at a multiple of 16.
        """
        halves = (memory, memory + shape.rows * shape.lines * LINE_BYTES)
        sums = memory + (shape.rows + shape.columns) * shape.lines * LINE_BYTES
        scales = sums + tiling.sums_bytes(shape)
        arrived = scales + (shape.rows + shape.columns) * 4
        tiles = shape.tiles(tiling.tile)
        words = [
            shape.rows | shape.columns << 32,
            shape.depth | shape.lines << 32,
            *halves,
            scales,
            scales + shape.rows * 4,
            bias,
            result,
            left,
            right,
            1 | shape.rows << 32 if shape.transpose_left else shape.depth | 1 << 32,
            shape.depth | 1 << 32 if shape.transpose_right else 1 | shape.columns << 32,
            tiles | tiling.parts << 32,
            sums,
            arrived,
        ]
        splits = -(-shape.rows // SPLIT_ROWS) + -(-shape.columns // SPLIT_ROWS)
        split = self._split.prepare((splits, 1), words)
        multiply = (self._small if tiling.small else self._large).prepare((tiles * tiling.parts, 1), words)

        def enqueue(stream: int) -> None:
            split(stream)
            multiply(stream)

        return enqueue
