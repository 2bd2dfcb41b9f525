"""The source of a fusion kernel: CUDA C++ that is read, and compiled with --fmad=false: what is computed twice is then
the same to the bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Random
from custom_ops.fusion.codegen.plan.arguments import ArgumentWord, arguments
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece
from custom_ops.fusion.codegen.plan.registers import ctas_at_once
from custom_ops.fusion.codegen.plan.shared import shared_bytes
from custom_ops.fusion.codegen.write.flat import FlatWriter
from custom_ops.fusion.codegen.write.piece import used
from custom_ops.fusion.codegen.write.products import ProductWriter
from custom_ops.fusion.codegen.write.rows import RowWriter
from custom_ops.fusion.codegen.write.tiles import TileWriter

ENTRY = "fusion"
MOST_WORDS = 4095  # of parameters, from compute capability 7.0 on, with a driver of CUDA 12.1 or later


# The names that end in a number of this pattern's.
_NUMBERED = re.compile(
    r"\b((?:tensor|output|parts|saved|value|early|row|pack|result|kept|sums?|total|array|tile|ctas)_|[and])(\d+(?:_\d+)?)\b"
)


@dataclass(frozen=True)
class KernelSource:
    """A kernel before it is compiled.

    Attributes:
        text: CUDA C++.
        entry: its name.
        arguments: the words that it is given.
        shared: bytes of dynamic shared memory of a CTA.
    """

    text: str
    entry: str
    arguments: tuple[ArgumentWord, ...]
    shared: int


@dataclass(frozen=True)
class _Function:
    """What computes a piece: the lines of its body, the words that it is given, and a comment."""

    body: tuple[str, ...]
    arguments: tuple[ArgumentWord, ...]
    comment: str

    @cached_property
    def kind(self) -> str:
        """A text that is equal for pieces that differ in their tensors alone."""
        found: dict[str, dict[str, int]] = {}

        def renamed(match: re.Match[str]) -> str:
            numbers = found.setdefault(match[1], {})
            return f"{match[1]}{numbers.setdefault(match[2], len(numbers))}"

        return "\n".join(_NUMBERED.sub(renamed, line) for line in self.body)


def write(plan: KernelPlan, entry: str = ENTRY, wide: bool = False) -> KernelSource:
    """The source of a plan's kernel; `wide`: for tensors of 2^30 elements and more, with 64-bit indices."""
    functions = [_function(plan, number, piece) for number, piece in enumerate(plan.pieces)]
    names: dict[str, int] = {}
    for function in functions:
        names.setdefault(function.kind, len(names))
    words, calls = _calls(plan, functions, names)
    if len(words) > MOST_WORDS:
        raise KernelError(f"{len(words)} words for {len(plan.pieces)} pieces; a kernel takes {MOST_WORDS}: use several")
    signature = f"{entry}(const __grid_constant__ tfmem::Parameters<{max(len(words), 1)}> p)"
    header = "contraction.cuh" if any(piece.tile for piece in plan.pieces) else "fusion.cuh"
    bounds = f"{plan.configuration.threads}, {ctas_at_once(plan)}"
    lines = [
        f'#include "{header}"',
        *['#include "philox.cuh"'] * any(isinstance(node, Random) for node in plan.pattern.program.nodes),
        "",
        f"namespace {entry}_pieces {{",
        "",
        "using namespace tfmem;",
        f"using Index = {'long long' if wide else 'int'};",
        "",
    ]
    for kind, number in names.items():
        lines += _text(f"piece_{number}", [function for function in functions if function.kind == kind])
    lines += [
        f"}}  // namespace {entry}_pieces",
        "",
        f'extern "C" __global__ void __launch_bounds__({bounds}) {signature} {{',
        f"using namespace {entry}_pieces;",
        "TFMEM_DYNAMIC_SHARED(char, shared);",
        *calls,
        "}",
    ]
    return KernelSource("\n".join(_indented(lines)) + "\n", entry, tuple(words), shared_bytes(plan))


def _function(plan: KernelPlan, number: int, piece: Piece) -> _Function:
    body = _writer(piece)(plan, number).lines()
    words = {word for line in body for word in re.findall(r"\w+", line)}
    given = tuple(argument for argument in arguments(plan) if argument.name in words)
    declared = [argument.declaration(word) for word, argument in enumerate(given)]
    names = ", ".join(root.name for root in piece.roots) or ", ".join(f"reduce_{place}" for place in piece.saved)
    rows = f"rows along axes {', '.join(map(str, piece.rows))}" if piece.rows else "one row"
    comment = f"// {names}: {rows}, {_owned(piece)}"
    return _Function((*declared, *used(["char* const exchange = shared;"], body), *body), given, comment)


def _writer(piece: Piece) -> type[FlatWriter | ProductWriter | RowWriter | TileWriter]:
    if piece.tile is not None:
        return ProductWriter
    return TileWriter if piece.tiled else FlatWriter if piece.flat else RowWriter


def _owned(piece: Piece) -> str:
    threads = piece.owner.threads
    return {"cta": "a CTA each", "thread": "a thread each"}.get(piece.owner.kind, f"{threads} threads each")


def _text(name: str, functions: Sequence[_Function]) -> list[str]:
    more = f"; and {len(functions) - 1} more" if len(functions) > 1 else ""
    return [
        functions[0].comment + more,
        f"__device__ __forceinline__ void {name}(const Word* p, char* shared, int cta, int ctas) {{",
        *functions[0].body,
        "}",
        "",
    ]


def _calls(
    plan: KernelPlan, functions: Sequence[_Function], names: dict[str, int]
) -> tuple[list[ArgumentWord], list[str]]:
    """All words of the kernel, and what it does with them."""
    if len(functions) == 1:
        return list(functions[0].arguments), ["piece_0(p.word, shared, blockIdx.x, gridDim.x);"]
    words = [ArgumentWord("barrier")] * plan.cooperative
    lines: list[str] = []
    for phase in range(plan.phases):
        if phase:
            barrier = "grid_barrier(pointer<unsigned>(p.word[0]), gridDim.x);"
            lines.append(barrier if plan.cooperative else "__syncthreads();")
        kinds: dict[str, list[int]] = {}
        for number, (piece, function) in enumerate(zip(plan.pieces, functions, strict=True)):
            if piece.phase == phase:
                kinds.setdefault(function.kind, []).append(number)
        for kind, numbers in kinds.items():
            stride = 2 + len(functions[numbers[0]].arguments)
            run = "run_pieces" if plan.single else "run_piece"
            lines.append(f"{run}<{len(numbers)}, {stride}, piece_{names[kind]}>(p.word + {len(words)}, shared);")
            for number in numbers:
                words += [ArgumentWord("first", number), ArgumentWord("ctas", number), *functions[number].arguments]
    return words, lines


def _indented(lines: list[str]) -> list[str]:
    """The lines, indented by their braces."""
    depth, found = 0, []
    for line in lines:
        if not line or line.startswith(("#", "namespace", "}  //")):
            found.append(line)
            continue
        opened, closed = line.count("{"), line.count("}")
        depth -= closed if re.match(r"\s*}", line) else 0
        found.append("  " * depth + line)
        depth += opened - (0 if re.match(r"\s*}", line) else closed)
    return found
