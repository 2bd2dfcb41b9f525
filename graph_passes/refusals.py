"""Why a pass leaves something unchanged: typed values, made into words when they are printed.

A `Reason` is one kind of refusal with its sentence; a `Refusal` is a reason with what it is about, such as
`Reason.STEP_FETCHED(node="lstm/step_3")`, or `Reason.SIDE_EFFECTS.of(node)` of a node. Nothing decides by the sentence.
`python -m tools.refusal_table --document docs/refusals.md` writes the table of all reasons.
"""

from __future__ import annotations

from enum import Enum

from graph_passes.graph.ir import Node
from graph_passes.refusal import Refusal

__all__ = ["Reason", "Refusal", "fault"]

_AGAIN = "its steps are unrolled"


class Reason(Enum):
    """One kind of refusal: the area that refuses, and the sentence, with its arguments in braces."""

    # Any pass
    FAULT = "any pass", "tfmem failed here (a bug, please report it): {error}"
    NO_KERNEL = "any pass", "there is no kernel for this device: {detail}"

    # Recurrent: which loops and steps are recurrences
    LOOP_CONDITION = (
        "recurrent",
        (
            "the loop goes on while '{node}' ({op}), which counts no steps to a bound; "
            "pass maximum_iterations, and let the condition read states alone"
        ),
    )
    LOOP_WITHOUT_BOUND = "recurrent", "the loop has no bound"
    LOOP_BOUND = "recurrent", "the loop's bound '{node}' ({op}) changes while it runs"
    LOOP_BOUND_LARGE = "recurrent", "its states end it, and its bound is {steps} steps; expected {most} at most"
    LOOP_IN_CALL = "recurrent", "'{node}' ({op}) is in a function that it calls, and the call could not be inlined"
    LOOP_IN_BRANCH = "recurrent", "'{node}' ({op}) is in a branch, and data decides whether the branch runs"
    BEING_TRACED = (
        "recurrent",
        "the function is still being traced, so the old loop would run as well; optimise the function instead",
    )
    SECOND_GRADIENT = "recurrent", "the gradient of its gradient is taken as well"
    UNROLLED = (
        "recurrent",
        f"{_AGAIN}; tfmem makes a loop of them only if each reads its item of one tf.unstack, or of all x[:, t]",
    )
    UNROLLED_IN_PLACE = (
        "recurrent",
        f"{_AGAIN}, which tfmem replaces in a tf.function, a GraphDef or a SavedModel, not in a tf.Graph",
    )
    UNROLLED_TRAINED = (
        "recurrent",
        f"{_AGAIN}, with their gradient, and tfmem could not make a loop of both; pass unroll=False, or use tf.range",
    )
    UNROLLED_IDLE = "recurrent", f"{_AGAIN}, and the graph holds a gradient of them that nothing needs"
    UNROLLED_BECAUSE = "recurrent", f"{_AGAIN}, and {{because}}"
    UNROLLED_TRAINED_BECAUSE = "recurrent", f"{_AGAIN}, with their gradient, and {{because}}"
    UNROLLED_CONVOLUTION = "recurrent", f"{_AGAIN}, and '{{node}}' ({{op}}) takes states that are not matrices"
    STEP_FETCHED = "recurrent", "'{node}' of a single step is fetched by name"
    STEPS_FETCHED = "recurrent", "'{node}', the outputs of all steps, is fetched by name"
    STEP_READ = "recurrent", "'{node}' ({op}) reads '{tensor}' of single steps"
    STEP_ZEROS = "recurrent", "'{node}' (ZerosLike) takes the shape of a tensor that exists only within a step"
    STEP_GRADIENT = "recurrent", "ops that read single steps are not known to be their gradient"
    STEP_NEEDED = "recurrent", "'{node}' ({op}) needs results of single steps"

    # Recurrent: loops as cells
    LOOP_FETCHED = "recurrent", "'{node}' itself is fetched by name"
    SHAPE_CHECK = "recurrent", "'{node}' (EnsureShape) refuses shapes that are not known before the step runs"
    NO_STATE = "recurrent", "the loop carries no state from step to step"
    STATE_DTYPE = "recurrent", "'{node}' is {dtype}; expected a floating-point state, a counter or a growing sum"
    STATE_SEED = (
        "recurrent",
        "'{node}' is a seed; write seeds = tf.random.split(seed, steps) before the loop, and read seeds[i] in it",
    )
    STATE_SHAPE = "recurrent", "the state '{node}' has shape {shape}; expected [batch, units]"
    STATE_DTYPES = "recurrent", "the states have different types: {types}"
    STATE_COMPLEX = "recurrent", "the state '{node}' is {dtype}; write its real and its imaginary part as two states"
    STATE_SINGLE = "recurrent", "the state '{node}' is one number, but other states have an unknown number of rows"
    STATE_UNITS = "recurrent", "the state '{node}' has {units} units; expected a known number above 0"
    SIDE_EFFECTS = (
        "recurrent",
        "'{node}' ({op}) has side effects, or is random, in every step; do that outside of the loop",
    )
    LIST_CHANGED = "recurrent", "'{node}' ({op}) changes the list '{other}'; expected one write of an item in each step"
    STEP_ASSIGNS = (
        "recurrent",
        (
            "'{node}' ({op}) assigns a variable in every step, and adds no fixed whole number to it; "
            "carry the value as a state, and assign behind the loop"
        ),
    )
    LIST_INDEX = (
        "recurrent",
        "'{node}' writes a list at an index that does not count the steps from the first on or from the last",
    )
    LIST_SIZE = "recurrent", "the list '{node}' ({op}) is not known to have an item for each step"
    LIST_READ_INDEX = "recurrent", "'{node}' ({op}) reads a list at an index that does not count the steps"
    LIST_SOURCE = "recurrent", "'{node}' ({op}) reads a list that was not made from one whole tensor"
    SINGLE_OUTPUT = "recurrent", "'{node}' ({op}) reads single outputs of the loop"
    STATE_COLUMNS = "recurrent", "'{node}' ({op}) makes a state of {columns} columns; expected {wanted}"

    # Recurrent: ops in cells
    CELL_OP = "recurrent", "'{node}' is a {op}, which no op of a cell computes"
    CELL_OP_INSTEAD = "recurrent", "'{node}' is a {op}, which no op of a cell computes; write {instead}"
    CELL_SHAPE = "recurrent", "'{node}' ({op}) has shape {shape}; expected [batch, a multiple of {units}]"
    CELL_COLUMNS = "recurrent", "'{node}' ({op}): {one} and {two} columns of {units} do not match"
    CELL_MIXED = "recurrent", "'{node}' ({op}) mixes a per-row scalar with a per-unit vector: '{tensor}'"
    CELL_PRODUCT = "recurrent", "'{node}' ({op}) is not a product `state @ weight`"
    CELL_MATRIX = "recurrent", "'{node}' ({op}) multiplies with a matrix that changes, of shape {shape}"
    CELL_PRODUCT_SIZE = (
        "recurrent",
        "'{node}' ({op}) multiplies {count} x {units} units with a matrix {shape}; expected multiples of {units} units",
    )
    CELL_PART = "recurrent", "'{node}' ({op}) takes units {start} to {end}, not whole columns of {units}"
    CELL_CUTS = "recurrent", "a step cuts '{node}' ({op}) into {count} parts; expected at most {most}"
    CELL_NUMBERS = "recurrent", "its states have {count} numbers a row; only [batch, width] may have over {most}"
    CELL_NODES = "recurrent", "a step takes {count} ops on single numbers of a row; expected {most} at most"
    BECAUSE_SMALL = "recurrent", "{first}; {because}"
    FEW_ROWS = (
        "recurrent",
        (
            "a step takes {count} ops on single numbers of a row, which a CPU runs more slowly than the loop; "
            "expected {most} at most for {rows}"
        ),
    )
    STATES_END = (
        "recurrent",
        "its states end it, and tfmem would compute more steps: {work} products each; {most} at most on a CPU",
    )
    CELL_JOIN = "recurrent", "'{node}' ({op}) does not join columns"
    CELL_JOIN_WIDTH = "recurrent", "'{node}' ({op}) joins '{tensor}', whose width is unknown"
    CELL_SUM_AXIS = "recurrent", "'{node}' ({op}) sums over the batch, or over another axis than the last"
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
    OTHER_ITEMS = (
        "recurrent",
        "'{node}' ({op}) reads '{tensor}' at an index that does not count the steps, or may be out of range",
    )
    INNER_LOOP = (
        "recurrent",
        (
            "'{node}' ({op}) is a loop inside of a step, not known to run at most {most} times; fix that number, or "
            "write the steps one by one"
        ),
    )
    STEP_DRAWS = (
        "recurrent",
        (
            "'{node}' ({op}) draws by a seed of each step; truncated normals on GPUs, and loops that states end, need "
            "a known count, at most {most}; draw before the loop"
        ),
    )
    DRAWS_ROOM = (
        "recurrent",
        (
            "'{node}' ({op}) draws {shape} in each step, which may fill the memory for over {most} steps; read or "
            "write an item of that rank in each step"
        ),
    )
    STEP_FAILS = "recurrent", "'{node}' ({op}) may fail in a step behind the loop's end; compute it before the loop"
    ROWS_UNALIKE = (
        "recurrent",
        "'{node}' ({op}) is not known to treat the rows of the batch alike; compute it outside of the loop",
    )
    ROWS_LOST = "recurrent", "'{node}' ({op}) does not keep the rows of the batch"
    PART_OF = "recurrent", "'{node}' ({op}) takes a part of {shape}"
    PART_RANGE = "recurrent", "'{node}' ({op}) does not take a fixed range of columns"
    PART_SINGLE = "recurrent", "'{node}' ({op}) takes single columns, or skips some"

    # Recurrent: gradients
    GRADIENT_UNCLEAR = "recurrent", "there is {count} to match the gradients in '{node}' with variables"
    CHECK_EFFECTS = "recurrent", "its gradient cannot be checked: '{node}' ({op}) has side effects"
    CUSTOM_GRADIENT = (
        "recurrent",
        (
            "'{node}' ({op}) has a custom gradient; write s(x) + tf.stop_gradient(f(x) - s(x)), "
            "where s has the gradient that f(x) is to have"
        ),
    )
    CHECK_FINITE = "recurrent", "its gradient cannot be checked: it is not finite for random numbers"
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
    GRADIENT_UNREAD = (
        "recurrent",
        "the gradient of '{tensor}' is wanted, but the recurrence does not read that tensor directly",
    )
    GRADIENT_TWICE = (
        "recurrent",
        "'{tensor}' enters the recurrence twice, as in tf.scan without an initial state: the gradient of one is wanted",
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
    CUDNN_STATE_WIDTH = "recurrent", "the width of its state is not known before it runs; give a static shape"
    CUDNN_LAYERS = "recurrent", "it holds {layers} layers; only one layer is read"

    # Fusion: which ops can be in a region
    ARGUMENT = "fusion", "it is an argument"
    NO_RULE = "fusion", "fusion has no rule for {op}"
    RANK = "fusion", "'{tensor}' has an unknown rank"
    DTYPE = "fusion", "'{tensor}' is {dtype}, which regions do not support"
    EMPTY = "fusion", "'{tensor}' has no elements"
    VARIABLE_RANK = "fusion", "its variable has an unknown rank"
    VARIABLE_DTYPE = "fusion", "its variable is {dtype}, which regions do not support"
    VARIABLE_EMPTY = "fusion", "its variable has no elements"
    VIEW_SIZES = "fusion", "the result of {op} has {count} unknown sizes; expected at most one"
    RANDOM = "fusion", "it is a stateful random op"
    RANDOM_POOL = "fusion", "{op} returns other shapes than TensorFlow infers for it"
    UPDATE_WITHOUT_RULE = "fusion", "it updates a variable, and its update cannot be fused: {because}"
    STATEFUL = "fusion", "{op} is a stateful op"
    SIZED_BY_DATA = "fusion", "{because}, and the sizes of what {op} makes may depend on data"
    NOT_ALONE = "fusion", "callers ask for it by its name, and it does not have exactly one output"
    RUN_ALONE = "fusion", "a caller may run it without the other ops"
    NO_SUCH_PATTERN = "fusion", "regions on this device do not hold ops of kind {pattern}"
    FED = "fusion", "a caller feeds its output"
    BEHIND_SWITCH = "fusion", "it depends on a Switch, so it may not run"
    HELD_CONSTANT = "fusion", "it is a constant, and the kernels that read it contain its value"
    COLLECTIVES = "fusion", "the order in which collectives of its graph meet is unknown: {detail}"
    OTHER_REPLICA = "fusion", "it updates variables, and another replica would update its copies by other kernels"
    NO_GAIN = "fusion", "one op in place of {ops} would save nothing"
    NO_TIME = "fusion", "it takes no time, and no neighbour of it is in a region"
    VARIABLE_ASSIGNED = "fusion", "it takes the variable '{tensor}', which other ops of its region assign"

    # Fusion: what a device cannot do
    ONEDNN_ONLY = "fusion", "only oneDNN runs {op} of {dtype} with {fused}"
    ONEDNN_WAY = "fusion", "only oneDNN runs {op} {how} on a CPU"
    ASYNCHRONOUS = "fusion", "TensorFlow's kernel of {op} is asynchronous"
    RAISES = "fusion", "TensorFlow's kernel refuses {what}"
    JOINS = "fusion", "TensorFlow's kernel copies the parts, which is faster for so many numbers"
    HOST_RESULT = "fusion", "'{tensor}' is {dtype}, which TensorFlow keeps in host memory on a GPU, and is a result"
    HOST_READ = "fusion", "'{tensor}' is {dtype}, which '{reader}' reads in host memory on a GPU"
    HOST_VARIABLE = "fusion", "its variable is {dtype}, which TensorFlow keeps in host memory on a GPU"
    NO_PRODUCT = "fusion", "regions on a GPU do not call {op}"
    NO_PRODUCT_OF = "fusion", "regions on a GPU do not multiply {dtypes}"
    NO_CONVOLUTION_OF = "fusion", "regions on a GPU neither convolve nor pool {dtypes}"
    CONVOLUTION_SIZES = "fusion", "sizes of its images or filters are unknown, other than the batch"
    CONVOLUTION_LARGE = "fusion", "it has a tensor of {count} numbers, more than int32 counts"
    NO_POOLING = "fusion", "regions on a GPU pool no images in {images} with padding {padding} and windows {window}"
    NO_FUSED_PRODUCT = "fusion", "regions on a GPU do not call {op} with {fused}"

    # Fusion: ops in kernels
    OP_DTYPE = "fusion", "kernels do not compute {op} of {dtype}"
    DIVISION = "fusion", "kernels compute {op} of {dtype} only if the divisor is constant"
    TRUNCATING_CAST = "fusion", "its cast truncates"
    COMPOSITION = "fusion", "it is composed of ops, and kernels do not compute {op} of {dtype}"
    CHANNELS_FIRST = "fusion", "the channels of its batch norm are not the last dimension"
    BATCH_NORM_SIZE = "fusion", "the size of its batch norm is unknown"
    BATCH_NORM_ACTIVATION = "fusion", "kernels do not compute {op} with the activation {activation}"
    BATCH_NORM_APART = "fusion", "it reads the inverse variance that '{tensor}' of TensorFlow's kernel is on a GPU"
    CONSTANTS = "fusion", "it is a constant of more than one value"
    GATHER_AXIS = "fusion", "the axis of a gather is not constant"
    GATHER_INDICES = "fusion", "the number of indices that it takes for one element is unknown"
    GATHER_RANGE = "fusion", "it gathers from a reshape of {count} elements, whose positions exceed int32"
    GATHER_AGAIN = (
        "fusion",
        "a gather reads '{tensor}', and kernels do not compute random numbers at gathered positions",
    )
    SLICE_BOUNDS = "fusion", "the bounds of its slice are not constant"
    SLICE_GRADIENT = "fusion", "the bounds of the slice whose gradient it is are not constant"
    UNPACK_COUNT = "fusion", "the number of parts that it unpacks is unknown"
    CHECKED_SHAPE = "fusion", "its shape is not known before the step runs"
    SQUEEZED = "fusion", "it drops a dimension that may not be 1"
    RANGE = "fusion", "it is a range of non-integers, which TensorFlow computes by repeated addition"
    NOT_CONSTANT = "fusion", "input {place} of {op} is not constant"
    REDUCED_AXES = "fusion", "the dimensions to reduce are not constant"
    REDUCED_AXIS = "fusion", "the dimension to reduce is not constant"
    FUSED_OPS = "fusion", "kernels do not compute {op} with {fused}"
    SEGMENTS_UNKNOWN = "fusion", "the number of ids that its segment sum compares is unknown"
    SEGMENTS = "fusion", "its segment sum would look at {count} numbers, which takes too long in a kernel"
    CUMULATED = "fusion", "its cumulative sum has {count} numbers; kernels add up to {most}"
    SEGMENTS_BOOL = "fusion", "kernels do not sum segments of bool"
    SEGMENTS_PLACE = "fusion", "the large segment sum of '{tensor}' is read in another shape"
    SCATTERED = (
        "fusion",
        "it updates rows of a variable of {count} numbers, and a kernel would read and write all of them",
    )
    RANKED = "fusion", "it takes the largest of {count} numbers; kernels compare all pairs of up to {most}"
    RANKED_ON_CPU = "fusion", "a CPU sorts faster than it compares all pairs"
    CLASSES = "fusion", "the number of classes is unknown"
    RANDOM_PLACE = "fusion", "the position of a random number in '{tensor}' depends on unknown sizes"
    RANDOM_STATE = "fusion", "'{tensor}' is not a Philox state: expected {dtype} of shape {shape}"
    RANDOM_SEED = "fusion", "'{tensor}', the seed of a random op, would be computed in the same kernel"
    RANDOM_ALGORITHM = "fusion", "the algorithm of a stateless random op is not known to be Philox"
    VARIABLE_SHAPE = "fusion", "its variable has an unknown shape"
    VARIABLE_TYPE = "fusion", "'{tensor}' ({dtype} {shape}) does not have the variable's type"

    # Fusion: ops together in one kernel
    BROADCAST = "fusion", "the sizes to which '{tensor}' is broadcast are unknown"
    RESHAPED = "fusion", "the reshape '{node}' cannot be expressed as an affine index"
    REPEATED = "fusion", "the repetition in '{node}' cannot be expressed as an affine index"
    PICKED = "fusion", "an unknown size decides which elements '{node}' reads"
    CUMULATED_AGAIN = "fusion", "'{tensor}' would be recomputed for each number of a cumulative sum"
    SEGMENTS_AGAIN = "fusion", "'{tensor}' would be recomputed for each segment"
    RESERVE_SPACE = "fusion", "'{tensor}' is a reserve-space output, which kernels do not compute"
    PROGRAM = "fusion", "tfmem cannot write a program for {members}...: {detail}"
    NUMBERS = "fusion", "its numbers may range from {low} to {high}, which exceeds {dtype}"
    NODES = "fusion", "it needs more than {count} nodes, because too many values are recomputed at other indices"
    VARIABLE_UNKNOWN = "fusion", "the variable that '{node}' uses has an unknown shape"
    TENSOR_UNKNOWN = "fusion", "'{tensor}' has an unknown shape"
    TENSOR_RANK = "fusion", "a tensor has an unknown rank"
    PRODUCT_TILES = "fusion", "one kernel cannot compute it in tiles: {detail}"

    # Products
    PRODUCT_KERNELS = "products", "there are no kernels for this device: {detail}"

    # Split: why ops run on the whole batch, or a step is not split
    SPLIT_MIXES = "split", "'{node}' ({op}) mixes examples, or has no rule"
    SPLIT_SHAPE = "split", "'{node}' ({op}) reads '{tensor}', whose shape or numbers are not known before the step runs"
    SPLIT_NO_BATCH = "split", "no input of the step has a batch of at least {count} examples"
    SPLIT_NO_REGION = "split", "no ops that treat the examples one by one hold enough memory"
    SPLIT_ENDS = "split", "the ops that treat the examples one by one hold too little memory: {why}"
    SPLIT_SHARED = "split", "other devices take part in the step: {detail}"
    SPLIT_DEVICE = "split", "{device} cannot be split, so no device is: {why}"
    SPLIT_WAITS = "split", "in pieces, the devices would wait for each other without end"
    SPLIT_NEVER = "split", "split='never' was passed"
    SPLIT_BASE = "split", "variables and other memory that is in use before the step take {base} bytes"
    SPLIT_AGAIN = "split", "the step is split already, or holds fused regions"
    SPLIT_IN_PLACE = "split", "users of a {kind} hold its tensors; optimise a tf.function or a Keras model instead"
    SPLIT_OPEN = (
        "split",
        "the graph may be fed other batches than input_shapes says; give these placeholders known sizes: {names}",
    )
    SPLIT_CHUNKS = (
        "split",
        "{spare} bytes of the budget stay free for the CPU's allocator, for a session is not measured; then {why}",
    )
    SPLIT_UPDATES = "split", "'{node}' is computed before the gradients, and would wait for an update of variables"
    SPLIT_KNOWN = "split", "its ops cannot run in the {count} pieces that another process chose"
    SPLIT_OVER = "split", "no division into up to {count} pieces meets the budget; the best needs {least} bytes"

    # Offload: why a tensor stays in device memory
    NO_SIZE = "offload", "dtype {dtype} has no fixed element size"
    SMALL = "offload", "it is smaller than 64 KiB"
    HOST_INT32 = "offload", "TensorFlow keeps int32 tensors in host memory"
    RETURNED = "offload", "the step returns it"
    LIST_SHARES = "offload", "a list of a loop shares its memory"
    LIST_FILLED = "offload", "it is a list that a loop fills"
    LIST_UNKNOWN = "offload", "what a loop puts into it is not known before the loop runs"
    COLLECTIVE = "offload", "{op} communicates with other devices"
    OTHER_DEVICE = "offload", "another device reads it"
    SEVERAL_SHAPES = "offload", "ops read it under several shapes"
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


def fault(error: Exception) -> Refusal:
    """A failure of tfmem's own."""
    return Reason.FAULT(error=f"{type(error).__name__}: {error}")
