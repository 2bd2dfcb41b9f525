"""What passes know of TensorFlow's ops: which pass a value on, which share a buffer, which may reuse one, and which
own no memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

from graph_passes.graph.ir import Graph, Node, TensorId, whole


class OpPattern(Enum):
    """How an op computes, for every pass that asks what an op is like (TVM's word, `OpPatternKind`).

    The reductions differ in which dimensions they sum up, as in FusionStitching (arXiv 1911.11576): the innermost ones,
    the outermost ones, or all; `REDUCTION` is any other choice. An op that holds several reductions (a softmax, a batch
    norm) counts as what it reduces over.
    """

    CONSTANT = "constant"  # the same number everywhere, written into programs
    ELEMENTWISE = "elementwise"
    LAYOUT = "layout"  # each element is one of an input's, at a place that is known: broadcast, transpose, slice
    ROW_REDUCTION = "row reduction"
    COLUMN_REDUCTION = "column reduction"
    SCALAR_REDUCTION = "scalar reduction"
    REDUCTION = "reduction"
    GATHER = "gather"
    UPDATE = "update"  # gives variables values: arithmetic in a kernel, then an `Assign`
    VIEW = "view"  # the same numbers in another shape: a separate step, or a member of a kernel
    READ = "read"  # the value of a variable: a separate step, or, after an update of it, a member of a kernel
    PRODUCT = "product"
    BATCHED_PRODUCT = "batched product"
    CALL = "call"  # no rule, but TensorFlow's own kernel can run it inside of a region on a CPU
    OPAQUE = "opaque"  # stays outside


REDUCTIONS = frozenset(
    {OpPattern.ROW_REDUCTION, OpPattern.COLUMN_REDUCTION, OpPattern.SCALAR_REDUCTION, OpPattern.REDUCTION}
)

# Patterns of the ops that can be members of a kernel.
IN_KERNELS = REDUCTIONS | {
    OpPattern.CONSTANT,
    OpPattern.ELEMENTWISE,
    OpPattern.LAYOUT,
    OpPattern.GATHER,
    OpPattern.UPDATE,
    OpPattern.VIEW,
}

# Output n is input n: the same value, shape and dtype.
IDENTITIES = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "Snapshot"})

# Identities whose gradient is the identity as well, unless a custom gradient was given to them.
COPIES = IDENTITIES - {"StopGradient"}

# Loops as functions.
LOOPS = frozenset({"While", "StatelessWhile"})

# Output 0 is input 0's buffer under another name (and perhaps another shape).
VIEWS = (IDENTITIES - {"IdentityN", "Snapshot"}) | frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "CheckNumerics", "CheckNumericsV2", "MemOpAwait"}
)

# Output 0 holds input 0's numbers, perhaps in another order or type.
SAME_NUMBERS = VIEWS | {"Cast", "Transpose", "ConjugateTranspose"}

_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Exp Expm1 Floor Inv IsFinite IsInf IsNan LeakyRelu "
    "Log Log1p LogSoftmax LogicalNot Neg Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softmax "
    "Softplus Softsign Sqrt Square Tan Tanh BiasAdd BiasAddV1 FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 "
    "_UnaryOpsComposition"
)
_BINARY = (
    "Add AddV2 AddN Sub Mul Div RealDiv DivNoNan MulNoNan Maximum Minimum Pow SquaredDifference FloorDiv FloorMod "
    "Atan2 LogicalAnd LogicalOr Xdivy Xlogy ReluGrad Relu6Grad EluGrad LeakyReluGrad SeluGrad SigmoidGrad TanhGrad "
    "SqrtGrad RsqrtGrad InvGrad ReciprocalGrad SoftplusGrad SoftsignGrad FusedBatchNormGrad FusedBatchNormGradV2 "
    "FusedBatchNormGradV3 SelectV2 Select _FusedBatchNormEx"
)
# The output that is written into an input, where that is not the first: here the gradient, over the logits.
REUSING_OUTPUT = {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}
# Ops whose kernels call `forward_input_or_allocate_output`: they write into an input that no other op still needs.
IN_PLACE = frozenset((*_UNARY.split(), *_BINARY.split(), *REUSING_OUTPUT))

# Writes rows of input 0, whose only reader it is, and gives the same buffer out.
WRITES_ROWS = "InplaceUpdate"
IN_PLACE_OVER_FIRST = IN_PLACE | {WRITES_ROWS}

# An attribute of a Slice of whole rows that shares the memory of what it slices.
ROWS_ATTRIBUTE = "_tfmem_rows"

# Deterministic ops without effects: on the same inputs they make the same bits again.
_REPEATABLE = (
    "Cast Erfc Greater GreaterEqual Less LessEqual Equal NotEqual ZerosLike OnesLike Transpose BroadcastTo Tile Pad "
    "PadV2 ConcatV2 Slice StridedSlice Pack Mean Sum Max ClipByValue StatelessRandomUniform StatelessRandomUniformV2 "
    "StatelessRandomNormalV2 StatelessTruncatedNormalV2"
)
REPEATABLE = frozenset((*_REPEATABLE.split(), *(op for op in IN_PLACE if "Grad" not in op))) | VIEWS

# Ops whose outputs live outside the step: variables, constants, what the caller feeds.
EXTERNAL = frozenset(
    {
        "Const",
        "HostConst",
        "Placeholder",
        "PlaceholderV2",
        "PlaceholderWithDefault",
        "_Arg",
        "_DeviceArg",
        "VarHandleOp",
        "ReadVariableOp",
        "ReadVariablesOp",
        "VariableV2",
        "Variable",
        "VarIsInitializedOp",
    }
)

# Stateful ops that only read: they may move to where nothing writes between the old place and the new one.
PYTHON_CALLS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
READS = frozenset({"ReadVariableOp", "ResourceGather", "VariableShape"})

# Random ops that draw other numbers each time they run.
DRAWS = frozenset({"RandomUniform", "RandomStandardNormal", "TruncatedNormal"})

# Stateful, but of no effect on anything other than their own array.
ARRAYS = frozenset(f"TensorArray{kind}V3" for kind in ("", "Read", "Write", "Gather", "Scatter", "Size", "Close"))

# Ops that read how large a tensor is, and none of its data.
SHAPE_READERS = frozenset({"Shape", "ShapeN", "Size", "Rank"})

# Ops that write a variable: the last thing a training step does with a gradient.
UPDATES = frozenset(
    {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "Assign", "AssignAdd", "AssignSub"}
)
_UPDATES_BEGIN = (
    "ResourceApply",
    "ResourceSparseApply",
    "ResourceScatter",
    "ResourceStridedSliceAssign",
    "Apply",
    "SparseApply",
)

# On a GPU the kernel allocates its output, then its input `FILTER` in another layout, then a tensor that replaces the
# output (pre_transformed_in_backprop in conv_grad_input_ops).
FILTER = 1
ALLOCATES_TWICE = frozenset({"Conv2DBackpropInput"})

CONVOLUTIONS = frozenset(
    {
        "Conv2D",
        "Conv2DBackpropInput",
        "Conv2DBackpropFilter",
        "Conv3D",
        "Conv3DBackpropInputV2",
        "Conv3DBackpropFilterV2",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropInput",
        "DepthwiseConv2dNativeBackpropFilter",
        "_FusedConv2D",
        "_FusedConv3D",
        "_FusedDepthwiseConv2dNative",
        "FusedConv2DBiasActivation",
    }
)

# Ops that multiply matrices, and how.
PATTERN_OF_PRODUCT = {
    "MatMul": OpPattern.PRODUCT,
    "_FusedMatMul": OpPattern.PRODUCT,
    "TfmemMatMul": OpPattern.PRODUCT,
    "BatchMatMul": OpPattern.BATCHED_PRODUCT,
    "BatchMatMulV2": OpPattern.BATCHED_PRODUCT,
    "BatchMatMulV3": OpPattern.BATCHED_PRODUCT,
    "_FusedBatchMatMulV2": OpPattern.BATCHED_PRODUCT,
    "Einsum": OpPattern.BATCHED_PRODUCT,
}
MATRIX_PRODUCTS = frozenset({*PATTERN_OF_PRODUCT, "_MklFusedBatchMatMulV2"})  # oneDNN's cannot be in a region

# Convolutions of an input, before Grappler fuses anything into them.
FORWARD_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D", "DepthwiseConv2dNative"})

# Products that are the same to the bit on the same inputs: libraries choose a kernel by shapes, once for each shape.
REPEATABLE_PRODUCTS = MATRIX_PRODUCTS | FORWARD_CONVOLUTIONS | {"_FusedConv2D", "_FusedDepthwiseConv2dNative"}

# What a layer does with its weights.
PRODUCTS = CONVOLUTIONS | MATRIX_PRODUCTS

# Ops that talk to other devices or processes: their order is the runtime's own and is never constrained.
COLLECTIVES = frozenset(
    {
        "CollectiveAllToAllV2",
        "CollectiveAllToAllV3",
        "CollectiveAssignGroupV2",
        "CollectiveBcastRecv",
        "CollectiveBcastRecvV2",
        "CollectiveBcastSend",
        "CollectiveBcastSendV2",
        "CollectiveGather",
        "CollectiveGatherV2",
        "CollectiveInitializeCommunicator",
        "CollectivePermute",
        "CollectiveReduce",
        "CollectiveReduceScatterV2",
        "CollectiveReduceV2",
        "CollectiveReduceV3",
        "AllToAll",
        "CrossReplicaSum",
        "NcclAllReduce",
        "NcclBroadcast",
        "NcclReduce",
        "_NcclBroadcastRecv",
        "_NcclBroadcastSend",
        "_NcclReduceRecv",
        "_NcclReduceSend",
        "Send",
        "Recv",
        "_Send",
        "_Recv",
        "_HostSend",
        "_HostRecv",
    }
)

# Ops whose outputs are as large as the shapes of their inputs say, whatever the numbers in these are. There are others:
# this is for ops that are worth a region although a batch size is open.
_SHAPED = (
    "Conv2D Conv3D DepthwiseConv2dNative _FusedConv2D _FusedDepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D "
    "MaxPoolGrad MaxPoolWithArgmax LRN L2Loss Erfc Lgamma Digamma Einsum Cast ZerosLike OnesLike"
)
SHAPED_BY_SHAPES = (IN_PLACE - {"_UnaryOpsComposition"}) | frozenset(_SHAPED.split())

# Dtypes that can have a gradient.
FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})

# Dtypes with a fixed element size, which MemOps can move.
FIXED_SIZE = FLOATS | {
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
    "float8_e5m2", "float8_e4m3fn",
}  # fmt: skip


# A region: several ops that run as one. Under a memory budget one that takes variables also writes some.
FUSION_OP = "TfmemFusion"


def calls_python(graph: Graph) -> bool:
    """Whether ops of a graph, or of functions that it calls, run Python code."""
    called = (function.graph for function in graph.functions.values())
    return any(node.op in PYTHON_CALLS for node in graph) or any(map(calls_python, called))


def has_regions(graph: Graph) -> bool:
    """Whether some ops of the graph run as one."""
    return any(node.op == FUSION_OP for node in graph)


def taken_by(node: Node) -> list[TensorId]:
    """The variables that a region takes; none of another node."""
    count = whole(node.attrs.get("N")) if node.op == FUSION_OP else 0
    return node.inputs[len(node.inputs) - count :]


def writes(node: Node) -> bool:
    """Whether a node writes a variable: an update, or a region that holds updates."""
    return is_update(node.op) or bool(taken_by(node))


def shares_rows(node: Node) -> bool:
    """Whether a node is a slice that shares the memory of what it slices."""
    return node.op == "Slice" and ROWS_ATTRIBUTE in node.attrs


def is_update(op: str) -> bool:
    """Whether an op of this type writes a variable."""
    return op in UPDATES or op.startswith(_UPDATES_BEGIN)


def checks_shape(graph: Graph, node: Node) -> bool:
    """Whether a node refuses shapes that its input may have: it is more than the copy for which `passed` takes it."""
    if node.op != "EnsureShape":
        return False
    before, after = graph.specs.get(node.inputs[0]), graph.specs.get(TensorId(node.name))
    return before is None or after is None or before.shape != after.shape


def passed(graph: Graph, tensor: TensorId, through: Collection[str] = IDENTITIES) -> TensorId:
    """What `tensor` is a copy of: the first tensor before it that no op in `through` made."""
    node = graph[tensor.node]
    while node.op in through and node.inputs:
        tensor = node.inputs[tensor.index]
        node = graph[tensor.node]
    return tensor


def viewed(graph: Graph, tensor: TensorId, is_view: Callable[[str], bool]) -> TensorId:
    """What `tensor` is, maybe in another shape: the first tensor before it that no view, by name, made."""
    while is_view(tensor.node):
        tensor = graph[tensor.node].inputs[0]
    return tensor


def scalar_value(graph: Graph, tensor: TensorId) -> int | float | bool | None:
    """The number that a tensor of one element holds, if it is a constant."""
    found = graph.constants.get(passed(graph, tensor).node)
    if found is None or found.size != 1:
        return None
    value: int | float | bool = found.reshape(()).item()
    return value


def copied(node: Node) -> dict[str, Any]:
    """The attributes of a copy: those that only made sense where `node` was are left out."""
    return {key: value for key, value in node.attrs.items() if not key.startswith("_")}
