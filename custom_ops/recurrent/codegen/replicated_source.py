"""The elementwise code of what every CTA computes for all units (replicated_schedule.py), in CUDA: one struct."""

from __future__ import annotations

from custom_ops.recurrent.cell import Sequence, State
from custom_ops.recurrent.codegen.cell_functions import ARGUMENTS, CellWriter
from custom_ops.recurrent.codegen.schedule import CellSchedule


def replica_struct(plan: CellSchedule) -> str:
    """`struct Replica`, for the template of kernels/replicas.cuh; `plan` is the replica of a schedule."""
    writer = _ReplicaWriter(plan)
    stages = range(plan.stages)
    parts = [
        "struct Replica {",
        *writer.element(),
        *writer.waits(),
        *writer.begin(),
        *writer.load(),
        *(line for stage in stages for line in writer.stage(stage)),
        "};",
    ]
    return "\n".join(parts) + "\n"


class _ReplicaWriter(CellWriter):
    """A cell's code whose states are operands from other CTAs, and whose results stay in the CTA."""

    def element(self) -> list[str]:
        names = [self.name(place) for place in (*self.constants, *self.sequences)]
        names += [f"carried_{place}" for place in self.plan.carried]
        return ["template <class Sizes> struct Element {", *(f"float {name};" for name in names), "};"]

    def waits(self) -> list[str]:
        """Whether products of a stage read what replicas of earlier stages made."""
        stages = sorted({buffer.stage for buffer in self.plan.buffers if buffer.kind == "local"})
        found = " || ".join(f"STAGE == {stage}" for stage in stages)
        return [f"template <int STAGE> __host__ __device__ static constexpr bool waits() {{ return {found}; }}"]

    def begin(self) -> list[str]:
        lines = [f"template <class E, class At> __device__ static void begin({ARGUMENTS}) {{"]
        return [*lines, *self.read_constants(), "load(element, at, 0);", "}"]

    def load(self) -> list[str]:
        """No pointers that advance: all units of a row are too many for registers."""
        lines = [f"template <class E, class At> __device__ static void load({ARGUMENTS}, int step) {{"]
        for place in self.sequences:
            node = self.cell.nodes[place]
            assert isinstance(node, Sequence)
            pointer, columns = self.pointers.sequences + node.tensor, self.cell.sequences[node.tensor]
            lines.append(
                f"element.{self.name(place)} = at.template sequence<{pointer}, {columns}, {node.column}>(step);"
            )
        return [*lines, "}"]

    def stage(self, stage: int) -> list[str]:
        states = [
            f"const float value_{place} = at.template operand<{buffer}, {operand}>();"
            for place in self.here(stage, State)
            for buffer, operand in (self.place_of_state(place),)
        ]
        kept = [
            f"at.template keep<{index}, {operand}>({self.read(place, stage)});"
            for index, buffer in enumerate(self.plan.buffers)
            if buffer.kind == "local"
            for operand, place in enumerate(buffer.operands)
            if self.cell.stages[place] == stage
        ]
        head = f"template <class E, class At> __device__ static void stage(Tag<{stage}>, {ARGUMENTS}) {{"
        return [head, *states, *self.values(stage), *kept, *self.carried(stage), "}"]

    def read(self, place: int, stage: int) -> str:
        if isinstance(self.cell.nodes[place], State):
            return self.result(place, stage)
        return super().read(place, stage)

    def place_of_state(self, node: int) -> tuple[int, int]:
        """The buffer of the first stage, and its operand, with the state of a node; it was exchanged."""
        for number, buffer in enumerate(self.plan.buffers):
            for operand, place in enumerate(buffer.operands if buffer.stage == 0 and buffer.exchanged else ()):
                if self.cell.nodes[place] == self.cell.nodes[node]:
                    return number, operand
        raise KeyError(node)
