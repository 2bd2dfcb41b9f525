"""A fusion kernel as it is compiled and launched: what all its words are for tensors of given shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.plan.arguments import ArgumentWord, buffers
from custom_ops.fusion.codegen.plan.kernel_plan import (
    KernelPlan,
    PatternConfiguration,
    Piece,
    own_values,
    plan,
    tile_axes,
)
from custom_ops.fusion.codegen.plan.mapping import TILE
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.registers import keep
from custom_ops.fusion.codegen.plan.shared import SIZES, shared_bytes
from custom_ops.fusion.codegen.write.source import ENTRY, KernelSource, write
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource
from custom_ops.machine import SHARED_MEMORY

NARROW = 1 << 30  # elements of a tensor that 32-bit indices reach, steps beyond its end included


@dataclass(frozen=True)
class Launch:
    """One launch for tensors of given shapes.

    Attributes:
        ctas: of the grid.
        of_pieces: the first CTA of each piece, and how many there are.
        sizes: of all axes of the pattern's program.
        scratch: bytes of each of the kernel's buffers.
    """

    ctas: int
    of_pieces: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    scratch: tuple[int, ...]


@dataclass(frozen=True)
class FusionKernel:
    """What computes a pattern in one launch.

    Attributes:
        plan: what it does.
        wide: whether its indices have 64 bits.
        entry: its name.
    """

    plan: KernelPlan
    wide: bool = False
    entry: str = ENTRY

    @cached_property
    def source(self) -> KernelSource:
        """Its text and its arguments."""
        return write(self.plan, self.entry, self.wide)

    @cached_property
    def buffers(self) -> tuple[ArgumentWord, ...]:
        """Device memory that it needs beside its tensors; of the sizes that `launch` says."""
        return buffers(self.plan)

    @cached_property
    def alignment(self) -> int:
        """Bytes of which each tensor's address has to be a multiple."""
        widths = [max([piece.vector, *(loop.vector for loop in piece.loops)]) for piece in self.plan.pieces]
        return 16 if max(widths) > 1 or any(piece.tile for piece in self.plan.pieces) else 8

    def image(
        self, arch: int, cache: Cache | None = None, compile_source: CompileSource = nvrtc.compile_source
    ) -> KernelImage:
        """Compiled, or taken from the cache.

        Raises:
            KernelError: the compiler is missing or rejects the source.
        """
        code = code_of(self.source.text, arch, cache, compile_source=compile_source, contract=False)
        return KernelImage(
            arch,
            self.source.entry,
            self.plan.configuration.threads,
            code,
            self.source.shared,
            cooperative=self.plan.cooperative,
        )

    def launch(self, shapes: Sequence[Sequence[int]], resident: int = 0) -> Launch:
        """The launch for tensors of these shapes.

        Args:
            shapes: of all tensors of the program.
            resident: CTAs that the device runs at once, which a cooperative launch must not exceed; 0: any number.

        Raises:
            ProgramError: they do not fit the program.
            KernelError: they are not those that the kernel was made for.
        """
        pattern = self.plan.pattern
        fitted = pattern.fitted(shapes)
        for number, (shape, known) in enumerate(zip(fitted.shapes, pattern.shapes, strict=True)):
            if any(size is not None and size != found for size, found in zip(known, shape, strict=True)):
                raise KernelError(f"tensor {number} has shape {tuple(shapes[number])}; the kernel was made for {known}")
        sizes, most = fitted.sizes, fitted.positions
        if most >= NARROW and not self.wide:
            raise KernelError(f"{most:,} elements are more than 32-bit indices reach: write the kernel with `wide`")
        counts = [self._count(piece, sizes) for piece in self.plan.pieces]
        if self.plan.cooperative and resident:
            counts = self._fitted(counts, resident)
        first: list[int] = []
        for number, piece in enumerate(self.plan.pieces):
            same = number and self.plan.pieces[number - 1].phase == piece.phase and not self.plan.single
            first.append(first[-1] + counts[number - 1] if same else 0)
        ranges = tuple(zip(first, counts, strict=True))
        return Launch(max(a + b for a, b in ranges), ranges, sizes, tuple(self._scratch(sizes, counts)))

    def words(self, shapes: Sequence[Sequence[int]], launch: Launch, addresses: Callable[[str, int], int]) -> list[int]:
        """All words of a launch.

        Args:
            shapes: of the tensors.
            launch: for these.
            addresses: of the argument of a kind ("tensor", "output", "parts", "saved", "barrier") with a number; of
                "tf32" whether float32 may be multiplied so, as 1 or 0.
        """
        found, merged = [], self.plan.pattern.merged(shapes)
        for argument in self.source.arguments:
            if argument.kind == "size":
                found.append(launch.sizes[argument.number])
            elif argument.kind == "dimension":
                found.append(merged[argument.number][argument.dimension])
            elif argument.kind in ("first", "ctas"):
                found.append(launch.of_pieces[argument.number][argument.kind == "ctas"])
            else:
                found.append(addresses(argument.kind, argument.number))
        return found

    def _count(self, piece: Piece, sizes: Sequence[int]) -> int:
        if piece.tile is not None:
            axes = tile_axes(self.plan, piece)
            batch, rows, columns = (prod(sizes[axis] for axis in each) for each in axes)
            blocks = batch * -(-rows // piece.tile.rows) * -(-columns // piece.tile.columns)
        elif piece.tiled:
            *others, down, along = (sizes[axis] for axis in piece.rows)
            blocks = prod(others) * -(-down // TILE) * -(-along // TILE)
        else:
            blocks = -(-prod(sizes[axis] for axis in piece.rows) // (piece.owner.rows * piece.vector))
        blocks = max(1, blocks)
        return min(blocks, piece.most or blocks) * piece.slabs

    def _fitted(self, counts: list[int], resident: int) -> list[int]:
        """Fewer CTAs, so that those of each phase run at once; any number computes the same."""
        fitted = list(counts)
        for phase in range(self.plan.phases):
            here = [number for number, piece in enumerate(self.plan.pieces) if piece.phase == phase]
            slabs = [self.plan.pieces[number].slabs for number in here]
            if sum(slabs) > resident:
                raise KernelError(f"a phase of {len(here)} pieces does not fit {resident} CTAs at once")
            for number, count in zip(here, fit([counts[number] for number in here], slabs, resident), strict=True):
                fitted[number] = count
        return fitted

    def _scratch(self, sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
        found = []
        for buffer in buffers(self.plan):
            axes = self.plan.pattern.program.types[buffer.number].axes
            size = prod(sizes[axis] for axis in axes) * SIZES[buffer.element]
            if buffer.kind == "parts":
                number = self.plan.parts[buffer.number]
                slabs = self.plan.pieces[number].slabs
                size *= slabs if slabs > 1 else counts[number]
            found.append(size)
        return found


def positions(pattern: Pattern, shapes: Sequence[Sequence[int]]) -> int:
    """The most that an index of a kernel runs over, for tensors of these shapes: elements of a tensor or an output, or
    positions of a reduction, which may be more than any tensor has. From 2^30 on a kernel has to be `wide`.

    Raises:
        ProgramError: the shapes do not fit the program.
    """
    return pattern.fitted(shapes).positions


def fit(counts: Sequence[int], slabs: Sequence[int], resident: int) -> list[int]:
    """Fewer CTAs of each of several pieces, so that all run at once; as fusion_kernel.cc has it.

    Args:
        counts: CTAs that the pieces want.
        slabs: a piece has a multiple of so many, and these at least.
        resident: CTAs that run at once, at least the sum of `slabs`.
    """
    total = sum(counts)
    if total <= resident:
        return list(counts)
    fitted = [max(each, count * resident // total // each * each) for count, each in zip(counts, slabs, strict=True)]
    over = sum(fitted) - resident  # a share below one slab was rounded up: pieces with the most CTAs give way
    for piece in sorted(range(len(counts)), key=lambda piece: -fitted[piece]):
        fewer = min(-(-max(over, 0) // slabs[piece]) * slabs[piece], fitted[piece] - slabs[piece])
        fitted[piece] -= fewer
        over -= fewer
    return fitted


def make(pattern: Pattern, configuration: PatternConfiguration, wide: bool = False, entry: str = ENTRY) -> FusionKernel:
    """The kernel of a configuration.

    Raises:
        KernelError: the configuration does not fit the pattern.
    """
    made = plan(pattern, configuration)
    if (shared := shared_bytes(made)) > SHARED_MEMORY[90]:
        raise KernelError(f"{shared:,} bytes of shared memory; a CTA has at most {SHARED_MEMORY[90]:,}")
    for piece in made.pieces:
        if piece.looped:
            keep(pattern, piece, own_values(made, piece))
    return FusionKernel(made, wide, entry)
