"""The elementwise code of a cell in CUDA: one struct, with a function for each stage."""

from __future__ import annotations

from custom_ops.expr.cuda import emit_cuda, literal
from custom_ops.expr.nodes import Elementwise
from custom_ops.recurrent.cell import Cell, CellConstant, Invariant, Node, Product, RowSum, Sequence, State, Vector
from custom_ops.recurrent.codegen.schedule import CellSchedule

ARGUMENTS = "E& element, const At& at"


class TensorPointers:
    """The places of a direction's tensors among the kernel's parameters: the op's inputs, then its outputs."""

    def __init__(self, cell: Cell) -> None:
        self.sequences = 0
        self.invariants = self.sequences + len(cell.sequences)
        self.vectors = self.invariants + len(cell.invariants)
        self.matrices = self.vectors + len(cell.vectors)
        self.states = self.matrices + len(cell.matrices)
        self.outputs = self.states + len(cell.states)
        self.finals = self.outputs + len(cell.outputs)
        self.count = self.finals + len(cell.states)


def cell_struct(plan: CellSchedule) -> str:
    """`struct Cell`, for the templates of kernels/recurrent.cuh."""
    writer = CellWriter(plan)
    stages = range(plan.stages)
    parts = [
        *writer.blocks(),
        "struct Cell {",
        f"static constexpr int kStages = {plan.stages};",
        *writer.element(),
        *_by_stage("int", "sums", [writer.sum_count(stage) for stage in stages]),
        *_by_stage("int", "sum_buffer", [writer.sum_buffer(stage) for stage in stages]),
        *_by_stage("bool", "sends", [str(writer.sends(stage)).lower() for stage in stages]),
        *writer.begin(),
        *writer.load(),
        *(line for stage in stages for line in writer.stage(stage)),
        *writer.end(),
        *writer.between_launches(),
        *writer.initial_states(),
        *writer.block_functions(),
        "};",
    ]
    return "\n".join(parts) + "\n"


class CellWriter:
    """Writes the functions one by one; replicated_source.py overrides what is different for all units."""

    def __init__(self, plan: CellSchedule) -> None:
        self.plan, self.cell = plan, plan.cell
        self.pointers = TensorPointers(plan.cell)
        live = [(place, node) for place, node in enumerate(plan.cell.nodes) if plan.live[place]]
        self.sequences = [place for place, node in live if isinstance(node, Sequence)]
        self.inputs = sorted({node.tensor for _, node in live if isinstance(node, Sequence)})
        self.constants = [place for place, node in live if isinstance(node, Invariant | Vector)]

    def element(self) -> list[str]:
        read = [f"float {self.name(place)};" for place in self.sequences]
        names = [f"state_{index}" for index in range(len(self.cell.states))]
        names += [self.name(place) for place in self.constants]
        names += [f"carried_{place}" for place in self.plan.carried]
        lines = ["Leaves ahead;  // of the step after the next, where they are read so early"]
        lines += [f"float {name};" for name in names]
        lines += [f"const typename Sizes::Value* input_{tensor};" for tensor in self.inputs]
        lines += [f"typename Sizes::Value* output_{tensor};" for tensor in range(len(self.cell.outputs))]
        return ["struct Leaves {", *read, "};", "template <class Sizes> struct Element : Leaves {", *lines, "};"]

    def name(self, place: int) -> str:
        """How an expression reads leaf `place` from the element's registers."""
        return f"leaf_{place}"

    def begin(self) -> list[str]:
        lines = [f"template <class E, class At> __device__ static void begin({ARGUMENTS}) {{"]
        lines += [
            f"element.state_{index} = at.template initial<{self.pointers.states + index}>();"
            for index in range(len(self.cell.states))
        ]
        lines += self.read_constants()
        for tensor in self.inputs:
            arguments = f"{self.pointers.sequences + tensor}, {self.cell.sequences[tensor]}"
            lines.append(f"element.input_{tensor} = at.template first<const typename At::Value, {arguments}>();")
        for tensor in range(len(self.cell.outputs)):
            arguments = f"{self.pointers.outputs + tensor}, {self.cell.output_columns[tensor]}"
            lines.append(f"element.output_{tensor} = at.template first<typename At::Value, {arguments}>();")
        return [*lines, "load(element, element, at, at.step);", "}"]

    def read_constants(self) -> list[str]:
        lines = []
        for place in self.constants:
            node = self.cell.nodes[place]
            if isinstance(node, Invariant):
                columns = self.cell.invariants[node.tensor]
                pointer = self.pointers.invariants + node.tensor
                call = f"invariant<{pointer}, {columns}, {node.column}>()"
            else:
                assert isinstance(node, Vector)
                call = f"vector<{self.pointers.vectors + node.tensor}, {node.column}>()"
            lines.append(f"element.{self.name(place)} = at.template {call};")
        return lines

    def load(self) -> list[str]:
        """What the next step reads, long before it is needed."""
        head = (
            "template <class E, class At> __device__ static void load(E& element, Leaves& to, const At& at, int step)"
        )
        lines = [head + " {"]
        for place in self.sequences:
            node = self.cell.nodes[place]
            assert isinstance(node, Sequence)
            lines.append(f"to.{self.name(place)} = at.template read<{node.column}>(element.input_{node.tensor}, step);")
        lines += [f"at.template advance<{self.cell.sequences[t]}>(element.input_{t});" for t in self.inputs]
        return [*lines, "}"]

    def end(self) -> list[str]:
        lines = [f"template <class E, class At> __device__ static void end({ARGUMENTS}) {{"]
        lines += [
            f"at.template final_state<{self.pointers.finals + index}>(element.state_{index});"
            for index in range(len(self.cell.states))
        ]
        return [*lines, "}"]

    def kept(self) -> list[str]:
        """What a later stage or step needs and cannot read again."""
        return [f"state_{i}" for i in range(len(self.cell.states))] + [f"carried_{i}" for i in self.plan.carried]

    def between_launches(self) -> list[str]:
        """A number every `stride` floats, so that neighbouring threads have neighbouring numbers."""
        names = list(enumerate(self.kept()))
        leave = [f"to[{place} * stride] = element.{name};" for place, name in names]
        resume = [f"element.{name} = from[{place} * stride];" for place, name in names]
        return [
            "template <class E> __device__ static void leave(const E& element, float* to, long long stride) {",
            *leave,
            "}",
            "template <class E> __device__ static void resume(E& element, const float* from, long long stride) {",
            *resume,
            "}",
        ]

    def stage(self, stage: int) -> list[str]:
        """Results first, all of them; then what follows from them; then sends and stores."""
        head = f"template <class E, class At> __device__ static void stage(Tag<{stage}>, {ARGUMENTS}) {{"
        # Products and sums are read before anything is sent: after a send their memory may change.
        lines = self.values(stage) + self.leave_sums(stage)
        # What others wait for goes first.
        for buffer, operand, place in self.sent(stage):
            lines.append(f"at.template send<{buffer}, {operand}>({self.read(place, stage)});")
        last = stage == self.plan.stages - 1
        new = [self.read(place, stage) for place in self.cell.states] if last else []
        lines += [f"const float next_{index} = {value};" for index, value in enumerate(new)]
        kinds = [buffer.kind for buffer in self.plan.buffers]
        lines += [
            f"at.template {'keep_own' if kinds[buffer] == 'own' else 'send_state'}<{buffer}, {operand}>(next_{index});"
            for buffer, operand, index in (self.sent_states() if last else ())
        ]
        lines += self.outputs(stage) + self.carried(stage)
        lines += [f"element.state_{index} = next_{index};" for index in range(len(new))]
        return [head, *lines, "}"]

    def here(self, stage: int, *kinds: type[Node]) -> list[int]:
        """The nodes of these kinds that are computed, or read, in `stage`."""
        nodes = enumerate(zip(self.cell.nodes, self.cell.stages, self.plan.live, strict=True))
        return [place for place, (node, of, live) in nodes if live and of == stage and isinstance(node, kinds)]

    def values(self, stage: int) -> list[str]:
        """Declarations of all that the stage computes, products and sums first."""
        places = [*self.here(stage, Product, RowSum), *self.here(stage, Elementwise)]
        dtypes = ["float32"] * len(self.cell.nodes)
        return emit_cuda(self.cell.nodes, dtypes, dict.fromkeys(places), lambda place: self.source(place, stage))

    def carried(self, stage: int) -> list[str]:
        return [f"element.carried_{i} = value_{i};" for i in self.plan.carried if self.cell.stages[i] == stage]

    def source(self, place: int, stage: int) -> str:
        """The value of a node that no op of the stage computes: a result of all processors, or what is in registers."""
        match self.cell.nodes[place]:
            case Product() if self.cell.stages[place] == stage:
                gemm, product = self.plan.place_of_product(place)
                parts = self.plan.gemms[gemm].parts
                if parts is not None:
                    return f"at.template sum_of_parts<{parts}, {product}>()"
                return f"at.template product<{gemm}, {product}>()"
            case RowSum() if self.cell.stages[place] == stage:
                buffer, operand = self.plan.place_of_sum(place)
                return f"at.template row_sum<{buffer}, {operand}>()"
        return self.read(place, stage)

    def read(self, place: int, stage: int) -> str:
        """The value of node `place`, as code of `stage` sees it."""
        match self.cell.nodes[place]:
            case CellConstant(value=value):
                return literal(value, "float32")
            case State(index=index):
                return f"element.state_{index}"
            case Sequence() | Invariant() | Vector():
                return f"element.{self.name(place)}"
        return self.result(place, stage)

    def result(self, place: int, stage: int) -> str:
        return f"value_{place}" if self.cell.stages[place] == stage else f"element.carried_{place}"

    def outputs(self, stage: int) -> list[str]:
        lines = []
        for tensor, columns in enumerate(self.cell.outputs):
            for column, place in enumerate(columns):
                if self.cell.stages[place] == stage:
                    arguments = f"{self.cell.output_columns[tensor]}, {column}"
                    lines.append(f"at.template write<{arguments}>(element.output_{tensor}, {self.read(place, stage)});")
        if stage == self.plan.stages - 1:
            counts = enumerate(self.cell.output_columns)
            lines += [f"at.template advance<{count}>(element.output_{tensor});" for tensor, count in counts]
        return lines

    def sum_buffer(self, stage: int) -> int:
        """The buffer of the row sums whose parts are left in `stage`."""
        buffers = enumerate(self.plan.buffers)
        return next((index for index, buffer in buffers if buffer.kind == "sums" and buffer.stage == stage + 1), -1)

    def sum_count(self, stage: int) -> int:
        index = self.sum_buffer(stage)
        return len(self.plan.buffers[index].operands) if index >= 0 else 0

    def leave_sums(self, stage: int) -> list[str]:
        lines = []
        for operand in range(self.sum_count(stage)):
            node = self.cell.nodes[self.plan.buffers[self.sum_buffer(stage)].operands[operand]]
            assert isinstance(node, RowSum)
            lines.append(f"at.template add_to_row<{operand}>({self.read(node.operand, stage)});")
        return lines

    def sent(self, stage: int) -> list[tuple[int, int, int]]:
        """(buffer, operand, node) of what later products of the same step read."""
        return [
            (index, operand, place)
            for index, buffer in enumerate(self.plan.buffers)
            if buffer.kind == "units"
            for operand, place in enumerate(buffer.operands)
            if not self.plan.is_state(place) and self.cell.stages[place] == stage
        ]

    def sent_states(self) -> list[tuple[int, int, int]]:
        """(buffer, operand, state) of what products of the next step read, here or elsewhere."""
        result = []
        for index, buffer in enumerate(self.plan.buffers):
            for operand, place in enumerate(() if buffer.kind in ("sums", "local") else buffer.operands):
                node = self.cell.nodes[place]
                if isinstance(node, State):
                    result.append((index, operand, node.index))
        return result

    def sends(self, stage: int) -> bool:
        last = stage == self.plan.stages - 1
        return bool(self.sent(stage) or self.sum_count(stage) or (last and self.sent_states()))

    def initial_states(self) -> list[str]:
        lines = []
        for index, buffer in enumerate(self.plan.buffers):
            lines.append(f"__device__ static int initial_state(Tag<{index}>, int operand) {{")
            lines.append("switch (operand) {")
            for operand, place in enumerate(buffer.operands if buffer.kind != "sums" else ()):
                node = self.cell.nodes[place]
                if isinstance(node, State):
                    lines.append(f"case {operand}: return {self.pointers.states + node.index};")
            lines += ["default: return 0;", "}", "}"]
        return lines

    def blocks(self) -> list[str]:
        """The places of weights by gemm, product and operand; as tables, since a switch would branch at every load."""
        lines = []
        for index, gemm in enumerate(self.plan.gemms):
            entries = []
            for term in (term for terms in gemm.terms for term in terms):
                columns = self.cell.matrices[term.matrix][1]
                flag = str(term.transposed).lower()
                pointer = self.pointers.matrices + term.matrix
                entries.append(f"{{{pointer}, {columns}, {term.row}, {term.column}, {flag}}}")
            lines.append(f"__constant__ BlockPlace kBlocks{index}[] = {{{', '.join(entries)}}};")
        return lines

    def block_functions(self) -> list[str]:
        lines = []
        for index, gemm in enumerate(self.plan.gemms):
            arguments = f"Tag<{index}>, int product, int operand"
            lines.append(f"__device__ static const BlockPlace& block({arguments}) {{")
            lines += [f"return kBlocks{index}[product * {len(gemm.terms[0])} + operand];", "}"]
        return lines


def _by_stage(kind: str, name: str, values: list[object]) -> list[str]:
    lines = [f"template <int STAGE> __host__ __device__ static constexpr {kind} {name}() {{"]
    lines += [f"if (STAGE == {stage}) return {value};" for stage, value in enumerate(values)]
    return [*lines, f"return {kind}();", "}"]
