"""What passes know of TensorFlow's ops: who shares a buffer, who may reuse one, what holds no memory of its own."""

from __future__ import annotations

# Output 0 is input 0's buffer under another name (and perhaps another shape).
VIEWS = frozenset(
    {
        "Identity",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "StopGradient",
        "PreventGradient",
        "EnsureShape",
        "CheckNumerics",
        "CheckNumericsV2",
        "MemOpAwait",
    }
)

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
# Ops whose kernels call `forward_input_or_allocate_output`: they write into an input nobody else still needs.
IN_PLACE = frozenset((*_UNARY.split(), *_BINARY.split(), *REUSING_OUTPUT))

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

# Ops that read how large a tensor is, and none of its data.
SHAPE_READERS = frozenset({"Shape", "ShapeN", "Size", "Rank"})

# Ops that write a variable: the last thing a training step does with a gradient.
UPDATES = frozenset(
    {
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "Assign",
        "AssignAdd",
        "AssignSub",
    }
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
        "FusedConv2DBiasActivation",
    }
)

MATRIX_PRODUCTS = frozenset(
    {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedMatMul", "Einsum", "TfmemMatMul"}
)

# Ops that talk to other devices or processes: their order is the runtime's own and is never constrained.
COLLECTIVES = frozenset(
    {
        "CollectiveReduce",
        "CollectiveReduceV2",
        "CollectiveReduceV3",
        "CollectiveGather",
        "CollectiveGatherV2",
        "CollectiveBcastSend",
        "CollectiveBcastRecv",
        "CollectiveAllToAllV2",
        "NcclAllReduce",
        "NcclBroadcast",
        "NcclReduce",
        "_Send",
        "_Recv",
        "_HostSend",
        "_HostRecv",
    }
)

# Dtypes with a fixed element size, which MemOps can move.
ITEM_SIZES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
}


def is_update(op: str) -> bool:
    """Whether an op of this type writes a variable."""
    return op in UPDATES or op.startswith(("ResourceApply", "ResourceSparseApply", "Apply", "SparseApply"))
