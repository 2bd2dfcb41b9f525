"""What the recurrent pass found and what takes its place, as data.

The code that recognises a recurrence (a loop, a `CudnnRNNV3`, a pair of loops) writes a `Match`; the code that
carries it out does not depend on where it came from. A match is complete: every new node is in it, in topological
order, with the name that it will have, and so is every tensor that changes hands. So it can be printed, compared and
evaluated without a graph.

    Match
      nodes: NewNode ... RecurrentNode ... NewNode    what is inserted, each reads the graph or nodes before it
      rewired: old tensor -> new tensor        every reader of the old one will read the new one
      removed: node names                      dead after rewiring

Example, one LSTM loop: nodes are Reshape, MatMul, BiasAdd, Reshape (the inputs' gates of all steps), the
`RecurrentNode`, and nothing behind; `rewired` leads from the `TensorListStack` to output 0 of that node and from
`while:4`, `while:5` to its finals; `removed` holds the `TensorListStack` and the `While`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.gpu_program import RecurrentProgram
from custom_ops.recurrent.spec import Precision
from graph_passes.device_report import many
from graph_passes.errors import GraphError
from graph_passes.graph.ir import AttrValue, Code, DataType, TensorId
from graph_passes.graph.rewrite import NewNode
from graph_passes.passes.recurrent.find.equal_scalars import Key
from graph_passes.refusals import Refusal

RECURRENT_OP = "TfmemRecurrent"
CPU = "/device:CPU:0"


@dataclass(frozen=True)
class Direction:
    """What one direction of a launch reads, each in the order in which the cell counts them.

    Attributes:
        sequences: `[time, batch, columns * units]`, or `[time, batch]` where the cell says 0 columns; `[batch, time...`
            where the launch is `batch_major`.
        invariants: `[batch, columns * units]`.
        vectors: `[columns * units]`.
        matrices: `[rows * units, columns * units]`.
        states: `[batch, units]`, before the first step; `[0, units]` stands for zeros.
        reverse: whether time runs from the last index to the first. Indices stay: output t belongs to input t.
    """

    sequences: tuple[TensorId, ...]
    invariants: tuple[TensorId, ...]
    vectors: tuple[TensorId, ...]
    matrices: tuple[TensorId, ...]
    states: tuple[TensorId, ...]
    reverse: bool = False

    @property
    def groups(self) -> tuple[tuple[TensorId, ...], ...]:
        """Everything that is read, in the order of the op's inputs."""
        return self.sequences, self.invariants, self.vectors, self.matrices, self.states


@dataclass(frozen=True)
class RecurrentNode:
    """One `TfmemRecurrent` node.

    Attributes:
        name: unique in the graph and among all matches of a plan.
        cell: one step.
        units: the hidden size.
        dtype: dtype of every tensor that it reads and makes.
        directions: one, or two that run side by side with the same cell.
        device: as TensorFlow writes it.
        control: names of nodes that run before it.
        base: where `cell` is the forward cell of a gradient, with more outputs for the backward one: the cell that was
            differentiated.
        batch: how many rows all tensors have, where the graph says it.
        batch_major: whether sequences and outputs begin with batch and time, not with time and batch.
        counts: whether it runs some of the steps of a loop that ends when its states say so, and another launch those
            behind them, or all of them once more.
    """

    name: str
    cell: Cell
    units: int
    dtype: str
    directions: tuple[Direction, ...]
    device: str = ""
    control: tuple[str, ...] = ()
    base: Cell | None = None
    batch: int | None = None
    batch_major: bool = False
    counts: bool = False

    def __post_init__(self) -> None:
        """Raises GraphError if a direction does not give the cell what it reads."""
        cell = self.cell
        wanted = tuple(map(len, (cell.sequences, cell.invariants, cell.vectors, cell.matrices, cell.states)))
        for direction in self.directions:
            found = tuple(map(len, direction.groups))
            if found != wanted:
                raise GraphError(
                    f"'{self.name}': a direction has {found} sequences, invariants, vectors, matrices and states; "
                    f"its cell reads {wanted}"
                )

    @property
    def inputs(self) -> tuple[TensorId, ...]:
        """What the op reads: of each kind, first what the first direction reads."""
        kinds = zip(*(direction.groups for direction in self.directions), strict=True)
        return tuple(tensor for kind in kinds for group in kind for tensor in group)

    def output(self, index: int, direction: int = 0) -> TensorId:
        """Output tensor `index` of the cell, of every step, in the form of a sequence."""
        return TensorId(self.name, direction * len(self.cell.outputs) + index)

    def final(self, index: int, direction: int = 0) -> TensorId:
        """State `index` after the last step, `[batch, units]`."""
        first = len(self.directions) * len(self.cell.outputs)
        return TensorId(self.name, first + direction * len(self.cell.states) + index)

    def results_in(self, other: RecurrentNode, first: int = 0) -> dict[TensorId, TensorId]:
        """Outputs and final states of this launch -> those of `other`, whose directions from `first` on do the same."""
        moved = {}
        for direction in range(len(self.directions)):
            for index in range(len(self.cell.outputs)):
                moved[self.output(index, direction)] = other.output(index, first + direction)
            for index in range(len(self.cell.states)):
                moved[self.final(index, direction)] = other.final(index, first + direction)
        return moved

    def node(self, precision: Precision = "highest", programs: tuple[RecurrentProgram, ...] = ()) -> NewNode:
        """The node, as the op library registers it.

        Args:
            precision: how a GPU may store weights and what processors exchange; see `TfmemRecurrent`.
            programs: GPU programs, best first for each batch size; without any the op runs on the CPU, wherever the
                graph does.
        """
        cell, count = self.cell, len(self.directions)
        attrs: dict[str, AttrValue] = {
            "T": DataType(self.dtype),
            "cell": cell.to_text(),
            "units": self.units,
            "directions": count,
            "reverse": tuple(direction.reverse for direction in self.directions),
            "batch_major": self.batch_major,
            "precision": precision,
            "programs": tuple(program.to_text() for program in programs),
            "images": tuple(Code(program.image.code) for program in programs),
            **({"base_cell": self.base.to_text()} if self.base is not None else {}),
            "Ns": count * len(cell.sequences),
            "Ni": count * len(cell.invariants),
            "Nv": count * len(cell.vectors),
            "Nm": count * len(cell.matrices),
            "Nh": count * len(cell.states),
            "No": count * len(cell.outputs),
        }
        outputs = count * (len(cell.outputs) + len(cell.states))
        stays = programs or "CPU:" in self.device.upper()  # a replica's may be another CPU than the first
        device = self.device if stays else CPU
        return NewNode(self.name, RECURRENT_OP, self.inputs, attrs, device, self.control, outputs)


class Results(Protocol):
    """What the steps of a recurrence give: one launch, or several, one behind the other."""

    @property
    def cell(self) -> Cell:
        """One step."""

    def output(self, index: int) -> TensorId:
        """Output `index` of the cell, of every step, in the form of a sequence."""

    def final(self, index: int) -> TensorId:
        """State `index` after the last step, `[batch, units]`."""


@dataclass(frozen=True)
class Match:
    """One recurrence and its replacement.

    Attributes:
        name: the node that carried it (a `While`, a `CudnnRNNV3`, ...), as users see it in the report.
        carrier: the kind of that node, for the report: "While", "CudnnRNNV3", "frame", ...
        nodes: what is inserted, in topological order; one launch, or a forward and a backward one.
        rewired: (old tensor, new tensor), each old one once; fetches follow too. An old tensor's readers that are
            themselves removed do not matter.
        removed: nodes that nothing needs once `rewired` is done. Nodes that wait for one of them will wait for the
            launches instead. None of them is fetched by name, but for those in `renamed`.
        renamed: names of removed nodes with one output that are fetched by name, and the tensor that takes the name.
    """

    name: str
    carrier: str
    nodes: tuple[NewNode | RecurrentNode, ...]
    rewired: tuple[tuple[TensorId, TensorId], ...]
    removed: tuple[str, ...]
    renamed: tuple[tuple[str, TensorId], ...] = ()

    @property
    def launches(self) -> tuple[RecurrentNode, ...]:
        """The recurrent ops among `nodes`, but for those in `counting`."""
        return tuple(node for node in self.nodes if isinstance(node, RecurrentNode) and not node.counts)

    @property
    def counting(self) -> tuple[RecurrentNode, ...]:
        """The recurrent ops with more steps of the same loop behind them."""
        return tuple(node for node in self.nodes if isinstance(node, RecurrentNode) and node.counts)

    def summary(self) -> str:
        """One line for the report."""
        launch = self.launches[0]
        cell = launch.cell
        parts = [
            f"{launch.units} units",
            f"{len(cell.states)} states",
            f"{cell.blocks} weight blocks",
            f"{many(max(cell.stages, default=0) + 1, 'synchronisation')} a step",
            launch.dtype,
        ]
        if self.counting:
            parts.append(f"ends when its states say so, looked for after each of {many(len(self.counting), 'op')}")
        if len(launch.directions) > 1:
            parts.append("both directions in one launch")
        return f"{self.name} ({self.carrier}): {', '.join(parts)}"


@dataclass(frozen=True)
class Joinable:
    """A match, and what decides whether it may share a launch with another: how many steps, how many rows.

    `batch` has symbolic batch sizes that are equal, one for each state: two matches may be joined if theirs intersect.
    """

    match: Match
    time: Key
    batch: frozenset[Key]


@dataclass(frozen=True)
class Unmatched:
    """A loop that stays as it is.

    Attributes:
        name: its node.
        carrier: the kind of that node.
        reason: what was found that a cell cannot express.
        traceback: of a fault inside tfmem; empty where it stays for a reason.
        line: of the user's program, where what is in the way was written; empty if it is not known.
    """

    name: str
    carrier: str
    reason: Refusal
    traceback: str = ""
    line: str = ""

    @property
    def why(self) -> str:
        """The reason, and the line of the program that it is about."""
        return f"{self.reason} ({self.line})" if self.line else str(self.reason)

    @property
    def about(self) -> str:
        """The node that is in the way; the loop, if the reason names none."""
        arguments = dict(self.reason.arguments)
        for key in ("first", "because"):
            if isinstance(nested := arguments.get(key), Refusal):
                arguments = dict(nested.arguments)
                break
        named = [arguments[key] for key in ("node", "reader", "tensor") if key in arguments]
        found = named[0] if named else self.name
        return found.node if isinstance(found, TensorId) else str(found)


@dataclass(frozen=True)
class Kernels:
    """What a launch runs on a GPU.

    Attributes:
        programs: as the op takes them, ascending by the batch that each was chosen for.
        steps: length of the sequences that they were timed with.
        timed: for each program the batch, and the milliseconds that such a sequence took.
    """

    programs: tuple[RecurrentProgram, ...]
    steps: int = 0
    timed: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        if not self.timed:
            found = dict.fromkeys(f"{program.image.kind} {program.image.arch / 10}" for program in self.programs)
            return f"untimed kernels: {', '.join(found)}"
        times = ", ".join(f"{milliseconds:.3f} ms at batch {batch}" for batch, milliseconds in self.timed)
        return f"{self.steps} steps in {times}"


@dataclass(frozen=True)
class RecurrentPlan:
    """What the pass will do to a graph: pure data; see `apply.recurrent_rewrites`.

    Attributes:
        matches: what is replaced.
        unmatched: what is not.
        precision: what products with a state may round to, on a GPU.
        kernels: what runs there, by the name of the launch; empty on a CPU.
        notes: more that the report says.
    """

    matches: tuple[Match, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()
    precision: Precision = "highest"
    kernels: Mapping[str, Kernels] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def summary(self, match: Match) -> str:
        """One line for the report."""
        found = [self.kernels[launch.name] for launch in match.launches if launch.name in self.kernels]
        if not found:
            return match.summary()
        timed = "; its gradient in ".join(str(kernels) for kernels in found)
        return f"{match.summary()}; precision {self.precision}; {timed}"

    def __str__(self) -> str:
        lines = [f"replace {self.summary(match)}" for match in self.matches]
        lines += [f"keep {loop.name} ({loop.carrier}): {loop.why}" for loop in self.unmatched]
        return "\n".join(lines) or "no recurrence found"
