"""Why a pass leaves something unchanged: typed values, made into words when they are printed.

A `Reason` is one kind of refusal with its sentence; a `Refusal` is a reason with what it is about. Nothing decides by
the sentence. `python -m graph_passes.refusals --document docs/refusals.md` writes the table of all reasons.

    Reason.STEP_FETCHED(node="lstm/step_3")      a Refusal, "'lstm/step_3', of one step, is fetched by name"
    Reason.SIDE_EFFECTS.of(node)                  the same, of a node: its name and op are `node` and `op`
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from graph_passes.graph.ir import Node, TensorId

_AGAIN = "its steps are written one after the other"

# Arguments that are names of nodes.
_NODES = frozenset({"node", "reader", "other"})
MARKS = "<!-- reasons -->", "<!-- end of reasons -->"


class Reason(Enum):
    """One kind of refusal: the area that refuses, and the sentence, with its arguments in braces."""

    # Any pass
    FAULT = "any pass", "a fault inside tfmem, please report it: {error}"
    NO_KERNEL = "any pass", "no kernel for this device: {detail}"

    # Recurrent: which loops and steps are recurrences
    LOOP_CONDITION = "recurrent", "the loop goes on while '{node}' ({op}), which is not a count of steps below a bound"
    LOOP_WITHOUT_BOUND = "recurrent", "the loop has no bound"
    LOOP_BOUND = "recurrent", "the loop's bound '{node}' ({op}) changes while it runs"
    LOOP_IN_CALL = (
        "recurrent",
        "'{node}' ({op}) is in a function that it calls; the call could not be brought to the top level",
    )
    LOOP_IN_BRANCH = (
        "recurrent",
        "'{node}' ({op}) is in a function that it calls, and whether it runs is decided by data",
    )
    BEING_TRACED = (
        "recurrent",
        "the function is still being traced, so that the old loop would run too; optimise the function instead",
    )
    SECOND_GRADIENT = "recurrent", "the gradient of its gradient is taken too"
    UNROLLED = (
        "recurrent",
        f"{_AGAIN}; a loop is made of such steps only where each reads its item of one tf.unstack, in order",
    )
    UNROLLED_IN_PLACE = (
        "recurrent",
        f"{_AGAIN}: such steps are replaced in a tf.function, a GraphDef or a SavedModel, not where a graph is edited",
    )
    UNROLLED_TRAINED = (
        "recurrent",
        f"{_AGAIN}, with their gradient, and no loop could be made of both; write a loop (unroll=False)",
    )
    UNROLLED_IDLE = (
        "recurrent",
        f"{_AGAIN}, and the graph has a gradient of them, though nothing needs it",
    )
    UNROLLED_BECAUSE = "recurrent", f"{_AGAIN}, and {{because}}"
    UNROLLED_TRAINED_BECAUSE = (
        "recurrent",
        f"{_AGAIN}, with their gradient, and {{because}}",
    )
    UNROLLED_CONVOLUTION = (
        "recurrent",
        f"{_AGAIN}, and '{{node}}' ({{op}}) takes states that are not matrices [batch, units]",
    )
    STEP_FETCHED = "recurrent", "'{node}', of one step, is fetched by name"
    STEPS_FETCHED = "recurrent", "'{node}', the outputs of all steps, is fetched by name"
    STEP_READ = "recurrent", "'{node}' ({op}) reads '{tensor}' of single steps"
    STEP_ZEROS = "recurrent", "'{node}' (ZerosLike) has the shape of a tensor that only a step has"
    STEP_GRADIENT = "recurrent", "what reads single steps is not known to be their gradient"
    STEP_NEEDED = "recurrent", "'{node}' ({op}) needs what single steps make"

    # Recurrent: loops as cells
    LOOP_FETCHED = "recurrent", "'{node}' itself is fetched by name"
    SHAPE_CHECK = "recurrent", "'{node}' (EnsureShape) refuses shapes that are not known before the step runs"
    NO_STATE = "recurrent", "no state is carried from step to step"
    STATE_DTYPE = (
        "recurrent",
        "the loop variable '{node}' is {dtype}: neither a step counter nor a floating-point state",
    )
    STATE_SHAPE = "recurrent", "the state '{node}' has shape {shape}; expected [batch, units]"
    STATE_WIDTHS = "recurrent", "states of different widths or types: {sizes}"
    STATE_UNITS = "recurrent", "the state '{node}' has {units} units"
    SIDE_EFFECTS = "recurrent", "'{node}' ({op}) has side effects, or is random, in every step"
    LIST_CHANGED = (
        "recurrent",
        "the list '{other}' is changed by '{node}' ({op}), which is not a write of one item a step",
    )
    LIST_INDEX = "recurrent", "'{node}' writes at an index that is neither the step's number nor 0"
    LIST_SIZE = "recurrent", "the list '{node}' ({op}) is not known to have an item for each step"
    LIST_READ_INDEX = "recurrent", "'{node}' ({op}) reads a list at an index that is not the step's number"
    LIST_SOURCE = "recurrent", "'{node}' ({op}) reads a list that was not made of one whole tensor"
    SINGLE_OUTPUT = "recurrent", "'{node}' ({op}) reads single outputs of the loop"
    STATE_COLUMNS = (
        "recurrent",
        "'{node}' ({op}) makes a state of {columns} columns, or a per-row scalar; expected one column",
    )
    OUTPUT_SHAPE = "recurrent", "'{node}' ({op}), an output, has shape {shape}, not columns of {units}"
    OUTPUT_OF_ROWS = "recurrent", "only the last step of a per-row output is read"

    # Recurrent: ops in cells
    CELL_OP = "recurrent", "'{node}' is a {op}, which no op of a cell computes"
    CELL_SHAPE = "recurrent", "'{node}' ({op}) has shape {shape}; expected [batch, a multiple of {units}]"
    CELL_COLUMNS = "recurrent", "'{node}' ({op}): {one} and {two} columns of {units} do not match"
    CELL_MIXED = "recurrent", "'{node}' ({op}) mixes a per-row scalar with a per-unit vector: '{tensor}'"
    CELL_PRODUCT = "recurrent", "'{node}' ({op}) is not a product of a state with a fixed matrix"
    CELL_MATRIX = "recurrent", "'{node}' ({op}) multiplies with a matrix that changes, of shape {shape}"
    CELL_PRODUCT_SIZE = (
        "recurrent",
        "'{node}' ({op}) multiplies {count} x {units} units with a matrix {shape}; expected multiples of {units} units",
    )
    CELL_PART = "recurrent", "'{node}' ({op}) takes units {start} to {end}, not whole columns of {units}"
    CELL_JOIN = "recurrent", "'{node}' ({op}) does not join columns"
    CELL_JOIN_WIDTH = "recurrent", "'{node}' ({op}) joins '{tensor}', whose width is unknown"
    CELL_SUM_AXIS = "recurrent", "'{node}' ({op}) sums over the batch, or over no fixed axis"
    CELL_SUM_ROWS = "recurrent", "'{node}' ({op}) reduces a per-row scalar"
    CELL_CAST = "recurrent", "'{node}' ({op}) turns {before} into {after}"
    CELL_RESHAPE = "recurrent", "'{node}' ({op}) reshapes {before} to {after}"
    CELL_REFUSED = "recurrent", "it cannot be one cell: {detail}"

    # Recurrent: what is computed before the loop
    RANKS = "recurrent", "'{node}' ({op}) mixes tensors of different rank"
    WIDTH_UNKNOWN = "recurrent", "{what} of the loop has a width that is not known before it runs: {shape}"
    NOT_A_NUMBER = "recurrent", "'{tensor}' is {dtype}, not a number"
    MATRIX_DTYPE = "recurrent", "the matrix '{tensor}' is {dtype}{shape}, expected {expected}"
    WIDTH = "recurrent", "'{tensor}' has shape {shape}; expected a multiple of {units} units"
    ROW_SHAPE = "recurrent", "'{tensor}' has shape {shape} in one step; expected [batch, units]"
    INVARIANT_SHAPE = "recurrent", "'{tensor}' has shape {shape}; expected [batch, units]"
    RANK_UNKNOWN = "recurrent", "the rank of '{node}' ({op}) is unknown"
    SHAPE_OF_CHANGING = "recurrent", "'{node}' ({op}) asks for the shape of a tensor that changes"
    OTHER_ITEMS = "recurrent", "'{node}' ({op}): a step reads '{tensor}' at other places than its number"
    ITEMS_BOTH_WAYS = (
        "recurrent",
        "'{node}' ({op}): a step reads '{tensor}' at the step's number, and other sequences from the end",
    )
    ROWS_UNALIKE = "recurrent", "'{node}' ({op}) does not treat the rows of the batch alike"
    ROWS_LOST = "recurrent", "'{node}' ({op}) does not keep the rows of the batch"
    PART_OF = "recurrent", "'{node}' ({op}) takes a part of {shape}"
    PART_RANGE = "recurrent", "'{node}' ({op}) does not take a fixed range of columns"
    PART_SINGLE = "recurrent", "'{node}' ({op}) takes single columns, or skips some"

    # Recurrent: gradients
    GRADIENT_UNCLEAR = (
        "recurrent",
        "there is {count} to tell which gradient in '{node}' belongs to which variable",
    )
    OWN_GRADIENT = "recurrent", "'{node}' ({op}) has a custom gradient, which the replacement would not have"
    CHECK_EFFECTS = "recurrent", "its gradient cannot be checked: '{node}' ({op}) has effects"
    CHECK_FINITE = "recurrent", "its gradient cannot be checked: it is not finite at random numbers"
    CHECK_DIFFERS = (
        "recurrent",
        "its gradient is not that of its forward step (a custom gradient?): that of {what} differs",
    )
    CHECK_FAILED = "recurrent", "its gradient cannot be checked: {detail}"
    GRADIENT_LOST = "recurrent", "'{reader}' reads '{tensor}', which has no replacement"
    GRADIENT_FETCHED = "recurrent", "'{tensor}', which its gradient makes, is fetched by name"
    GRADIENT_WITHOUT_RESULT = "recurrent", "'{tensor}' has a gradient, but no replacement"
    GRADIENT_OF_INVARIANT = "recurrent", "'{tensor}' is the gradient of a variable that the loop does not change"
    GRADIENT_OF_LIST = "recurrent", "the gradient of a list comes from '{node}' ({op}), not from a tensor"
    GRADIENT_UNSTACKED = "recurrent", "'{node}' is the gradient of a list that no op stacked"
    GRADIENT_OF_MADE_LIST = "recurrent", "'{tensor}' is the gradient of a list that '{node}' ({op}) made"
    GRADIENT_UNREAD = "recurrent", "the gradient of '{tensor}' is wanted, which the recurrence does not read as it is"
    GRADIENT_TWICE = (
        "recurrent",
        "'{tensor}' enters the recurrence twice, and the gradient of one entry is wanted",
    )

    # Recurrent: cuDNN's ops
    CUDNN_FETCHED = "recurrent", "it is fetched by name"
    CUDNN_OUTPUT = "recurrent", "'{reader}' reads its output {index}, which only cuDNN makes"
    CUDNN_MODE = "recurrent", "its rnn_mode is '{mode}', not one of {modes}"
    CUDNN_INPUT = "recurrent", "its input_mode is '{mode}', not linear_input"
    CUDNN_DIRECTION = "recurrent", "its direction is '{direction}'; only a layer's single directions are read"
    CUDNN_DROPOUT = "recurrent", "it has dropout between layers"
    CUDNN_PROJECTION = "recurrent", "it projects its state (num_proj)"
    CUDNN_INPUT_WIDTH = "recurrent", "the width of its input is not known before it runs; give a static shape"
    CUDNN_STATE_WIDTH = "recurrent", "the width of its state is not known before it runs"
    CUDNN_LAYERS = "recurrent", "it holds {layers} layers; only one layer is read"

    # Fusion: which ops can be in a region
    ARGUMENT = "fusion", "an argument"
    NO_RULE = "fusion", "no rule for {op}"
    RANK = "fusion", "'{tensor}' of unknown rank"
    DTYPE = "fusion", "'{tensor}' of dtype {dtype}"
    EMPTY = "fusion", "'{tensor}' without elements"
    VARIABLE_RANK = "fusion", "a variable of unknown rank"
    VARIABLE_DTYPE = "fusion", "a variable of dtype {dtype}"
    VARIABLE_EMPTY = "fusion", "a variable without elements"
    VIEW_SIZES = "fusion", "{op} to a shape of which {count} sizes are unknown"
    RANDOM = "fusion", "a stateful random op"
    RANDOM_POOL = "fusion", "{op} gives other shapes than its op says"
    UPDATE_WITHOUT_RULE = "fusion", "an update without a rule: {because}"
    STATEFUL = "fusion", "a stateful op: {op}"
    SIZED_BY_DATA = "fusion", "{because}, and sizes of what {op} makes may depend on numbers"
    NOT_ALONE = "fusion", "callers ask for it by its name, which is not that of one tensor"
    RUN_ALONE = "fusion", "a caller may run it without the others"
    NO_SUCH_PATTERN = "fusion", "regions on this device hold no {pattern}"
    FED = "fusion", "its output is fed"
    BEHIND_SWITCH = "fusion", "it lies behind a Switch, so that it may not run"
    HELD_CONSTANT = "fusion", "a constant, which the kernels that read it hold themselves"
    COLLECTIVES = "fusion", "collectives of its graph meet in no known order: {detail}"
    OTHER_REPLICA = "fusion", "it updates variables, and another replica would run other kernels for its own"
    NO_GAIN = "fusion", "one op in place of {ops} would gain nothing"
    NO_TIME = "fusion", "it takes no time, and no neighbour of it is in a region"
    VARIABLE_ASSIGNED = "fusion", "it takes the variable '{tensor}', which other ops of its region assign"

    # Fusion: what a device cannot do
    ONEDNN_ONLY = "fusion", "TensorFlow runs {op} of {dtype} and {fused} by oneDNN alone"
    ASYNCHRONOUS = "fusion", "TensorFlow's kernel of {op} is asynchronous"
    RAISES = "fusion", "TensorFlow's kernel refuses {what}"
    JOINS = "fusion", "TensorFlow's kernel joins by copies"
    HOST_RESULT = "fusion", "'{tensor}' of dtype {dtype}, which on a GPU lies in the host's memory, and is a result"
    HOST_READ = "fusion", "'{tensor}' of dtype {dtype}, which on a GPU lies in the host's memory for '{reader}'"
    HOST_VARIABLE = "fusion", "a variable of dtype {dtype}, which lies in the host's memory on a GPU"
    NO_PRODUCT = "fusion", "regions on a GPU do not call {op}"
    NO_PRODUCT_OF = "fusion", "regions on a GPU do not multiply {dtypes}"
    NO_FUSED_PRODUCT = "fusion", "regions on a GPU do not call {op} of {fused}"

    # Fusion: ops in kernels
    OP_DTYPE = "fusion", "{op} of dtype {dtype}"
    DIVISION = "fusion", "{op} of {dtype} by a divisor that is not constant"
    TRUNCATING_CAST = "fusion", "a cast that truncates"
    COMPOSITION = "fusion", "a composition with {op} of dtype {dtype}"
    CHANNELS_FIRST = "fusion", "a batch norm whose channels are not last"
    BATCH_NORM_SIZE = "fusion", "a batch norm of unknown size"
    CONSTANTS = "fusion", "a constant of more than one value"
    GATHER_BATCH = "fusion", "a gather with batch dimensions"
    GATHER_AXIS = "fusion", "the axis of a gather is not constant"
    GATHER_INDICES = "fusion", "how many indices a gather takes is not known"
    GATHER_RANGE = "fusion", "gathers from a reshape of {count} elements, whose positions int32 does not hold"
    GATHER_AGAIN = "fusion", "'{tensor}': indexed by a tensor (gather), which a stateless random number is not"
    SLICE_BOUNDS = "fusion", "a slice whose bounds are not constant"
    SLICE_GRADIENT = "fusion", "the gradient of a slice whose bounds are not constant"
    UNPACK_COUNT = "fusion", "the number of parts that it unpacks is unknown statically"
    CHECKED_SHAPE = "fusion", "its shape is not known before the step runs"
    SQUEEZED = "fusion", "it drops a dimension that may not be 1"
    RANGE = "fusion", "a range of non-integers, which TensorFlow computes by adding up"
    NOT_CONSTANT = "fusion", "input {place} of {op} is not constant"
    REDUCED_AXES = "fusion", "the dimensions to reduce are not constant"
    REDUCED_AXIS = "fusion", "the dimension to reduce is not constant"
    FUSED_OPS = "fusion", "{op} of {fused}"
    SEGMENTS_UNKNOWN = "fusion", "how many numbers a sum of segments looks at is not known"
    SEGMENTS = "fusion", "a sum of segments that looks at {count} numbers"
    SEGMENTS_BOOL = "fusion", "a sum of segments of bool"
    CLASSES = "fusion", "an unknown number of classes"
    RANDOM_PLACE = "fusion", "the position of a random number in '{tensor}' depends on unknown sizes"
    RANDOM_STATE = "fusion", "'{tensor}' is not a Philox state: expected {dtype} of shape {shape}"
    RANDOM_ALGORITHM = "fusion", "the algorithm of a stateless random op is not known to be Philox"
    VARIABLE_SHAPE = "fusion", "a variable of unknown shape"
    VARIABLE_TYPE = "fusion", "'{tensor}' ({dtype} {shape}) does not have the variable's type"

    # Fusion: ops together in one kernel
    BROADCAST = "fusion", "broadcasting of '{tensor}' is unknown statically"
    RESHAPED = "fusion", "'{node}': where its elements lie in what it reshapes is not affine in the axes"
    REPEATED = "fusion", "'{node}': which elements it repeats is not affine in the axes"
    PICKED = "fusion", "'{node}': where its elements come from depends on a size that is not known"
    SEGMENTS_AGAIN = "fusion", "'{tensor}' would be recomputed for each segment"
    RESERVE_SPACE = "fusion", "'{tensor}', a reserve-space output: not computed"
    PROGRAM = "fusion", "{members}...: {detail}"
    NUMBERS = "fusion", "numbers from {low} to {high}, which {dtype} does not hold"
    NODES = "fusion", "more than {count} nodes: too many values are recomputed at other indices"
    VARIABLE_UNKNOWN = "fusion", "'{node}': a variable of unknown shape"
    TENSOR_UNKNOWN = "fusion", "'{tensor}' of unknown shape"
    TENSOR_RANK = "fusion", "a tensor of unknown rank"
    PRODUCT_TILES = "fusion", "one kernel cannot compute it in tiles: {detail}"

    # Products
    PRODUCT_KERNELS = "products", "no kernels for this device: {detail}"

    # Merge
    MERGE_UNTIMED = "merge", "products may not be timed here"
    MERGE_NO_BOUND = "merge", "the device has no bound from which on a product is large"
    MERGE_PARTS = "merge", "a caller may run a part of the graph without the rest"
    MERGE_UNMEASURED = "merge", "'{node}' and {count} more: their products could not be timed"
    MERGE_NO_GAIN = "merge", "'{node}' and {count} more: as one product they would save nothing"

    # Offload: why a tensor stays in device memory
    NO_SIZE = "offload", "dtype {dtype} has no fixed element size"
    SMALL = "offload", "smaller than 64 KiB"
    HOST_INT32 = "offload", "TensorFlow keeps int32 tensors in host memory"
    RETURNED = "offload", "the step returns it"
    LIST_SHARES = "offload", "a list shares it"
    LIST_FILLED = "offload", "a loop fills it"
    LIST_UNKNOWN = "offload", "what a loop puts in is not known before it runs"
    COLLECTIVE = "offload", "{op} talks to other devices"
    OTHER_DEVICE = "offload", "another device reads it"
    SEVERAL_SHAPES = "offload", "it is read under several shapes"
    UNKNOWN_SIZE = "offload", "its size is not known before it runs"
    PAIRED = "offload", "oneDNN's gradient reads it straight from the op that made it"

    def __call__(self, **arguments: object) -> Refusal:
        """This reason, about these arguments."""
        return Refusal(self, tuple(arguments.items()))

    def of(self, node: Node, **arguments: object) -> Refusal:
        """This reason, about a node."""
        return self(node=node.name, op=node.op, **arguments)

    @property
    def area(self) -> str:
        """What refuses."""
        return self.value[0]

    @property
    def sentence(self) -> str:
        """The words, with arguments in braces."""
        return self.value[1]


@dataclass(frozen=True)
class Refusal:
    """Why something stays unchanged.

    Attributes:
        reason: the kind.
        arguments: (name, value) of what it is about.
    """

    reason: Reason
    arguments: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return self.reason.sentence.format(**dict(self.arguments))

    def renamed(self, names: Mapping[str, str]) -> Refusal:
        """This refusal about a graph of the same ops, whose nodes have other names."""
        return Refusal(self.reason, tuple((key, _renamed(key, value, names)) for key, value in self.arguments))


def _renamed(key: str, value: object, names: Mapping[str, str]) -> object:
    if isinstance(value, Refusal):
        return value.renamed(names)
    if isinstance(value, TensorId):
        return TensorId(names.get(value.node, value.node), value.index)
    return names.get(value, value) if key in _NODES and isinstance(value, str) else value


def fault(error: Exception) -> Refusal:
    """A failure of tfmem's own."""
    return Reason.FAULT(error=f"{type(error).__name__}: {error}")


def table() -> str:
    """All reasons, as rows of a page."""
    lines = ["| reason | refused by | sentence |", "|---|---|---|"]
    for each in Reason:
        fields = {name: f"*{name}*" for _, name, _, _ in string.Formatter().parse(each.sentence) if name}
        lines.append(f"| `{each.name}` | {each.area} | {each.sentence.format(**fields)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m graph_passes.refusals", description="Writes the table of reasons.")
    parser.add_argument("--document", type=Path, required=True, help="the page")
    page: Path = parser.parse_args(arguments).document
    text = page.read_text()
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
