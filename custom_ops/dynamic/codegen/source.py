"""The CUDA source of a net's kernel: templates of kernels/dynamic*.cuh, and what the kinds of its nodes compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from custom_ops.dynamic.codegen.batch_table import Table, pointers_of
from custom_ops.dynamic.codegen.on_chip import ChipPlan, Residence, holder
from custom_ops.dynamic.codegen.segments import KindCode, ProductCall, Ref, Segment
from custom_ops.dynamic.codegen.values import SectionValues
from custom_ops.dynamic.codegen.vector_code import rows_source
from custom_ops.dynamic.sections import SectionStep
from custom_ops.dynamic.spec import Spec

ENTRY = "dynamic_net"
SCRIPT_WORDS = 2048
POLLS = 1 << 22  # seconds, where a level takes microseconds
_HOMES = {"registers": "InRegisters", "shared": "InShared", "L2": "Streamed"}
TILE_BYTES = 4 * 3 * 2 * 64 * 36 + 8 * 64 * 8  # kernels/dynamic_tile.cuh: three steps of two slabs; places of vectors
MOST_OPERANDS = 8
_CLOCK_WORDS = 3 * 256


def generate(
    spec: Spec,
    kinds: Sequence[KindCode],
    plan: ChipPlan,
    script_words: int = SCRIPT_WORDS,
    polls: int = POLLS,
    timed: bool = False,
) -> str:
    """The source of one kernel for forward, backward and update.

    Args:
        script_words: how many words of a script are fetched at a time, at least the 6 of the longest instruction.
        polls: how often a processor polls for a signal before it gives up.
        timed: the kernel prints what its phases take (Clock of kernels/dynamic.cuh).
    """
    return "\n".join(_Writer(spec, kinds, plan, script_words, polls, timed).lines()) + "\n"


def reserved_bytes(table: Table, script_words: int = SCRIPT_WORDS, timed: bool = False) -> int:
    """Bytes of shared memory besides weights and staging: the table, a piece of the script, a piece of a called phase,
    a number for each warp, times of phases."""
    return 4 * (_aligned(table.size) + 2 * script_words + 32 + _CLOCK_WORDS * timed)


def shared_bytes(table: Table, plan: ChipPlan, script_words: int = SCRIPT_WORDS, timed: bool = False) -> int:
    """Bytes of shared memory of a processor."""
    return reserved_bytes(table, script_words, timed) + max(plan.staging, TILE_BYTES) + plan.shared


def tile_product(plan: ChipPlan, values: SectionValues, call: ProductCall) -> bool:
    """Whether tensor cores may compute a product in tiles: not one that every processor has whole, and only of vectors
    that lie in memory."""
    if plan.residences[holder(plan, call.view)].everywhere or len(call.operands) > MOST_OPERANDS:
        return False
    return all(values.pointer(ref) is not None for ref in call.operands)


def numbered_segments(kinds: Sequence[KindCode]) -> Iterator[tuple[int, int, int, Segment]]:
    """Number, kind and section of all segments, in the order of their numbers."""
    number = 0
    for kind, code in enumerate(kinds):
        for section, cut in enumerate(code.sections):
            for segment in cut.segments:
                yield number, kind, section, segment
                number += 1


def _aligned(words: int) -> int:
    return (words + 3) // 4 * 4


class _Writer:
    def __init__(
        self, spec: Spec, kinds: Sequence[KindCode], plan: ChipPlan, script_words: int, polls: int, timed: bool
    ) -> None:
        self.spec, self.kinds, self.plan = spec, kinds, plan
        self.script_words, self.polls, self.timed = script_words, polls, timed
        self.table, self.pointers = Table(spec, kinds), pointers_of(spec)

    def lines(self) -> Iterator[str]:
        chip, words = self.plan.chip, self.pointers.words
        yield '#include "dynamic_gradient.cuh"'
        yield '#include "dynamic_product.cuh"'
        yield "using namespace tfmem;"
        counts = (words, len(self.spec.parameters), self.table.size)
        sizes = (*counts, chip.threads, chip.processors, self.script_words, self.polls, str(self.timed).lower())
        yield f"using Sizes = NetSizes<{', '.join(map(str, sizes))}>;"
        for number, residence in enumerate(self.plan.residences):
            yield from self._view(number, residence)
        steps = list(self._gradient_steps())
        yield f"__device__ const GradientStep gradient_steps[] = {{{', '.join(text for _, text in steps) or '{}'}}};"
        yield from self._tile_products()
        yield (
            f'extern "C" __global__ void __launch_bounds__({chip.threads}, 1) {ENTRY}'
            f"(const __grid_constant__ Parameters<{words}> p) {{"
        )
        yield "TFMEM_DYNAMIC_SHARED(float, shared);"
        yield "unsigned* const table = reinterpret_cast<unsigned*>(shared);"
        script = _aligned(self.table.size)
        yield f"unsigned* const script = table + {script};"
        partial = script + 2 * self.script_words
        clock = partial + 32
        staging = clock + _CLOCK_WORDS * self.timed
        yield "const unsigned* const sent = reinterpret_cast<const unsigned*>(p.word[kSent]);"
        yield (
            "const Net<Sizes> net{p, sent, table, reinterpret_cast<float*>(p.word[kMemory]), "
            f"shared + {staging}, shared + {partial}}};"
        )
        yield f"Clock<Sizes::kTimed> clock(table + {clock});"
        yield f"for (int i = threadIdx.x; i < {self.table.size}; i += {chip.threads}) table[i] = sent[i];"
        at = staging + max(self.plan.staging, TILE_BYTES) // 4
        for number, residence in enumerate(self.plan.residences):
            pointer = f"net.parameter({self.pointers.parameter(residence.view.parameter)})"
            yield f"Weights{number} weights_{number};"
            yield f"weights_{number}.load({pointer}, shared + {at if residence.home == 'shared' else 0});"
            if residence.home == "shared":
                at += residence.registers * chip.threads
        yield "__syncthreads();"
        yield "interpret(net, script, clock, [&](unsigned op, const unsigned* instruction) {"
        yield "const int first = static_cast<int>(instruction[2]), rows = static_cast<int>(instruction[3]);"
        yield "switch (op) {"
        yield "case kRun: case kMultiply: switch (instruction[1]) {"
        for number, kind, section, segment in numbered_segments(self.kinds):
            yield f"case {number}: {{  // kind {kind}, section {section}, round {segment.round}"
            yield from self._segment(number, kind, section, segment)
            yield "return true; }"
        yield "default: return false; }"
        yield "case kGradient: switch (instruction[1]) {"
        for number, parameter in enumerate(self.spec.parameters):
            if self.spec.sparse[number]:
                continue
            first = sum(of < number for of, _ in steps)
            count = sum(of == number for of, _ in steps)
            height, width = parameter.shape if len(parameter.shape) == 2 else (1, parameter.shape[0])
            yield (
                f"case {number}: take_gradient(net, gradient_steps + {first}, {count}, {number}, first * kTile, "
                f"rows * kTile, {height}, {width}); return true;"
            )
        yield "default: return false; }"
        yield "case kSumRows: switch (instruction[1]) {"
        for number, parameter in enumerate(self.spec.parameters):
            if self.spec.sparse[number]:
                words_of = self.table.looked_up[number][0]
                yield (
                    f"case {number}: sum_rows(net, {number}, {words_of}, {parameter.shape[-1]}, first, rows); "
                    "return true;"
                )
        yield "default: return false; }"
        yield (
            "case kGather: gather(net, static_cast<int>(instruction[1]), static_cast<int>(instruction[2]), "
            "instruction[3], static_cast<int>(instruction[4]), static_cast<int>(instruction[5])); return true;"
        )
        yield (
            f"case kLosses: sum_losses(net, {self.table.first_node}, {self.table.losses}, "
            "static_cast<int>(instruction[1]), static_cast<int>(instruction[2])); return true;"
        )
        yield "default: return false; }"
        yield "});"
        yield "}"

    def _view(self, number: int, residence: Residence) -> Iterator[str]:
        view = residence.view
        first = -1 if residence.everywhere else residence.first
        sizes = (view.depth, view.outputs, residence.rows, residence.slots, first, residence.staged)
        columns = self.spec.parameters[view.parameter].shape[-1]
        yield f"using View{number} = View<Sizes, {', '.join(map(str, sizes))}>;"
        matrix = f"Matrix<{str(view.transposed).lower()}, {columns}, {view.start}, {view.first}>"
        yield f"using Weights{number} = {_HOMES[residence.home]}<View{number}, {matrix}>;"

    # ---- segments ----

    def _segment(self, number: int, kind: int, section: int, segment: Segment) -> Iterator[str]:
        values = self._values(kind, section)
        if segment.call is not None:
            yield from self._product(values, segment.call, number)
            return
        yield "if (op != kRun) return false;"
        yield "__syncthreads();"
        yield "const Team<Sizes> team(net, rows);"
        yield "for (int r = team.first; r < rows; r += team.step) {"
        yield "const int row = first + r;"
        yield from rows_source(values, segment.rows)
        yield "}"

    def _values(self, kind: int, section: int) -> SectionValues:
        return SectionValues(self.spec, self.table, self.pointers, kind, self.kinds[kind], section)

    def _tile_products(self) -> Iterator[str]:
        """What tiles of products read (TileProduct of kernels/dynamic_tile.cuh), by segment; of others nothing."""
        texts = []
        for _, kind, section, segment in numbered_segments(self.kinds):
            call, values = segment.call, self._values(kind, section)
            if call is None or not self._as_tiles(values, call):
                texts.append("{}")
                continue
            view = call.view
            columns = self.spec.parameters[view.parameter].shape[-1]
            ends = accumulate(values.width(ref) for ref in call.operands)
            words = (self.pointers.parameter(view.parameter), columns, view.start, view.depth, view.first, view.outputs)
            texts.append(f"{{{', '.join(map(str, words))}, {len(call.operands)}, {{{', '.join(map(str, ends))}}}}}")
        yield f"__device__ const TileProduct tile_products[] = {{{', '.join(texts) or '{}'}}};"

    def _as_tiles(self, values: SectionValues, call: ProductCall) -> bool:
        return tile_product(self.plan, values, call)

    def _product(self, values: SectionValues, call: ProductCall, segment: int) -> Iterator[str]:
        number = holder(self.plan, call.view)
        residence = self.plan.residences[number]
        fours = all(values.pointer(ref) is not None and values.width(ref) % 4 == 0 for ref in call.operands)
        yield f"const auto source = [&](int row, int k) -> {'const float*' if fours else 'float'} {{"
        at = 0
        for number_of, ref in enumerate(call.operands):
            width, last = values.width(ref), number_of == len(call.operands) - 1
            k = f"(k - {at})" if at else "k"
            text = f"{values.pointer(ref)} + {k}" if fours else values.read(ref, k)
            declared = " ".join(values.indices([ref.number])) if ref.kind == "v" else ""
            yield f"{declared} return {text};" if last else f"if (k < {at + width}) {{ {declared} return {text}; }}"
            at += width
        yield "};"
        yield "const auto store = [&](int row, int o, float sum) {"
        offset = call.view.first - residence.view.first
        for part in call.parts:
            item = values.items[part.item]
            begin = part.first - call.view.first + offset
            yield f"if (o >= {begin} && o < {begin + item.width}) {{"
            yield f"const int j = o - {begin};"
            reads = [part.item, *part.sinks, *([part.base.number] if part.base and part.base.kind == "v" else [])]
            yield from values.indices([place for place in reads if place != part.item])
            base = f" + {values.read(part.base, 'j')}" if part.base else ""
            yield f"const float value = sum{base};"
            if item.in_memory:
                yield f"{values.memory(Ref('v', part.item))}[j] = value;"
            for sink in part.sinks:
                yield f"{values.sink(values.items[sink])}[j] = value;"
            yield "}"
        yield "};"
        if self._as_tiles(values, call):
            yield "if (op == kMultiply) {"
            yield "const auto place = [&](int operand, int row) -> const float* {"
            for number_of, ref in enumerate(call.operands):
                declared = " ".join(values.indices([ref.number])) if ref.kind == "v" else ""
                yield f"if (operand == {number_of}) {{ {declared} return {values.pointer(ref)}; }}"
            yield "return nullptr; };"
            yield f"const auto take = [&](int row, int o, float sum) {{ store(row, o + {offset}, sum); }};"
            yield (
                f"multiply_tile<{str(call.view.transposed).lower()}>(net, tile_products[{segment}], first, rows, "
                "static_cast<int>(instruction[4]), place, take);"
            )
            yield "return true; }"
        yield "if (op != kRun) return false;"
        reading = "kNumbers"
        if fours:  # rows of a batch's memory are aligned, those of a parameter may not be
            own = all(ref.kind == "k" or values.items[ref.number].op not in ("lookup", "row") for ref in call.operands)
            reading = "kAlignedFours" if own else "kFours"
        flags = f"{str(residence.home == 'registers').lower()}, {reading}"
        yield f"multiply<View{number}, {flags}>(net, weights_{number}, first, rows, source, store);"

    # ---- gradients ----

    def _gradient_steps(self) -> Iterator[tuple[int, str]]:
        """What kinds add to gradients, by parameter: its number, and a GradientStep of kernels/dynamic_gradient.cuh."""
        found = [
            (step.numbers[0], self._gradient_step(kind, code, step))
            for kind, code in enumerate(self.kinds)
            for step in code.gradients
            if not self.spec.sparse[step.numbers[0]]
        ]
        yield from sorted(found, key=lambda step: step[0])

    def _gradient_step(self, kind: int, code: KindCode, step: SectionStep) -> str:
        table = self.table.kinds[kind]
        last = step.values[-1].number  # what columns have
        width, place = code.kept[last], table.kept[last]
        if step.op == "outer":
            first = step.values[0].number
            words = ("kOuter", table.count, table.kept[first], step.numbers[1], code.kept[first])
            return f"{{{', '.join(map(str, (*words, place, step.numbers[2], width)))}}}"
        if step.op == "put_lookup":
            words = ("kLookup", table.count, table.arguments[step.numbers[1]], 0, 1)
            return f"{{{', '.join(map(str, (*words, place, step.numbers[2], width)))}}}"
        return f"{{{', '.join(map(str, ('kRow', table.count, 0, 0, 1, place, step.numbers[1], width)))}}}"
