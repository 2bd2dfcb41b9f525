"""TfmemMatMul's kernels without TensorFlow: launched by hand, for benchmarks and tests.

The kernels' parameter is a struct, in words of 64 bits:
    0: rows | columns << 32; 1: depth | lines << 32, where a line is 32 numbers along the depth of a split operand
    2, 3: where the split operands lie; 4, 5: where the inverse scales of rows and of columns are
    6: bias, or 0; 7: result; 8, 9: both operands
    10: strides of A's rows and of its depth; 11: of B's columns and of its depth
    12: tiles | split_k << 32; 13: partial sums; 14: an unsigned int of each tile, how many of its parts are there"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custom_ops import build_flags
from custom_ops.jit.image import KernelImage
from custom_ops.jit.launch import Enqueue, LoadedKernel, Module
from custom_ops.matmul import kernels
from custom_ops.matmul.kernels import LINE_BYTES

LINE_NUMBERS = 32
SPLIT_ROWS = 8  # of an operand, for a CTA of `split`


@dataclass(frozen=True)
class Shape:
    """The shape of one product, `[rows, depth]` by `[depth, columns]`.

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
        """Lines of a row of a split operand: an even number."""
        return -(-self.depth // (2 * LINE_NUMBERS)) * 2

    def tiles(self, tile: int) -> int:
        return -(-self.rows // tile) * -(-self.columns // tile)


@dataclass(frozen=True)
class Tiling:
    """How a product is divided among CTAs.

    Attributes:
        small: whether tiles are the small ones.
        split_k: how many parts the depth is cut into, one for each CTA.
    """

    small: bool
    split_k: int

    @property
    def tile(self) -> int:
        return (kernels.SMALL if self.small else kernels.LARGE).tile

    def sums_bytes(self, shape: Shape) -> int:
        """Bytes of the sums of all parts, if a tile has several."""
        return shape.tiles(self.tile) * self.split_k * self.tile**2 * 4 if self.split_k > 1 else 0

    def memory_bytes(self, shape: Shape) -> int:
        """Bytes of both split operands, parts' sums, operands' inverse scales and each tile's count."""
        operands = (shape.rows + shape.columns) * (shape.lines * LINE_BYTES + 4)
        return operands + self.sums_bytes(shape) + shape.tiles(self.tile) * 4


def best_tiling(shape: Shape, processors: int) -> Tiling:
    """What the op would take on so many multiprocessors: custom_ops/ops/matmul/matmul_tiling.cc, compiled here."""
    found = (ctypes.c_int64 * 2)()
    sizes = (shape.rows, shape.depth, shape.columns, processors)
    _tiling_library().tfmem_best_tiling(*map(ctypes.c_int64, sizes), found)
    return Tiling(bool(found[0]), found[1])


@functools.cache
def _tiling_library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "tiling.so"
        source = build_flags.PACKAGE / "ops" / "matmul" / "matmul_tiling.cc"
        flags = [
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++17",
            f"-I{build_flags.PACKAGE.parent}",
            f"-I{build_flags.GENERATED}",
        ]
        build_flags.write_generated()
        subprocess.run([build_flags.compiler(), *flags, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


class Multiplier:
    """The programs, loaded into the current CUDA context, by the rules that the op follows too."""

    def __init__(self, programs: list[KernelImage], processors: int, driver: Any = None) -> None:
        """`processors`: of the device; `driver`: as of a `Module`.

        Raises:
            KernelError: the device cannot load them.
        """
        self._split, self._large, self._small = (LoadedKernel(image, Module(image.code, driver)) for image in programs)
        self._processors = processors

    def tiling(self, shape: Shape) -> Tiling:
        """The tiling that the op chooses."""
        return best_tiling(shape, self._processors)

    def prepare(
        self, shape: Shape, tiling: Tiling, left: int, right: int, bias: int, result: int, memory: int
    ) -> Enqueue:
        """One product, to be enqueued on a CUDA stream as often as its tensors are there.

        Args:
            shape: of it.
            tiling: what `tiling` says, or another.
            left, right, bias, result: device pointers; the bias' may be 0, for none.
            memory: device memory of `tiling.memory_bytes(shape)`, at a multiple of 16.
        """
        operands = (memory, memory + shape.rows * shape.lines * LINE_BYTES)
        sums = memory + (shape.rows + shape.columns) * shape.lines * LINE_BYTES
        scales = sums + tiling.sums_bytes(shape)
        arrived = scales + (shape.rows + shape.columns) * 4
        tiles = shape.tiles(tiling.tile)
        words = [
            shape.rows | shape.columns << 32,
            shape.depth | shape.lines << 32,
            *operands,
            scales,
            scales + shape.rows * 4,
            bias,
            result,
            left,
            right,
            1 | shape.rows << 32 if shape.transpose_left else shape.depth | 1 << 32,
            shape.depth | 1 << 32 if shape.transpose_right else 1 | shape.columns << 32,
            tiles | tiling.split_k << 32,
            sums,
            arrived,
        ]
        splits = -(-shape.rows // SPLIT_ROWS) + -(-shape.columns // SPLIT_ROWS)
        split = self._split.prepare((splits, 1), words)
        multiply = (self._small if tiling.small else self._large).prepare((tiles * tiling.split_k, 1), words)

        def enqueue(stream: int) -> None:
            split(stream)
            multiply(stream)

        return enqueue
