"""What a device cannot do within a region, as data; and what a CPU does as TensorFlow's own kernels alone do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from graph_passes.analysis import convolutions
from graph_passes.analysis.convolutions import SIZED
from graph_passes.analysis.op_pattern import IN_KERNELS, NodePattern, OpPattern, called
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, integers, text, texts
from graph_passes.graph.ops import passed
from graph_passes.refusals import Reason, Refusal


@dataclass(frozen=True)
class Capabilities:
    """What a device supports.

    Attributes:
        on_host: dtypes of which TensorFlow's kernels take and make tensors in the host's memory there, but for `reads`.
        reads: ops, with positions of inputs, that read such tensors in the device's memory.
        decides: ops, with positions of inputs, that read there what is to run next.
        products: ops that multiply matrices, and which a region can call.
        multiplied: dtypes that they take.
        fused: what `_FusedMatMul` may have fused into it.
        convolutions: ops that convolve images, and which a region can call.
        convolved: dtypes that they take.
        pooled: ops that take the maximum or the average of windows of images, or its gradient, and which a region can
            call; of dtypes that are convolved.
    """

    on_host: frozenset[str]
    reads: frozenset[tuple[str, int]]
    decides: frozenset[tuple[str, int]]
    products: frozenset[str]
    multiplied: frozenset[str]
    fused: frozenset[tuple[str, ...]]
    convolutions: frozenset[str] = frozenset()
    convolved: frozenset[str] = frozenset()
    pooled: frozenset[str] = frozenset()

    @property
    def of_images(self) -> frozenset[str]:
        """Ops of images that a region can call."""
        return self.convolutions | self.pooled


# Convolutions that regions on a GPU call of cuDNN.
_CONVOLUTIONS = frozenset({"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"})
# Convolutions with a group for each channel. Regions of a device that calls `_CONVOLUTIONS` alone hold none of them.
_DEPTHWISE = frozenset(
    {"DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter"}
)

# Products are cuBLASLt's, convolutions cuDNN's (custom_ops/ops/fusion/gpu_steps.cc).
CUDA = Capabilities(
    on_host=frozenset({"int32"}),
    reads=frozenset(
        {
            ("Gather", 1),
            ("GatherV2", 1),
            ("GatherNd", 1),
            ("ResourceGather", 1),
            ("ResourceScatterAdd", 1),
            ("ResourceScatterSub", 1),
            ("ResourceScatterUpdate", 1),
            ("ScatterNd", 0),
            ("UnsortedSegmentSum", 1),
            ("SparseSoftmaxCrossEntropyWithLogits", 1),
            ("OneHot", 0),
            ("Cast", 0),
        }
    ),
    decides=frozenset(
        {("If", 0), ("StatelessIf", 0), ("Case", 0), ("StatelessCase", 0), ("LoopCond", 0), ("Switch", 1)}
    ),
    products=frozenset({"MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2"}),
    multiplied=frozenset({"float16", "bfloat16", "float32", "float64"}),
    fused=frozenset({("BiasAdd",), ("BiasAdd", "Relu")}),
    convolutions=_CONVOLUTIONS | _DEPTHWISE,
    convolved=frozenset({"float16", "bfloat16", "float32"}),
    pooled=frozenset({"MaxPool", "MaxPoolGrad", "AvgPool", "AvgPoolGrad"}),
)


# What TensorFlow's own kernels may have fused into a product or a convolution on a CPU. For all else that its remapper
# fuses there is a kernel of oneDNN, which TensorFlow puts in place of the op later than this, and not within a region.
_ACTIVATIONS = ((), ("Relu",), ("Relu6",), ("Elu",), ("LeakyRelu",))
# TensorFlow registers a kernel of half convolutions of that name only for oneDNN's sake: it cannot be made.
_FUSED_OPS = {
    "_FusedMatMul": frozenset({"float16", "bfloat16", "float32"}),
    "_FusedConv2D": frozenset({"float32", "float64"}),
}
_FUSED = frozenset((first, *then) for first in ("BiasAdd", "FusedBatchNorm") for then in _ACTIVATIONS)

# TensorFlow's own kernels on a CPU refuse these layouts, and dilations of these ops; oneDNN's kernels take their place.
_CHANNELS_FIRST = frozenset({"NCHW", "NCDHW"})
_UNDILATED = ("Conv2DBackprop", "Conv3D")

# Ops without a state whose kernels are asynchronous on a CPU: they may return before their results are there, and a
# region waits for none. All that TensorFlow 2.21 has.
_ASYNCHRONOUS = frozenset(
    {"Batch", "CropAndResize", "CropAndResizeGradBoxes", "CropAndResizeGradImage", "Unbatch", "UnbatchGrad"}
)

# On a CPU TensorFlow's kernel raises there; on a GPU it gives NaN, or leaves out what is no segment's, as the rules do.
_RAISES = {
    "SparseSoftmaxCrossEntropyWithLogits": "a label that is no class",
    "UnsortedSegmentSum": "an id that is no segment's",
    "ScatterNd": "an index that is no position",
    **dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"), "an index that is no row's"),
}
# TensorFlow's kernel sorts; ours compare all pairs.
_RANKS = frozenset({"TopK", "TopKV2"})


# TensorFlow's kernel copies each part to its place; one of ours computes each part everywhere, and selects. From so
# many numbers on, counted once for each part, it is called: an estimate of where that outweighs a call, not measured.
_JOINS = frozenset({"ConcatV2", "Pack"})
_MOST_JOINED = 1 << 12


def on_a_cpu(graph: Graph, known: Mapping[str, NodePattern]) -> dict[str, NodePattern]:
    """The patterns of a graph's nodes: what raises is called, so that it still does, and so is what joins much; what
    only oneDNN has a kernel for stays outside, and what is asynchronous."""
    return {name: _on_a_cpu(graph, graph[name], op_pattern) for name, op_pattern in known.items()}


def _on_a_cpu(graph: Graph, node: Node, op_pattern: NodePattern) -> NodePattern:
    fused = texts(node.attrs["fused_ops"]) if node.op.startswith("_Fused") and "fused_ops" in node.attrs else ()
    spec = graph.specs.get(TensorId(node.name))
    dtype = spec.dtype if spec is not None else "an unknown dtype"
    by_onednn = fused and (dtype not in _FUSED_OPS.get(node.op, ()) or fused not in _FUSED)
    if by_onednn and op_pattern.pattern is not OpPattern.OPAQUE:
        return NodePattern(OpPattern.OPAQUE, Reason.ONEDNN_ONLY(op=node.op, dtype=dtype, fused=", ".join(fused)))
    if op_pattern.pattern is OpPattern.CALL and (how := _only_onednn(node)):
        return NodePattern(OpPattern.OPAQUE, Reason.ONEDNN_WAY(op=node.op, how=how))
    if node.op in _ASYNCHRONOUS and op_pattern.pattern is OpPattern.CALL:
        return NodePattern(OpPattern.OPAQUE, Reason.ASYNCHRONOUS(op=node.op))
    if op_pattern.pattern not in IN_KERNELS:
        return op_pattern
    if node.op in _RAISES:
        return called(graph, node, Reason.RAISES(what=_RAISES[node.op]))
    if node.op in _RANKS:
        return called(graph, node, Reason.RANKED_ON_CPU())
    if node.op in _JOINS and _joined(graph, node, op_pattern) > _MOST_JOINED:
        copied = called(graph, node, Reason.JOINS())
        return copied if copied.pattern is OpPattern.CALL else op_pattern
    return op_pattern


def _only_onednn(node: Node) -> str:
    """What only oneDNN's kernel of an op of images can do on a CPU; "" if nothing. A region calls TensorFlow's own."""
    if text(node.attrs.get("data_format")) in _CHANNELS_FIRST:
        return "with channels first"
    dilated = set(integers(node.attrs.get("dilations"))) - {1}
    return "with dilations" if dilated and node.op.startswith(_UNDILATED) else ""


def _joined(graph: Graph, node: Node, op_pattern: NodePattern) -> int:
    """How many numbers of its parts a kernel would compute; 0 where sizes are not known."""
    sizes = graph.specs[TensorId(node.name)].sizes
    return prod(sizes) * len(op_pattern.operands) if sizes is not None else 0


def within(
    device: Capabilities, graph: Graph, known: Mapping[str, NodePattern], fetched: Collection[str] = ()
) -> dict[str, NodePattern]:
    """The patterns of a graph's nodes, less what the device cannot do; the outputs of `fetched` are results."""
    found = {}
    known = {name: _of_any_batch(device, graph[name], op_pattern) for name, op_pattern in known.items()}
    for name, op_pattern in known.items():
        reason = (
            None
            if op_pattern.pattern in (OpPattern.OPAQUE, OpPattern.CONSTANT)
            else _refusal(device, graph, graph[name], op_pattern)
        )
        found[name] = NodePattern(OpPattern.OPAQUE, reason) if reason else _read_there(graph[name], op_pattern)
    pending = [name for name in found if found[name].pattern not in (OpPattern.OPAQUE, OpPattern.CONSTANT)]
    while pending:
        node = graph[pending.pop()]
        reason = _read_on_host(device, graph, node, found, fetched)
        if reason and found[node.name].pattern is not OpPattern.OPAQUE:
            found[node.name] = NodePattern(OpPattern.OPAQUE, reason)
            pending += [tensor.node for tensor in node.inputs if found[tensor.node].pattern in IN_KERNELS]
    return found


# Where cuDNN trains, what the forward op leaves for its gradient is the inverse of the deviation. A rule leaves the
# variance, which the rule of the gradient reads.
_NORMALISES = {"FusedBatchNormGradV3": "FusedBatchNormV3", "_FusedBatchNormGradEx": "_FusedBatchNormEx"}
_VARIANCE = 4  # the gradient's input


def without_forward(graph: Graph, known: Mapping[str, NodePattern], outside: Collection[str]) -> dict[str, NodePattern]:
    """The gradients of batch norms in kernels on a GPU whose forward op TensorFlow's kernel runs: to stay outside."""
    found = {}
    for node in graph:
        if node.op not in _NORMALISES or known[node.name].pattern is OpPattern.OPAQUE:
            continue
        variance = passed(graph, node.inputs[_VARIANCE])
        training = "is_training" not in node.attrs or boolean(node.attrs["is_training"])
        if training and variance.node in outside and graph[variance.node].op == _NORMALISES[node.op]:
            found[node.name] = NodePattern(OpPattern.OPAQUE, Reason.BATCH_NORM_APART(tensor=variance))
    return found


def _read_on_host(
    device: Capabilities, graph: Graph, node: Node, known: Mapping[str, NodePattern], fetched: Collection[str]
) -> Refusal | None:
    """Why what a node makes had better be made on the host, which would have to wait for it: an op reads it
    there, or the caller does."""
    for tensor in graph.tensors(node):
        spec = graph.specs.get(tensor)
        if spec is None:
            continue
        result = Reason.HOST_RESULT(tensor=tensor, dtype=spec.dtype)
        if spec.dtype == "bool" and _compared_on_host(device, graph, node):
            if node.name in fetched:
                return result
            for use in graph.uses(tensor):
                if (graph[use.node].op, use.index) in device.decides:
                    return Reason.HOST_READ(tensor=tensor, dtype=spec.dtype, reader=use.node)
        if spec.dtype not in device.on_host:
            continue
        if node.name in fetched:
            return result
        for use in graph.uses(tensor):
            reader = known[use.node]
            if reader.pattern is not OpPattern.OPAQUE and use.index in reader.operands:
                continue
            if (graph[use.node].op, use.index) not in device.reads:
                return Reason.HOST_READ(tensor=tensor, dtype=spec.dtype, reader=use.node)
    return None


def _compared_on_host(device: Capabilities, graph: Graph, node: Node) -> bool:
    """Whether TensorFlow's kernel compares what lies in the host's memory, and leaves there what it finds."""
    specs = [graph.specs.get(tensor) for tensor in node.inputs]
    return bool(specs) and all(spec is not None and spec.dtype in device.on_host for spec in specs)


def _refusal(device: Capabilities, graph: Graph, node: Node, op_pattern: NodePattern) -> Refusal | None:
    given = [place for place in op_pattern.operands if (node.op, place) not in device.reads]
    numbers = [*(node.inputs[place] for place in given), *graph.tensors(node)]
    held = numbers if op_pattern.writes else graph.tensors(node) if op_pattern.reads else ()
    for tensor in held:
        spec = graph.specs.get(tensor)
        if spec is not None and spec.dtype in device.on_host:
            return Reason.HOST_VARIABLE(dtype=spec.dtype)
    if op_pattern.pattern is OpPattern.CALL:
        return _not_of_images(device, graph, node) if node.op in device.of_images else op_pattern.reason
    if op_pattern.pattern not in (OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT):
        return None
    if node.op not in device.products:
        return Reason.NO_PRODUCT(op=node.op)
    dtypes = {spec.dtype for tensor in numbers if (spec := graph.specs.get(tensor)) is not None}
    if len(dtypes) != 1 or not dtypes <= device.multiplied:
        return Reason.NO_PRODUCT_OF(dtypes=" and ".join(sorted(dtypes)))
    if node.op == "_FusedMatMul" and texts(node.attrs.get("fused_ops")) not in device.fused:
        return Reason.NO_FUSED_PRODUCT(op=node.op, fused=", ".join(texts(node.attrs.get("fused_ops"))))
    return None


def _not_of_images(device: Capabilities, graph: Graph, node: Node) -> Refusal | None:
    specs = [graph.specs.get(tensor) for tensor in (*node.inputs, TensorId(node.name))]
    dtypes = {spec.dtype for place, spec in enumerate(specs) if spec and place != SIZED.get(node.op)}
    if not dtypes <= device.convolved:
        return Reason.NO_CONVOLUTION_OF(dtypes=" and ".join(sorted(dtypes)))
    return convolutions.not_pooled(graph, node) if node.op in device.pooled else convolutions.refused(graph, node)


def _of_any_batch(device: Capabilities, node: Node, op_pattern: NodePattern) -> NodePattern:
    """`op_pattern`, or that of a call: of an image's gradient by cuDNN, the sizes follow from shapes.

    Only the size of the batch may be unknown (see `_not_of_images`), and the gradient of the result has it, too.
    """
    why = op_pattern.reason
    if why is None or why.reason is not Reason.SIZED_BY_DATA or node.op not in device.of_images & set(SIZED):
        return op_pattern
    return NodePattern(OpPattern.CALL, why, tuple(range(len(node.inputs))))


def _read_there(node: Node, op_pattern: NodePattern) -> NodePattern:
    """`op_pattern` without the input that says sizes: a call on a GPU holds the constant."""
    said = SIZED.get(node.op)
    if op_pattern.pattern is not OpPattern.CALL or said is None:
        return op_pattern
    return replace(op_pattern, operands=tuple(place for place in op_pattern.operands if place != said))
