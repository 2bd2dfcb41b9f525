"""CUDA source of a persistent recurrent kernel: instances of the templates in custom_ops/kernels, and the cell's
elementwise code. Equal specifications and configurations give equal source."""

from __future__ import annotations

from dataclasses import fields, replace

from custom_ops.recurrent.codegen.cell_functions import TensorPointers, cell_struct
from custom_ops.recurrent.codegen.layout import chunk_words, fallback_layout, layout, needs_bounds, scheduled
from custom_ops.recurrent.codegen.replicated_source import replica_struct
from custom_ops.recurrent.codegen.schedule import CellSchedule, schedule
from custom_ops.recurrent.codegen.sizes import BufferLayout, GemmLayout, KernelLayout
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

ENTRY = "tfmem_recurrent"
FALLBACK = "tfmem_recurrent_fallback"
VALUES = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat16"}
EXCHANGES = {
    "single": "SingleExchange",
    "cluster": "ClusterExchange",
    "grid": "GridExchange",
    "launches": "GridExchange",  # which finds at once what the launch before has sent
}
OPERAND_SCALE = 1 << 14  # of product "half": 1 becomes a large float16
LARGEST_OPERAND = 3  # of initial states, with product "half": 4 times its scale is past float16
FIRST_POINTER = 7  # kPointers of kernels/common.cuh


def parameter_words(spec: RecurrentSpec) -> int:
    """64-bit words of the kernel's one parameter."""
    return FIRST_POINTER + spec.directions * TensorPointers(spec.cell).count


def generate(spec: RecurrentSpec, configuration: Configuration, arch: int) -> str:
    """The CUDA source of one kernel for compute capability `arch` (90 for 9.0).

    Raises:
        KernelError: the configuration does not fit the cell or the device; it says which number is too large.
    """
    plain = schedule(spec.cell)
    plan = scheduled(spec, configuration)
    sizes = layout(spec, configuration, arch)
    includes = ["recurrent.cuh", f"product_{configuration.product}.cuh"]
    includes += ["exchange_cluster.cuh"] if configuration.exchange == "cluster" else []
    includes += ["exchange_grid.cuh"] if configuration.through_l2 else []
    includes += ["stage.cuh"] if configuration.exchange == "launches" else []
    includes += ["slices.cuh"] if configuration.slices > 1 else []
    parts = [
        *(f'#include "{name}"' for name in includes),
        "namespace tfmem {",
        cell_struct(plan),
        *((replica_struct(plan.replica),) if plan.replica else ()),
        *_sizes(spec, configuration, plan, sizes),
        "}",
        *_entry(ENTRY, spec, configuration),
    ]
    if configuration.needs_fallback:
        alone = replace(fallback_layout(spec, configuration), scratch=sizes.scratch)  # the same memory
        parts += [
            "namespace tfmem::fallback {",
            cell_struct(plain) if plan.replica else "using tfmem::Cell;",  # one CTA has all units as it is
            *_sizes(spec, configuration, plain, alone, fallback=True),
            "}",
            *_entry(FALLBACK, spec, configuration),
        ]
    return "\n".join(parts) + "\n"


def _entry(name: str, spec: RecurrentSpec, configuration: Configuration) -> list[str]:
    words = parameter_words(spec)
    lines = [
        f'extern "C" __global__ void __launch_bounds__({configuration.threads}, 1)',
        f"{name}(const __grid_constant__ tfmem::Parameters<{words}> parameters) {{",
    ]
    if name == FALLBACK:
        lines += [
            "if (*reinterpret_cast<volatile int*>(parameters.word[tfmem::kStatus]) == 0) return;",
            "tfmem::sweep<tfmem::fallback::Cell, tfmem::fallback::FallbackSizes>(parameters, nullptr);",
        ]
    else:
        function = "sweep_stage" if configuration.exchange == "launches" else "sweep"
        lines += [
            "TFMEM_DYNAMIC_SHARED(float4, memory);",
            f"tfmem::{function}<tfmem::Cell, tfmem::Sizes>(parameters, reinterpret_cast<char*>(memory));",
        ]
    return [*lines, "}"]


def _sizes(
    spec: RecurrentSpec, configuration: Configuration, plan: CellSchedule, sizes: KernelLayout, fallback: bool = False
) -> list[str]:
    name = "FallbackSizes" if fallback else "Sizes"
    zeroed = min((gemm.results for gemm in sizes.gemms), default=sizes.staging)
    numbers = {
        "kUnits": spec.units,
        "kDirections": spec.directions,
        "kCtas": 1 if fallback else configuration.ctas,
        "kThreads": configuration.threads,
        "kTile": sizes.tile,
        "kSlices": 1 if fallback else configuration.slices,
        "kRows": sizes.rows,
        "kPaddedRows": sizes.padded_rows,
        "kItems": sizes.items,
        "kUnitLanes": configuration.lanes,
        "kSumLanes": sizes.sum_lanes,
        "kReplicaItems": sizes.replica_items,
        "kStaging": sizes.staging,
        "kKept": sizes.kept,
        "kZeroed": 0 if fallback else zeroed,
        "kScratch": sizes.scratch,
        "kPointersOfDirection": TensorPointers(spec.cell).count,
        "kFallback": int(fallback),
        "kOperandScale": OPERAND_SCALE,
        "kLargest": LARGEST_OPERAND if needs_bounds(spec, configuration) and not fallback else 0,
    }
    exchange = EXCHANGES["single" if fallback else configuration.exchange]
    lines = [
        f"struct {name} {{",
        f"using Value = {VALUES[spec.dtype]};",
        *(f"static constexpr int {key} = {value};" for key, value in numbers.items()),
        *_tables(plan, sizes),
        *(["using Replica = tfmem::Replica;"] if plan.replica else []),
        f"using Exchange = {exchange}<{name}>;",
    ]
    if fallback:
        return [
            *lines,
            "template <int WORDS> struct Products : DirectProducts<Cell, FallbackSizes, WORDS> {",
            "__device__ Products(const Context<FallbackSizes, WORDS>& context, char*, char*)",
            ": DirectProducts<Cell, FallbackSizes, WORDS>{context} {}",
            "};",
            "};",
        ]
    shapes = [
        line
        for index, (gemm, wanted) in enumerate(zip(sizes.gemms, plan.gemms, strict=True))
        for line in _shape(index, gemm, sizes.buffers[wanted.buffer], spec, configuration, sizes)
    ]
    return [*shapes, *lines, *_products(plan, sizes, spec, configuration), "};"]


def _tables(plan: CellSchedule, sizes: KernelLayout) -> list[str]:
    lines = ["template <int I> __host__ __device__ static constexpr BufferShape buffer() {"]
    for index, buffer in enumerate(sizes.buffers):
        numbers = [getattr(buffer, field.name) for field in fields(buffer)]  # BufferShape has them in the same order
        lines.append(f"if (I == {index}) return {{{', '.join(str(int(number)) for number in numbers)}}};")
    lines += ["return {};", "}"]
    lines += ["template <int I> __host__ __device__ static constexpr GemmShape gemm() {"]
    for index, gemm in enumerate(plan.gemms):
        operands, products = len(gemm.terms[0]), len(gemm.products)
        columns = sizes.gemms[index].columns if sizes.gemms else products * sizes.tile
        depth = sizes.gemms[index].depth if sizes.gemms else operands * sizes.tile
        transposed = [term.transposed for terms in gemm.terms for term in terms]
        flags = [gemm.replicated, all(transposed), any(transposed), gemm.parts is not None]
        shape = [columns, depth, operands, products, *map(int, flags)]
        lines.append(f"if (I == {index}) return {{{', '.join(map(str, shape))}}};")
    lines += ["return {};", "}"]
    lines += _received(plan, sizes)
    lines += _parts(plan)
    stages = sorted({gemm.stage for gemm in plan.gemms if gemm.parts is None})
    found = " || ".join(f"STAGE == {stage}" for stage in stages) or "false"
    lines.append(f"template <int STAGE> __host__ __device__ static constexpr bool has_gemm() {{ return {found}; }}")
    lines.append("// Those that STAGE waits for; all of them for -1.")
    lines.append("template <int STAGE, class Function> __device__ static void for_buffers(Function&& function) {")
    for index, wanted in enumerate(plan.buffers):
        if not wanted.exchanged:
            continue
        lines.append(f"if constexpr (STAGE == -1 || STAGE == {wanted.stage}) function(Tag<{index}>());")
    return [*lines, "}"]


def _parts(plan: CellSchedule) -> list[str]:
    """The products in parts: those of the CTA's own units, and the buffers of what all send."""
    if not plan.replica:
        return []
    found = [(index, gemm) for index, gemm in enumerate(plan.gemms) if gemm.parts is not None]
    lines = [f"static constexpr bool kInParts = {str(bool(found)).lower()};"]
    lines += ["template <class Function> __device__ static void for_parts(Function&& function) {"]
    lines += [f"function(Tag<{index}>(), Tag<{gemm.buffer}>(), Tag<{gemm.parts}>());" for index, gemm in found]
    return [*lines, "}"]


def _received(plan: CellSchedule, sizes: KernelLayout) -> list[str]:
    """Where the sums of other slices arrive."""
    sliced = [gemm for gemm in sizes.gemms if gemm.received]
    if not sliced:
        return []
    lines = ["template <int I> __host__ __device__ static constexpr ReceivedShape received() {"]
    for index, gemm in enumerate(sliced):
        columns = len(plan.gemms[index].products) * sizes.tile
        numbers = (columns, gemm.result_stride, gemm.partials, gemm.received, gemm.barrier)
        lines.append(f"if (I == {index}) return {{{', '.join(map(str, numbers))}}};")
    return [*lines, "return {};", "}"]


def _shape(
    index: int,
    gemm: GemmLayout,
    buffer: BufferLayout,
    spec: RecurrentSpec,
    configuration: Configuration,
    sizes: KernelLayout,
) -> list[str]:
    numbers = {
        "kColumns": gemm.columns,
        "kThreads": configuration.threads,
        "kLanes": gemm.lanes,
        "kThreadColumns": gemm.thread_columns,
        "kChunks": gemm.chunks,
        "kRegisters": gemm.registers,
        "kShared": gemm.shared,
        "kRows": sizes.rows,
        "kBlock": gemm.block,
        "kStride": buffer.stride,
        "kResultStride": gemm.result_stride,
        "kSplit": int(spec.precision == "highest"),
        "kForm": buffer.form,
        "kOperandScale": OPERAND_SCALE,
    }
    return [
        f"struct Shape{index} {{",
        *(f"static constexpr int {key} = {value};" for key, value in numbers.items()),
        "};",
    ]


def _products(plan: CellSchedule, sizes: KernelLayout, spec: RecurrentSpec, configuration: Configuration) -> list[str]:
    """The products of a CTA: loaded once, run in their stage, their partial sums added where they are read."""
    template = {"fma": "FmaProduct", "mma": "MmaProduct", "half": "HalfProduct"}[configuration.product]
    members = [f"{template}<Shape{index}> gemm_{index};" for index in range(len(plan.gemms))]
    sliced = configuration.slices > 1
    members += ["Slices<Sizes> slices;"] if sliced else []
    if sizes.sum_lanes:
        members += [f"float own_{index}[{gemm.thread_columns}];" for index, gemm in enumerate(sizes.gemms)]
    constant = "" if sizes.sum_lanes else " const"
    load, run, result, run_part, part = [], [], [], [], []
    for index, gemm in enumerate(sizes.gemms):
        chunk = chunk_words(spec, configuration) * gemm.thread_columns
        streamed = (gemm.chunks - gemm.registers - gemm.shared) * chunk * configuration.threads * 4
        weights, place = (
            f"reinterpret_cast<{kind}*>(shared + {gemm.weights}), "
            f"reinterpret_cast<{kind}*>(scratch + {gemm.streamed}ll + {cta} * {streamed}ll)"
            for kind, cta in (("float4", "context.cta"), ("const float4", "blockIdx.x"))
        )
        source = f"WeightSource<Cell, Sizes, {index}, WORDS>{{context}}"
        loads = [f"gemm_{index}.load({source}, {weights}, results<{index}>(), lay_out);"]
        buffer = plan.gemms[index].buffer
        operands = f"exchange.template operands<{buffer}>(step)"
        if not plan.buffers[buffer].exchanged:
            operands = f"local_operands<Sizes, {buffer}>(shared)"
        product = f"gemm_{index}.run({operands}, {place});"
        if sizes.sum_lanes:
            product = f"gemm_{index}.run_own({operands}, {place}, own_{index});"
        if sliced:
            loads.append(f"slices.template begin<{index}>();")
            product += f" __syncthreads(); slices.template reduce<{index}>(results<{index}>(), step);"
        parts, stage = plan.gemms[index].parts, plan.gemms[index].stage
        load.append(f"if constexpr (STAGE == kAllStages || STAGE == {stage}) {{ {' '.join(loads)} }}")
        if parts is None:
            run.append(f"if constexpr (STAGE == {stage}) {{ {product} }}")
        else:
            run_part.append(f"if constexpr (GEMM == {index}) {{ {product} }}")
        added = f"if constexpr (GEMM == {index}) return add<{gemm.partials}, {gemm.result_stride}>"
        if sizes.sum_lanes:
            result.append(f"if constexpr (GEMM == {index}) return own_{index}[PRODUCT];")
        elif parts is None:
            result.append(f"{added}(from, at.row);")
        else:
            part.append(f"{added}(results<GEMM>() + column, row);")
    if sliced:
        result = ["return slices.template sum<GEMM>(at.step, at.row, PRODUCT * kTile + at.unit);"]
    elif not sizes.sum_lanes:
        result = [
            "constexpr bool kAll = gemm<GEMM>().replicated;",
            "const int unit = kAll ? PRODUCT * kCtas * kTile + at.hidden_unit() : PRODUCT * kTile + at.unit;",
            "const float* from = results<GEMM>() + unit;",
            *result,
        ]
    of_parts = [
        "template <int GEMM, class Exchange>",
        "__device__ __forceinline__ void run_part(Tag<GEMM>, const Exchange& exchange, int step) const {",
        *run_part,
        "}",
        "template <int GEMM> __device__ float part(int row, int column) const {",
        *part,
        "}",
    ]
    offsets = [
        f"if constexpr (GEMM == {index}) return reinterpret_cast<float*>(shared + {gemm.results});"
        for index, gemm in enumerate(sizes.gemms)
    ]
    return [
        "template <int WORDS> struct Products {",
        *members,
        "char* shared;",
        "char* scratch;",
        "__device__ Products(const Context<Sizes, WORDS>& context, char* shared, char* scratch)",
        ": " + ("slices(shared, context.cta), " if sliced else "") + "shared(shared), scratch(scratch) {}",
        "template <int STAGE>",
        "__device__ __forceinline__ void load(const Context<Sizes, WORDS>& context, bool lay_out) {",
        *load,
        "}",
        "template <int STAGE, class Exchange>",
        f"__device__ __forceinline__ void run(const Exchange& exchange, int step){constant} {{",
        *run,
        "}",
        "template <int GEMM> __device__ float* results() const {",
        *offsets,
        "return nullptr;",
        "}",
        "template <int GEMM, int PRODUCT, class At> __device__ float result(const At& at) const {",
        *result,
        *(["return 0.0f;"] if not sliced else []),
        "}",
        *(of_parts if run_part else []),
        "template <int PARTIALS, int STRIDE> __device__ static float add(const float* from, int row) {",
        "float sum = from[row * STRIDE];",
        "#pragma unroll",
        "for (int i = 1; i < PARTIALS; ++i) sum += from[(i * kPaddedRows + row) * STRIDE];",
        "return sum;",
        "}",
        "};",
    ]
