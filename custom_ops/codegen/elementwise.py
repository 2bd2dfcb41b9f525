"""The elementwise code of a cell in CUDA: one struct, with a function for each stage."""

from __future__ import annotations

import math

from custom_ops.cell import Cell, Constant, Elementwise, Invariant, Node, Product, RowSum, Sequence, State, Vector
from custom_ops.codegen.schedule import Schedule, sequence_leaves

EXPRESSIONS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "divide": "{0} / {1}",
    "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})", "power": "powf({0}, {1})",
    "greater": "{0} > {1} ? 1.0f : 0.0f", "greater_equal": "{0} >= {1} ? 1.0f : 0.0f",
    "equal": "{0} == {1} ? 1.0f : 0.0f",
    "negate": "-{0}", "absolute": "fabsf({0})", "sign": "sign({0})", "square": "{0} * {0}", "sqrt": "sqrtf({0})",
    "reciprocal_sqrt": "rsqrtf({0})", "reciprocal": "1.0f / {0}",
    "exp": "expf({0})", "log": "logf({0})", "log1p": "log1pf({0})", "expm1": "expm1f({0})", "erf": "erff({0})",
    "sin": "sinf({0})", "cos": "cosf({0})",
    "sigmoid": "sigmoid({0})", "tanh": "hyperbolic_tangent({0})", "relu": "maximum({0}, 0.0f)",
    "softplus": "softplus({0})", "elu": "elu({0})",
    "select": "{0} != 0.0f ? {1} : {2}",
}  # fmt: skip


class Pointers:
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


def cell_struct(plan: Schedule) -> str:
    """`struct Cell`, for the templates of kernels/recurrent.cuh."""
    writer = _CellWriter(plan)
    stages = range(plan.stages)
    parts = [
        "struct Cell {",
        f"static constexpr int kStages = {plan.stages};",
        *writer.element(),
        *_by_stage("int", "sums", [writer.sum_count(stage) for stage in stages]),
        *_by_stage("int", "sum_buffer", [writer.sum_buffer(stage) for stage in stages]),
        *_by_stage("bool", "sends", [str(writer.sends(stage)).lower() for stage in stages]),
        *writer.begin(),
        *(line for stage in stages for line in writer.stage(stage)),
        *writer.end(),
        *writer.initial_states(),
        *writer.blocks(),
        "};",
    ]
    return "\n".join(parts) + "\n"


class _CellWriter:
    def __init__(self, plan: Schedule) -> None:
        self.plan, self.cell = plan, plan.cell
        self.pointers = Pointers(plan.cell)
        self.sequences = sequence_leaves(plan.cell, plan.live)
        nodes = list(enumerate(plan.cell.nodes))
        self.constants = [place for place, node in nodes if plan.live[place] and isinstance(node, Invariant | Vector)]

    def element(self) -> list[str]:
        names = [f"state_{index}" for index in range(len(self.cell.states))]
        names += [self.name(place) for place in (*self.constants, *self.sequences)]
        names += [f"carried_{place}" for place in self.plan.carried]
        return ["struct Element {", *(f"float {name};" for name in names), "};"]

    def name(self, place: int) -> str:
        """How an expression reads leaf `place` from the element's registers."""
        return f"leaf_{place}"

    def begin(self) -> list[str]:
        lines = ["template <class At> __device__ static void begin(Element& element, const At& at) {"]
        lines += [
            f"element.state_{index} = at.template initial<{self.pointers.states + index}>();"
            for index in range(len(self.cell.states))
        ]
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
        lines += ["load(element, at, 0);", "}"]
        lines.append("template <class At> __device__ static void load(Element& element, const At& at, int step) {")
        for place in self.sequences:
            node = self.cell.nodes[place]
            assert isinstance(node, Sequence)
            columns = self.cell.sequences[node.tensor]
            arguments = f"{self.pointers.sequences + node.tensor}, {columns}, {node.column}"
            lines.append(f"element.{self.name(place)} = at.template sequence<{arguments}>(step);")
        return [*lines, "}"]

    def end(self) -> list[str]:
        lines = ["template <class At> __device__ static void end(const Element& element, const At& at) {"]
        lines += [
            f"at.template final_state<{self.pointers.finals + index}>(element.state_{index});"
            for index in range(len(self.cell.states))
        ]
        return [*lines, "}"]

    def stage(self, stage: int) -> list[str]:
        """Results first, all of them; then what they give; then stores and sends."""
        head = f"template <class At> __device__ static void stage(Tag<{stage}>, Element& element, const At& at) {{"
        here = [
            (place, node)
            for place, node in enumerate(self.cell.nodes)
            if self.plan.live[place] and self.cell.stages[place] == stage
        ]
        # Products and sums are read before anything is sent: after a send their memory may change.
        first = [item for item in here if isinstance(item[1], Product | RowSum)]
        rest = [item for item in here if isinstance(item[1], Elementwise)]
        lines = [f"const float value_{place} = {self.expression(node, stage, place)};" for place, node in first + rest]
        lines += self.outputs(stage) + self.leave_sums(stage)
        for buffer, operand, place in self.sent(stage):
            lines.append(f"at.template send<{buffer}, {operand}>({self.read(place, stage)});")
        lines += [
            f"element.carried_{place} = value_{place};"
            for place in self.plan.carried
            if self.cell.stages[place] == stage
        ]
        if stage == self.plan.stages - 1:
            new = [self.read(place, stage) for place in self.cell.states]
            lines += [f"const float next_{index} = {value};" for index, value in enumerate(new)]
            lines += [f"element.state_{index} = next_{index};" for index in range(len(new))]
            lines += [
                f"at.template send_state<{buffer}, {operand}>(next_{index});"
                for buffer, operand, index in self.sent_states()
            ]
        return [head, *lines, "}"]

    def expression(self, node: Node, stage: int, place: int) -> str:
        match node:
            case Product():
                gemm, product = self.plan.place_of_product(place)
                return f"at.template product<{gemm}, {product}>()"
            case RowSum():
                buffer, operand = self.plan.place_of_sum(place)
                return f"at.template row_sum<{buffer}, {operand}>()"
            case Elementwise(op=op, arguments=arguments):
                return EXPRESSIONS[op].format(*(self.read(argument, stage) for argument in arguments))
        raise AssertionError(node)

    def read(self, place: int, stage: int) -> str:
        """The value of node `place`, as code of `stage` sees it."""
        match self.cell.nodes[place]:
            case Constant(value=value):
                return _literal(value)
            case State(index=index):
                return f"element.state_{index}"
            case Sequence() | Invariant() | Vector():
                return f"element.{self.name(place)}"
        return f"value_{place}" if self.cell.stages[place] == stage else f"element.carried_{place}"

    def outputs(self, stage: int) -> list[str]:
        lines = []
        for tensor, columns in enumerate(self.cell.outputs):
            scalar = self.cell.scalar[columns[0]]
            for column, place in enumerate(columns):
                if self.cell.stages[place] == stage:
                    arguments = f"{self.pointers.outputs + tensor}, {0 if scalar else len(columns)}, {column}"
                    lines.append(f"at.template output<{arguments}>({self.read(place, stage)});")
        return lines

    def sum_buffer(self, stage: int) -> int:
        """The buffer of the row sums whose parts are left in `stage`."""
        buffers = enumerate(self.plan.buffers)
        return next((index for index, buffer in buffers if buffer.sums and buffer.stage == stage + 1), -1)

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
            if not buffer.sums
            for operand, place in enumerate(buffer.operands)
            if not self.plan.is_state(place) and self.cell.stages[place] == stage
        ]

    def sent_states(self) -> list[tuple[int, int, int]]:
        """(buffer, operand, state) of what products of the next step read."""
        result = []
        for index, buffer in enumerate(self.plan.buffers):
            for operand, place in enumerate(buffer.operands if not buffer.sums else ()):
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
            for operand, place in enumerate(buffer.operands if not buffer.sums else ()):
                node = self.cell.nodes[place]
                if isinstance(node, State):
                    lines.append(f"case {operand}: return {self.pointers.states + node.index};")
            lines += ["default: return 0;", "}", "}"]
        return lines

    def blocks(self) -> list[str]:
        lines = []
        for index, gemm in enumerate(self.plan.gemms):
            operands = len(gemm.terms[0])
            arguments = f"Tag<{index}>, const At& at, int product, int operand"
            lines.append(f"template <class At> __device__ static auto block({arguments}) {{")
            lines.append(f"switch (product * {operands} + operand) {{")
            cases = [(row, term) for row, terms in enumerate(gemm.terms) for term in enumerate(terms)]
            for place, (product, (operand, term)) in enumerate(cases):
                matrix = f"{self.pointers.matrices + term.matrix}, {self.cell.matrices[term.matrix][1]}"
                arguments = f"{matrix}, {term.row}, {term.column}, {str(term.transposed).lower()}"
                label = "default" if place == len(cases) - 1 else f"case {product * operands + operand}"
                lines.append(f"{label}: return at.template block<{arguments}>();")
            lines += ["}", "}"]
        return lines


def _by_stage(kind: str, name: str, values: list[object]) -> list[str]:
    lines = [f"template <int STAGE> __host__ __device__ static constexpr {kind} {name}() {{"]
    lines += [f"if (STAGE == {stage}) return {value};" for stage, value in enumerate(values)]
    return [*lines, f"return {kind}();", "}"]


def _literal(value: float) -> str:
    if math.isnan(value):
        return "__uint_as_float(0x7fc00000u)"
    if math.isinf(value):
        return f"__uint_as_float(0x{'7' if value > 0 else 'f'}f800000u)"
    text = f"{value:.9e}f"
    return f"({text})" if value < 0 else text
