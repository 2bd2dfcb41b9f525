"""A GPU program of TfmemDynamic: a kernel, and what the op has to know to write its scripts.
ops/dynamic/gpu_program.h reads what `to_text` writes.

Beside what any kernel image says (`custom_ops.jit.image`):

    spec DIGEST             SHA-256 of the spec's text that it was made for
    processors N            CTAs of a launch
    table N, words N        of the table and of the parameter (`custom_ops.dynamic.codegen.batch_table`)
    spilledK WIDTH...       of kind K: values that a batch's memory holds beside those that the spec keeps
    segments N
    segmentI KIND SECTION ROUND FIRST COUNT COST OUTPUTS DEPTH
                            a product is run by COUNT processors from FIRST on; everything else, and a product that
                            all have whole, has COUNT 0 and is run for a block of nodes by one; COST is about that of a
                            node, in cycles; of a product that tensor cores may compute in tiles its sums and their
                            terms, else 0 0
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from custom_ops.dynamic.codegen.batch_table import Table, pointers_of
from custom_ops.dynamic.codegen.on_chip import Chip, ChipPlan, cycles_of_a_node, holder, make_plan
from custom_ops.dynamic.codegen.segments import KindCode, Segment, kind_code
from custom_ops.dynamic.codegen.source import (
    ENTRY,
    POLLS,
    SCRIPT_WORDS,
    TILE_BYTES,
    generate,
    numbered_segments,
    reserved_bytes,
    shared_bytes,
    tile_product,
)
from custom_ops.dynamic.codegen.values import SectionValues
from custom_ops.dynamic.sections import sections
from custom_ops.dynamic.spec import Spec
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource


@dataclass(frozen=True)
class DynamicProgram:
    """A compiled kernel for a net.

    Attributes:
        image: the kernel.
        plan: what it holds on chip.
        rows: of a matrix that a warp has at least.
    """

    image: KernelImage
    plan: ChipPlan
    more: tuple[tuple[str, str], ...]
    rows: int = 1

    def to_text(self) -> str:
        """All but the code."""
        return self.image.to_text(dict(self.more))


def kinds_of(spec: Spec) -> tuple[KindCode, ...]:
    """The kinds of a net as a GPU runs them."""
    return tuple(kind_code(sections(kind, spec.code(kind))) for kind in spec.kinds)


def build(
    spec: Spec,
    arch: int,
    chip: Chip,
    rows: int = 1,
    cache: Cache | None = None,
    compile_source: CompileSource = nvrtc.compile_source,
    script_words: int = SCRIPT_WORDS,
    polls: int = POLLS,
    tiles: bool = True,
    timed: bool = False,
) -> DynamicProgram:
    """Plan, generate and compile the kernel of a net, or take it from `cache`.

    Args:
        tiles: whether products may be computed in tiles; without, a benchmark sees what they bring.
        timed: the kernel prints what its phases take.

    Raises:
        KernelError: the compiler is missing or rejects the source.
    """
    kinds = kinds_of(spec)
    table = Table(spec, kinds)
    plan = make_plan(kinds, chip, rows, reserved_bytes(table, script_words, timed), TILE_BYTES)
    code = code_of(generate(spec, kinds, plan, script_words, polls, timed), arch, cache, compile_source=compile_source)
    image = KernelImage(
        arch, ENTRY, chip.threads, code, shared_bytes(table, plan, script_words, timed), cooperative=True
    )
    return DynamicProgram(image, plan, tuple(_facts(spec, kinds, plan, table, tiles).items()), rows)


def _facts(spec: Spec, kinds: tuple[KindCode, ...], plan: ChipPlan, table: Table, tiles: bool) -> dict[str, str]:
    facts = {
        "spec": hashlib.sha256(spec.text.encode()).hexdigest(),
        "processors": str(plan.chip.processors),
        "table": str(table.size),
        "words": str(pointers_of(spec).words),
    }
    for number, kind in enumerate(kinds):
        facts[f"spilled{number}"] = " ".join(map(str, kind.spilled))
    all_segments = list(numbered_segments(kinds))
    facts["segments"] = str(len(all_segments))
    for number, of_kind, section, segment in all_segments:
        values = SectionValues(spec, table, pointers_of(spec), of_kind, kinds[of_kind], section)
        call = segment.call
        may = call is not None and tiles and tile_product(plan, values, call)
        shape = (call.view.outputs, call.view.depth) if call is not None and may else (0, 0)
        runners = _runners(kinds[of_kind], section, segment, plan)
        facts[f"segment{number}"] = " ".join(map(str, (of_kind, section, segment.round, *runners, *shape)))
    return facts


def _runners(kind: KindCode, section: int, segment: Segment, plan: ChipPlan) -> tuple[int, int, int]:
    """Which processors run a segment, and about how many cycles they take for a node."""
    if segment.call is None:
        items = kind.sections[section].items
        return 0, 0, 100 + sum(items[place].width for place in segment.rows) // 16
    residence = plan.residences[holder(plan, segment.call.view)]
    cost = cycles_of_a_node(residence, plan.chip)
    if residence.everywhere:
        return 0, 0, cost
    return residence.first, min(residence.blocks, plan.chip.processors), cost
