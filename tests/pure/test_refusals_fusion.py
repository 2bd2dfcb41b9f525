"""Every reason for which the fusion pass leaves an op, as an op that it leaves for this reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from graph_passes.analysis.device_support import CUDA, on_a_cpu, within, without_forward
from graph_passes.analysis.op_pattern import pattern_of, patterns_of
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.rules import RULES
from graph_passes.passes.fuse.partition.partition import partition_graph
from graph_passes.passes.fuse.plan import Needs, plan_fusion
from graph_passes.refusals import Reason
from tests.fusion_graphs import UNIT
from tests.pure.test_fusion_lowering import Builder
from tests.refused_graphs import chain, tensors

Shape = tuple[int | None, ...] | None
SIZES = {"int32": 4, "int64": 8, "float32": 4, "bool": 1, "uint64": 8, "resource": 0, "string": 0}


@dataclass
class Of:
    """A tensor that an op is given: its shape and dtype, its numbers if it is constant, what it refers to."""

    shape: Shape = (4,)
    dtype: str = "float32"
    value: Any = None
    behind: TensorSpec | None = None
    made_by: str = "Placeholder"

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, SIZES.get(self.dtype, 4), self.shape, self.behind)


@dataclass
class Op:
    """An op `y` of some inputs."""

    op: str
    inputs: Sequence[Of] = (Of(),)
    outputs: Sequence[Of] = (Of(),)
    stateful: bool = False
    attrs: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> Graph:
        names = [f"x{place}" for place in range(len(self.inputs))]
        kinds = ["Const" if each.value is not None else each.made_by for each in self.inputs]
        nodes = [Node(name, kind, outputs=1) for name, kind in zip(names, kinds, strict=True)]
        y = Node("y", self.op, list(map(TensorId, names)), outputs=len(self.outputs), stateful=self.stateful)
        y.attrs.update(self.attrs)
        specs = {TensorId(name): each.spec for name, each in zip(names, self.inputs, strict=True)}
        specs |= {TensorId("y", place): each.spec for place, each in enumerate(self.outputs)}
        constants = {
            n: np.array(x.value, x.dtype) for n, x in zip(names, self.inputs, strict=True) if x.value is not None
        }
        return Graph([*nodes, y], specs, constants)


def whole(*value: int, dtype: str = "int32") -> Of:
    return Of((len(value),), dtype, list(value))


def variable(shape: Shape = (4,), dtype: str = "float32") -> Of:
    return Of((), "resource", behind=TensorSpec(dtype, 4, shape), made_by="VarHandleOp")


OPEN, MATRIX = Of((None,)), Of((4, 4))
INDEX = Of((), "int32")
STATE = (Of((1,), "uint64"), Of((2,), "uint64"))

BY_OP = {
    Reason.ARGUMENT: Op("_Arg", ()),
    Reason.NO_RULE: Op("Lgamma"),
    Reason.RANK: Op("Exp", (Of(None),), (Of(None),)),
    Reason.DTYPE: Op("Exp", (Of(dtype="string"),), (Of(dtype="string"),)),
    Reason.EMPTY: Op("Exp", (Of((0,)),), (Of((0,)),)),
    Reason.VARIABLE_RANK: Op("ReadVariableOp", (variable(None),), stateful=True),
    Reason.VARIABLE_DTYPE: Op("ReadVariableOp", (variable(dtype="string"),), stateful=True),
    Reason.VARIABLE_EMPTY: Op("ReadVariableOp", (variable((0,)),), stateful=True),
    Reason.VIEW_SIZES: Op("Reshape", (OPEN, Of((2,), "int32")), (Of((None, None)),)),
    Reason.RANDOM: Op("RandomUniform", (whole(4),), stateful=True),
    Reason.RANDOM_POOL: Op("FractionalMaxPool", (Of((1, 4, 4, 1)),), (Of((1, 2, 2, 1)),)),
    Reason.UPDATE_WITHOUT_RULE: Op("ResourceApplyAdagradDA", (variable(),), (), stateful=True),
    Reason.STATEFUL: Op("Print", stateful=True),
    Reason.SIZED_BY_DATA: Op("Where", (Of(dtype="bool"),), (Of((None, 1), "int64"),)),
    Reason.OP_DTYPE: Op("Exp", (Of(dtype="int32"),), (Of(dtype="int32"),)),
    Reason.DIVISION: Op("FloorDiv", (Of(dtype="int32"), Of(dtype="int32")), (Of(dtype="int32"),)),
    Reason.TRUNCATING_CAST: Op("Cast", attrs={"Truncate": True}),
    Reason.COMPOSITION: Op("_UnaryOpsComposition", attrs={"op_names": ("Frobnicate",)}),
    Reason.CHANNELS_FIRST: Op(
        "FusedBatchNormV3",
        (Of((2, 3, 4, 4)), *[Of((3,))] * 4),
        [Of((2, 3, 4, 4)), *[Of((3,))] * 5],
        attrs={"data_format": "NCHW"},
    ),
    Reason.BATCH_NORM_SIZE: Op(
        "FusedBatchNormV3", (Of((None, 4, 4, 3)), *[Of((3,))] * 4), [Of((None, 4, 4, 3)), *[Of((3,))] * 5]
    ),
    Reason.BATCH_NORM_ACTIVATION: Op(
        "_FusedBatchNormEx",
        (Of((2, 4, 4, 4)), *[Of((4,))] * 4),
        [Of((2, 4, 4, 4)), *[Of((4,))] * 5],
        attrs={"activation_mode": "Elu"},
    ),
    Reason.CONSTANTS: Op("Const", ()),
    Reason.GATHER_AXIS: Op("GatherV2", (MATRIX, INDEX, INDEX)),
    Reason.GATHER_INDICES: Op("GatherNd", (MATRIX, Of((2, None), "int32"))),
    Reason.SLICE_BOUNDS: Op("StridedSlice", (Of(), *[Of((1,), "int32")] * 3)),
    Reason.SLICE_GRADIENT: Op("StridedSliceGrad", (*[Of((1,), "int32")] * 4, Of())),
    Reason.UNPACK_COUNT: Op("Unpack", (Of((None, 4)),), attrs={"axis": 0}),
    Reason.CHECKED_SHAPE: Op("EnsureShape", (OPEN,)),
    Reason.SQUEEZED: Op("Squeeze", (Of((None, 4)),)),
    Reason.RANGE: Op("Range", (Of((), value=0), Of((), value=4), Of((), value=1))),
    Reason.NOT_CONSTANT: Op("Transpose", (MATRIX, Of((2,), "int32")), (MATRIX,)),
    Reason.REDUCED_AXES: Op("Sum", (MATRIX, Of((1,), "int32"))),
    Reason.REDUCED_AXIS: Op("ArgMax", (MATRIX, INDEX), (Of(dtype="int64"),)),
    Reason.FUSED_OPS: Op("_FusedMatMul", (MATRIX, MATRIX), (MATRIX,), attrs={"fused_ops": ("Tanh",)}),
    Reason.SEGMENTS_UNKNOWN: Op("UnsortedSegmentSum", (OPEN, Of((None,), "int32"), INDEX), (OPEN,)),
    Reason.SEGMENTS: Op("UnsortedSegmentSum", (Of((1 << 13,)), Of((1 << 13,), "int32"), INDEX), (Of((1 << 25,)),)),
    Reason.CUMULATED: Op("Cumsum", (Of((3, 129)), whole(1)), (Of((3, 129)),)),
    Reason.SEGMENTS_BOOL: Op("UnsortedSegmentSum", (Of(dtype="bool"), Of(dtype="int32"), INDEX), (Of(dtype="bool"),)),
    Reason.CLASSES: Op(
        "SparseSoftmaxCrossEntropyWithLogits", (Of((4, None)), Of((4,), "int64")), (Of(), Of((4, None)))
    ),
    Reason.RANDOM_PLACE: Op("StatelessRandomUniformV2", (whole(4), *STATE, INDEX), (Of((4, None)),)),
    Reason.RANDOM_STATE: Op("StatelessRandomUniformV2", (whole(4), Of(), Of(), INDEX)),
    Reason.RANDOM_ALGORITHM: Op("StatelessRandomUniformV2", (whole(4), *STATE, INDEX)),
    Reason.VARIABLE_SHAPE: Op("AssignAddVariableOp", (variable(None), Of()), (), stateful=True),
    Reason.VARIABLE_TYPE: Op("AssignAddVariableOp", (variable(), Of((5,))), (), stateful=True),
}


def reasons(found: Any) -> set[Reason]:
    """The reason of a refusal, and of those in it."""
    if found is None:
        return set()
    inner = [value for name, value in found.arguments if name == "because"]
    return {found.reason}.union(*map(reasons, inner))


@pytest.mark.parametrize("reason", BY_OP, ids=lambda reason: reason.name)
def test_an_op_that_no_region_or_no_kernel_holds(reason: Reason) -> None:
    graph = BY_OP[reason].graph()
    if reason is Reason.FUSED_OPS:  # of a product: it can be called all the same
        found = RULES[graph["y"].op].refusal(graph, graph["y"])
    else:
        found = pattern_of(graph, graph["y"]).reason
    assert reason in reasons(found), found
    assert str(found)


HOST = {
    Reason.ONEDNN_ONLY: Op("_FusedConv2D", (MATRIX,), (MATRIX,), attrs={"fused_ops": ("BiasAdd", "Tanh")}),
    Reason.ONEDNN_WAY: Op("AvgPool", (Of((2, 3, 8, 8)),), (Of((2, 3, 4, 4)),), attrs={"data_format": "NCHW"}),
    Reason.ASYNCHRONOUS: Op("CropAndResize"),
    Reason.RAISES: Op("UnsortedSegmentSum", (Of(), Of(dtype="int32"), INDEX)),
    Reason.JOINS: Op("ConcatV2", (Of((5000,)), Of((5000,)), Of((), "int32", 0)), (Of((10000,)),)),
}


@pytest.mark.parametrize("reason", HOST, ids=lambda reason: reason.name)
def test_an_op_that_a_cpu_leaves_to_tensorflow(reason: Reason) -> None:
    graph = HOST[reason].graph()
    assert on_a_cpu(graph, patterns_of(graph))["y"].reason.reason is reason


def convolution(
    image: Shape = (2, 8, 8, 3), dtype: str = "float32", result: Shape = (2, 4, 4, 4), padding: str = "VALID"
) -> Op:
    """A convolution of 3 x 3 pixels, each other one."""
    attrs = {"strides": (1, 2, 2, 1), "padding": padding}
    return Op("Conv2D", [Of(image, dtype), Of((3, 3, 3, 4), dtype)], [Of(result, dtype)], attrs=attrs)


def pooling(image: Shape = (2, 8, 8, 3), padding: str = "VALID", over: int = 1) -> Op:
    """The maximum of 2 x 2 pixels, of `over` channels."""
    attrs = {"ksize": (1, 2, 2, over), "strides": (1, 2, 2, 1), "padding": padding}
    return Op("MaxPool", [Of(image)], [Of((2, 4, 4, 3))], attrs=attrs)


def averaged(sizes: Of, image: Shape = (2, 8, 8, 3)) -> Op:
    """The gradient of the average of 2 x 2 pixels."""
    attrs = {"ksize": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "padding": "VALID"}
    return Op("AvgPoolGrad", [sizes, Of((2, 4, 4, 3))], [Of(image)], attrs=attrs)


ON_A_GPU = {
    Reason.NO_CONVOLUTION_OF: convolution(dtype="float64"),
    Reason.CONVOLUTION_SIZES: convolution((2, None, 8, 3)),
    Reason.CONVOLUTION_LARGE: convolution((1 << 24, 8, 8, 3)),
    Reason.NO_POOLING: pooling(padding="EXPLICIT"),
    Reason.HOST_RESULT: Op("AddV2", [Of(dtype="int32")] * 2, [Of(dtype="int32")]),
    Reason.HOST_VARIABLE: Op("ReadVariableOp", (variable(dtype="int32"),), [Of(dtype="int32")], stateful=True),
    Reason.NO_PRODUCT: Op("Einsum", (MATRIX, MATRIX), (MATRIX,)),
    Reason.NO_PRODUCT_OF: Op("MatMul", [Of((4, 4), "int64")] * 2, [Of((4, 4), "int64")]),
    Reason.NO_FUSED_PRODUCT: Op("_FusedMatMul", (MATRIX, MATRIX), (MATRIX,), attrs={"fused_ops": ("BiasAdd", "Tanh")}),
}


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (pooling(), None),
        (pooling((None, 8, 8, 3)), None),
        (pooling((2, 8, None, 3)), Reason.CONVOLUTION_SIZES),
        (pooling((1 << 24, 8, 8, 3)), Reason.CONVOLUTION_LARGE),
        (pooling(over=2), Reason.NO_POOLING),
        (averaged(Of((4,), "int32", [2, 8, 8, 3])), None),
        (averaged(Of((4,), "int32")), None),
        (averaged(Of((4,), "int32"), (None, None, 8, 3)), Reason.CONVOLUTION_SIZES),
        (Op("MaxPool", [Of((2, 8, 8, 3), "float64")], [Of((2, 4, 4, 3), "float64")]), Reason.NO_CONVOLUTION_OF),
    ],
)
def test_pooling_that_a_region_on_a_gpu_holds(op: Op, reason: Reason | None) -> None:
    graph = op.graph()
    found = within(CUDA, graph, patterns_of(graph), ["y"])["y"]
    if reason is None:
        assert found.pattern is OpPattern.CALL
    else:
        assert found.pattern is OpPattern.OPAQUE
        assert found.reason.reason is reason


@pytest.mark.parametrize("reason", ON_A_GPU, ids=lambda reason: reason.name)
def test_an_op_that_no_region_on_a_gpu_holds(reason: Reason) -> None:
    graph = ON_A_GPU[reason].graph()
    assert within(CUDA, graph, patterns_of(graph), ["y"])["y"].reason.reason is reason


def test_a_convolution_that_is_padded_more_behind_than_before() -> None:
    found = within(CUDA, (graph := convolution(padding="SAME").graph()), patterns_of(graph), ["y"])["y"]
    assert found.pattern is OpPattern.CALL
    count = ((1 << 31) // (8 * 8 * 3)) - 1  # of images of which all are less than int32 counts, but with their padding
    result = (count, 4, 4, 4)
    large = convolution((count, 8, 8, 3), result=result, padding="SAME").graph()
    reason = within(CUDA, large, patterns_of(large), ["y"])["y"].reason
    assert reason == Reason.CONVOLUTION_LARGE(count=count * 9 * 9 * 3)


@pytest.mark.parametrize("op", ["Conv2D", "DepthwiseConv2dNative"])
@pytest.mark.parametrize(
    ("image", "gpu"),
    [((None, 8, 8, 4), OpPattern.CALL), ((2, None, 8, 4), OpPattern.OPAQUE), ((None, 8, 8, None), OpPattern.OPAQUE)],
)
def test_a_gradient_whose_sizes_are_a_tensor(op: str, image: Shape, gpu: OpPattern) -> None:
    """A call on a GPU does not read them where all but the batch is known; TensorFlow's kernel on a CPU does."""
    b = Builder()
    b.add("x", "Placeholder", (), image)
    b.add("sizes", "Shape", ("x",), (4,), dtype="int32")
    b.add("w", "Placeholder", (), (3, 3, 4, 1))
    b.add("dy", "Placeholder", (), (image[0], 4, 4, 4 if op != "Conv2D" else 1))
    inputs = ("sizes", "w", "dy")
    b.add("y", f"{op}BackpropInput", inputs, image, attrs={"strides": (1, 2, 2, 1), "padding": "SAME"})
    graph = b.graph()
    found = within(CUDA, graph, patterns_of(graph), ["y"])["y"]
    assert found.pattern is gpu
    assert found.operands == ((1, 2) if gpu is OpPattern.CALL else ())
    assert on_a_cpu(graph, patterns_of(graph))["y"].pattern is OpPattern.OPAQUE


def test_what_the_host_reads_stays_there() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (4,), dtype="int32")
    b.add("y", "AddV2", ("x", "x"), (4,), dtype="int32")
    b.add("z", "Print", ("y",), (4,), dtype="int32", stateful=True)
    graph = b.graph()
    found = within(CUDA, graph, patterns_of(graph))["y"].reason
    assert found == Reason.HOST_READ(tensor=TensorId("y"), dtype="int32", reader="z")


class Given:
    """A source of one graph, of which `out` is fetched."""

    def __init__(self, graph: Graph, keep: Sequence[str] = ("out",)) -> None:
        self.graph, self._keep = graph, set(keep)

    def read(self, inlined: Any = None, functions: bool = True) -> Graph:
        return self.graph

    def keep(self, graph: Graph) -> set[str]:
        return self._keep


NEEDS = Needs(UNIT, "/job:localhost/replica:0/task:0/device:CPU:0", lambda node: b"")


def test_reasons_that_depend_on_what_is_around_an_op() -> None:
    graph = chain(("a", "Exp", ("x",)), ("out", "Tanh", ("a",)))
    fed = partition_graph(graph, patterns_of(graph), UNIT, fed=["a"]).reasons
    assert fed["a"] == Reason.FED()
    assert partition_graph(graph, patterns_of(graph), UNIT, kinds={OpPattern.CALL}).reasons[
        "a"
    ] == Reason.NO_SUCH_PATTERN(pattern="elementwise")
    alone = chain(("out", "Exp", ("x",)))
    assert partition_graph(alone, patterns_of(alone), UNIT).reasons["out"].reason is Reason.NO_GAIN
    parts = chain(("a", "Exp", ("x",)), ("b", "Exp", ("a",)), ("c", "Tanh", ("x",)), ("d", "Tanh", ("c",)))
    plan, _ = plan_fusion(Given(parts, ()), Needs(**{**vars(NEEDS), "roots": ["b", "d"]}))
    assert {each.reason for each in plan.reasons.values()} <= {Reason.RUN_ALONE, Reason.ARGUMENT, Reason.NO_GAIN}


def test_a_gradient_whose_batch_norm_stays_outside() -> None:
    b = Builder()
    for name in ("upstream", "x", "scale", "mean", "variance"):
        b.add(name, "Placeholder", (), (2, 4, 4, 3) if name in ("upstream", "x") else (3,))
    b.add("norm", "FusedBatchNormV3", ("x", "scale", "scale", "mean", "variance"), (2, 4, 4, 3))
    b.add("out", "FusedBatchNormGradV3", ("upstream", "x", "scale", "mean", "norm"), (2, 4, 4, 3))
    found = without_forward(b.graph(), patterns_of(b.graph()), ["norm"])
    assert found["out"].reason == Reason.BATCH_NORM_APART(tensor=TensorId("norm"))


def test_a_caller_that_may_run_one_of_two_roots() -> None:
    from graph_passes.passes.fuse import plan as fuse

    graph = chain(("a", "Exp", ("x",)), ("out", "Tanh", ("a",)))
    assert fuse._only(["out"], patterns_of(graph))["a"].reason == Reason.RUN_ALONE()


def test_a_node_of_several_outputs_that_is_fetched_by_name() -> None:
    graph = Graph(
        [Node("x", "Placeholder", outputs=1), Node("out", "Unpack", [TensorId("x")], outputs=2, attrs={"axis": 0})],
        {
            TensorId("x"): TensorSpec("float32", 4, (2,)),
            **{TensorId("out", n): TensorSpec("float32", 4, ()) for n in (0, 1)},
        },
    )
    plan, _ = plan_fusion(Given(graph), NEEDS)
    assert plan.reasons["out"] == Reason.NOT_ALONE()


def test_what_lies_behind_a_switch_is_dead_or_not() -> None:
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("p", "Placeholder", outputs=1),
        Node("switch", "Switch", [TensorId("x"), TensorId("p")], outputs=2),
        Node("out", "Exp", [TensorId("switch", 1)], outputs=1),
    ]
    specs = {
        TensorId(name, n): TensorSpec("float32", 4, (4,))
        for name, n in (("x", 0), ("switch", 0), ("switch", 1), ("out", 0))
    }
    graph = Graph(nodes, specs | {TensorId("p"): TensorSpec("bool", 1, ())})
    assert partition_graph(graph, patterns_of(graph), UNIT).reasons["out"] == Reason.BEHIND_SWITCH()


def test_a_constant_alone_and_a_view_of_an_argument() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (4, 4))
    b.add("shape", "Const", (), (1,), dtype="int32", value=[16])
    b.add("out", "Reshape", ("x", "shape"), (16,))
    graph = b.graph()
    found = partition_graph(graph, patterns_of(graph), UNIT).reasons
    assert (found["out"], found["shape"]) == (Reason.NO_TIME(), Reason.CONSTANTS())
    ones = tensors(("c", "Const", (), (4,), {"value": [1.0] * 4}), ("out", "Print", ("c",), (4,), {}))
    found = partition_graph(ones, patterns_of(ones), UNIT, kinds=frozenset(OpPattern)).reasons
    assert found["c"] == Reason.HELD_CONSTANT()
