"""GPU programs of TfmemMatMul: float32 products on tensor cores (kernels/matmul.cuh), the same for all shapes.

The kernels' parameter is a struct, in words of 64 bits:
    0: rows | columns << 32; 1: depth | lines << 32, where a line is 32 numbers along the depth of a split operand
    2, 3: where the split operands lie; 4, 5: where what takes the scaling of rows and of columns back
    6: bias, or 0; 7: result; 8, 9: both operands
    10: strides of A's rows and of its depth; 11: of B's columns and of its depth"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from custom_ops.jit.cache import Cache
from custom_ops.jit.launch import Launcher
from custom_ops.jit.program import ANY_BATCH, Program, image_of

OLDEST = 80  # compute capability 8.0: copies that need no registers, and products of depth 16
LINE_NUMBERS, LINE_BYTES = 32, 128
SPLIT_ROWS = 8  # of an operand, for a block of `split`
SMALL_TILES = 3  # small tiles take as long as a large one


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
        shared = "  extern __shared__ __align__(1024) uint4 shared[];\n" if self.tile else ""
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


def build(arch: int, cache: Cache | None = None) -> list[Program]:
    """What the op takes as `programs`, compiled or taken from `cache`.

    Raises:
        KernelError: the compiler is missing or rejects a source.
    """
    kernels = (SPLIT, HOPPER if arch == 90 else LARGE, SMALL)
    return [_program(kernel, arch, cache) for kernel in kernels]


def _program(kernel: Kernel, arch: int, cache: Cache | None) -> Program:
    return Program(
        kind="cubin",
        arch=arch,
        entry=kernel.name,
        fallback="",
        rows=1,
        ctas=1,
        cluster=1,
        threads=kernel.threads,
        shared=kernel.shared,
        scratch=0,
        cooperative=0,
        stages=0,
        max_batch=ANY_BATCH,
        image=image_of(kernel.source, arch, cache, kernel.features),
    )


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

    @property
    def memory_bytes(self) -> int:
        """Of both operands split, and of what takes their scaling back."""
        return (self.rows + self.columns) * (self.lines * LINE_BYTES + 4)

    def tiles(self, tile: int) -> int:
        return -(-self.rows // tile) * -(-self.columns // tile)


def prefers_small(shape: Shape, processors: int) -> bool:
    """Whether small tiles leave fewer of so many multiprocessors without work."""
    small, large = (-(-shape.tiles(kernel.tile) // processors) for kernel in (SMALL, LARGE))
    return small < SMALL_TILES * large


class Multiplier:
    """The programs, loaded into the current CUDA context, by the rules that the op follows too."""

    def __init__(self, programs: list[Program], processors: int) -> None:
        """`processors`: of the device.

        Raises:
            KernelError: the device cannot load them.
        """
        self._split, self._large, self._small = map(Launcher, programs)
        self._processors = processors

    def prepare(
        self, shape: Shape, left: int, right: int, bias: int, result: int, memory: int, small: bool | None = None
    ) -> Callable[[int], None]:
        """One product, to be enqueued on a CUDA stream as often as its tensors are there.

        Args:
            shape: of it.
            left, right, bias, result: device pointers; the bias' may be 0, for none.
            memory: device memory of `shape.memory_bytes`, at a multiple of 16.
            small: which tiles; None: those that are expected to take less time.
        """
        if small is None:
            small = self.prefers_small(shape)
        halves = (memory, memory + shape.rows * shape.lines * LINE_BYTES)
        scales = memory + (shape.rows + shape.columns) * shape.lines * LINE_BYTES
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
        ]
        splits = -(-shape.rows // SPLIT_ROWS) + -(-shape.columns // SPLIT_ROWS)
        split = self._split.prepare_blocks(words, splits)
        multiply = (self._small if small else self._large).prepare_blocks(
            words, shape.tiles((SMALL if small else LARGE).tile)
        )

        def enqueue(stream: int) -> None:
            split(stream)
            multiply(stream)

        return enqueue

    def prefers_small(self, shape: Shape) -> bool:
        """See `prefers_small`."""
        return prefers_small(shape, self._processors)
