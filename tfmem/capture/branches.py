"""Conditions without side effects as both branches and a select, so that regions hold them and XLA compiles them.

    If(p, x) -> y        then(x), else(x), y = select(p, then, else)

Both branches run, so this is for small ones, of ops that compute something for all numbers and raise nothing: an index
or a size that data decides may be guarded by the condition. Sizes that tracing knew it has checked. The other branch's
NaN is never seen: a select takes the numbers of one. The gradient of a condition reads what its branch kept in
an Optional, which the other branch leaves empty; it reads the branch's own tensor then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.ops import handle_data_util

from graph_passes.errors import GraphError
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import RANDOM, READERS, Captured, is_stateful, op_name
from tfmem.capture.inline import inline_captured

CONDITIONS = frozenset({"If", "StatelessIf"})
MOST_OPS = 100  # of both branches
MOST_NUMBERS = 1 << 20  # that a branch returns
DEEPEST = 8  # conditions in conditions
_KEPT = "TfmemKept"  # stands for an Optional of either branch; in no graph that leaves this module
_VALUE, _NONE, _GET = "OptionalFromValue", "OptionalNone", "OptionalGetValue"
# No kernel of these raises, whatever the numbers, for inputs of the sizes that were traced; but see `_SIZES`.
_NAMES = """
Abs Add AddN AddV2 All Any Asinh Atan Atan2 BatchMatMul BatchMatMulV2 BiasAdd BiasAddGrad BroadcastGradientArgs
BroadcastTo Cast Ceil ClipByValue ConcatOffset ConcatV2 Const Cos Cosh DivNoNan Elu EluGrad Equal Erf Erfc Exp
ExpandDims Expm1 Fill Floor Greater GreaterEqual Identity IdentityN Inv InvGrad IsFinite IsInf IsNan LeakyRelu
LeakyReluGrad Less LessEqual Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul Max Maximum Mean Min
Minimum Mul MulNoNan Neg NoOp NotEqual OnesLike Pack Pow Prod Range Rank ReadVariableOp RealDiv Reciprocal
ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Reshape Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Shape
Sigmoid SigmoidGrad Sign Sin Sinh Size Slice Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
SoftsignGrad Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze StopGradient StridedSlice Sub Sum Tan Tanh
TanhGrad Tile Transpose Unpack Xdivy Xlog1py Xlogy ZerosLike _FusedMatMul
"""
_SAFE = frozenset(_NAMES.split())
# The inputs that say which part of a tensor is read, or how large the result is: numbers of theirs may make a kernel
# raise, so tracing has to know them. A negative place counts from the end.
_SIZES = {
    **dict.fromkeys(("All", "Any", "Max", "Mean", "Min", "Prod", "Sum"), (1,)),
    **dict.fromkeys(("BroadcastTo", "ExpandDims", "Reshape", "Tile", "Transpose"), (1,)),
    **dict.fromkeys(("Fill", "Split"), (0,)),
    "ConcatV2": (-1,),
    "Slice": (1, 2),
    "SplitV": (1, 2),
    "StridedSlice": (1, 2, 3),
}
_OF_NUMBERS = frozenset({"BroadcastGradientArgs", "ConcatOffset", "Range"})  # all their inputs are such numbers
_OF_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
_FLOATS = frozenset(each.as_datatype_enum for each in (tf.float16, tf.bfloat16, tf.float32, tf.float64))
_DIVIDE = frozenset({"FloorDiv", "FloorMod", "RealDiv"})  # kernels of integers raise where the divisor is 0
_FREE = frozenset({"Const", "Identity", "NoOp", _VALUE, _NONE, _GET})
Library = Mapping[str, FunctionDef]


def with_selects(captured: Captured) -> Captured:
    """`captured` with its pure conditions, and those in them, as both branches and selects; itself without any."""
    refused: set[str] = set()
    while True:
        found, unknown = _attempt(captured, refused)
        if unknown <= refused:
            return found
        refused |= unknown


def _attempt(captured: Captured, refused: Collection[str]) -> tuple[Captured, set[str]]:
    """The result, and names of conditions for which that is wrong: an Optional of theirs is read by something else."""
    found, roots, sized = captured, dict[str, str](), _of_known_sizes(captured)
    for _ in range(DEEPEST):
        library = {each.signature.name: each for each in found.graph_def.library.function}
        fetched = set(map(op_name, found.fetches))
        wanted = {
            node.name
            for node in found.graph_def.node
            if node.op in CONDITIONS and node.name not in fetched and roots.get(node.name, node.name) not in refused
            if (node.name in sized or node.name in roots) and _is_pure(node, library)
        }
        if not wanted:
            break
        before = {node.name for node in found.graph_def.node}
        found = inline_captured(replace(found, graph_def=_called(found.graph_def, wanted)))
        for node in found.graph_def.node:
            if node.name not in before:
                outer = next(name for name in wanted if node.name.startswith(f"{name}/"))
                roots[node.name] = roots.get(outer, outer)
    if found is captured:
        return captured, set()
    graph_def, unknown = _without_optionals(found)
    return replace(found, graph_def=graph_def), {roots[name] for name in unknown}


def _is_pure(node: NodeDef, library: Library) -> bool:
    """Whether both branches may run: small, of ops that raise nothing, with results of equal, known shapes."""
    if node.attr["Tcond"].type != tf.bool.as_datatype_enum:
        return False
    shapes = node.attr["output_shapes"].list.shape
    types = node.attr["Tout"].list.type
    if len(shapes) != len(types):
        return False
    for dtype, shape in zip(types, shapes, strict=True):
        sizes = [dim.size for dim in shape.dim]
        known = not shape.unknown_rank and -1 not in sizes and prod(sizes) <= MOST_NUMBERS
        if dtype != tf.variant.as_datatype_enum and not known:
            return False
    count = _safe_ops(node, library, 0, [False] * len(node.input))
    return count is not None and count <= MOST_OPS


def _safe_ops(node: NodeDef, library: Library, depth: int, given: Sequence[bool]) -> int | None:
    """The number of ops in both branches, those of conditions in them included; None if one of them may raise.

    Args:
        node: the condition.
        library: the functions.
        depth: how many conditions it is in.
        given: of each of its inputs, the predicate first, whether tracing knew its numbers.
    """
    bodies = [library.get(node.attr[name].func.name) for name in ("then_branch", "else_branch")]
    if depth >= DEEPEST or None in bodies:
        return None
    count = 0
    for body in bodies:
        assert body is not None
        known = dict(zip((arg.name for arg in body.signature.input_arg), given[1:], strict=False))
        constants = {each.name: each for each in body.node_def if each.op == "Const"}
        for inner in body.node_def:
            data = [known.get(op_name(name), False) for name in inner.input if not name.startswith("^")]
            known[inner.name] = inner.op == "Const" or inner.op in _OF_SHAPES or (inner.op in _SAFE and all(data))
            if inner.op in CONDITIONS and _is_pure_shape(inner):
                within = _safe_ops(inner, library, depth + 1, data)
            else:
                within = int(inner.op not in _FREE) if _is_safe(inner, constants, data) else None
            if within is None:
                return None
            count += within
    return count


def _of_known_sizes(captured: Captured) -> set[str]:
    """The conditions whose branches are given tensors of known shapes only."""
    names = [node.name for node in captured.graph_def.node if node.op in CONDITIONS]
    if not names:
        return set()
    try:
        shapes = shaped_graph(captured)
    except GraphError:  # whatever reads the graph next says so
        return set()
    return {name for name in names if _has_known_sizes(shapes.get_operation_by_name(name))}


def _has_known_sizes(condition: tf.Operation) -> bool:
    """Whether tracing knew the shapes of all that the branches are given, of variables, too."""
    for tensor in condition.inputs:
        if tensor.dtype == tf.resource:
            data = handle_data_util.get_resource_handle_data(tensor)
            shapes = [tf.TensorShape(each.shape) for each in data.shape_and_type] if data.is_set else []
        else:
            shapes = [tensor.shape] if tensor.dtype != tf.variant else []
        if not all(shape.is_fully_defined() for shape in shapes):
            return False
    return True


def _is_pure_shape(node: NodeDef) -> bool:
    sizes = [dim.size for shape in node.attr["output_shapes"].list.shape for dim in shape.dim]
    return -1 not in sizes and node.attr["Tcond"].type == tf.bool.as_datatype_enum


def _is_safe(node: NodeDef, constants: Mapping[str, NodeDef], known: Sequence[bool]) -> bool:
    """Whether an op raises for no numbers of its inputs, of which tracing knew some."""
    if node.op in (_VALUE, _NONE, _GET):
        return True
    if node.op in _OF_NUMBERS and not all(known):
        return False
    if not all(known[place] for place in _SIZES.get(node.op, ())):
        return False
    if node.op in _DIVIDE and not _of_floats(node):
        divisor = constants.get(op_name(node.input[1]))
        return divisor is not None and bool(np.all(tf.make_ndarray(divisor.attr["value"].tensor) > 0))
    return node.op in _SAFE | _DIVIDE and (node.op != "Pow" or _of_floats(node))


def _of_floats(node: NodeDef) -> bool:
    return node.attr["T"].type in _FLOATS


def _called(graph_def: GraphDef, wanted: Collection[str]) -> GraphDef:
    """`graph_def` whose conditions of these names are a call of each branch, and selects."""
    result = GraphDef(versions=graph_def.versions, library=graph_def.library)
    results: dict[str, str] = {}
    for node in graph_def.node:
        if node.name not in wanted:
            result.node.append(node)
            continue
        given, *inputs = node.input
        predicate = f"{node.name}/predicate"
        same = result.node.add(name=predicate, op="Identity", input=[given], device=node.device)
        same.attr["T"].type = tf.bool.as_datatype_enum
        calls = []
        for name in ("then_branch", "else_branch"):
            call = result.node.add(name=f"{node.name}/{name[:4]}", op="PartitionedCall", device=node.device)
            call.input.extend(inputs)
            call.attr["f"].CopyFrom(node.attr[name])
            for types in ("Tin", "Tout"):
                call.attr[types].CopyFrom(node.attr[types])
            calls.append(call.name)
        selects = []
        for index, dtype in enumerate(node.attr["Tout"].list.type):
            kept = dtype == tf.variant.as_datatype_enum
            new = result.node.add(name=f"{node.name}/select_{index}", op=_KEPT if kept else "SelectV2")
            new.device = node.device
            new.input.extend([*([] if kept else [predicate]), *(f"{call}:{index}" for call in calls)])
            new.attr["T"].type = dtype
            results[f"{node.name}:{index}" if index else node.name] = new.name
            selects += [] if kept else [new.name]
        result.node.add(name=node.name, op="NoOp", input=[f"^{name}" for name in (*calls, *selects)])
    for node in result.node:
        node.input[:] = [results.get(name.removesuffix(":0"), name) for name in node.input]
    return result


def _without_optionals(captured: Captured) -> tuple[GraphDef, set[str]]:
    """The graph without what stands for Optionals, and names of those that something else than their reader needs."""
    optionals = _Optionals({node.name: node for node in captured.graph_def.node})
    result = GraphDef(versions=captured.graph_def.versions, library=captured.graph_def.library)
    nodes = captured.graph_def.node
    hollow = {f"^{node.name}" for node in nodes if node.op in (_VALUE, _NONE, _KEPT)}  # nothing has to wait for these
    for given in nodes:
        node = result.node.add()
        node.CopyFrom(given)
        found = optionals.held(node.input[0], node.name) if node.op == _GET else None
        if found is None:
            continue
        types = list(node.attr["output_types"].list.type)
        hollow |= {f"^{node.name}"} if tf.variant.as_datatype_enum in types else set()
        node.ClearField("attr")
        if len(found) == 1:
            node.op = "Identity"
            node.attr["T"].type = types[0]
        else:
            node.op = "IdentityN"
            node.attr["T"].list.type.extend(types)
        node.input[:] = [*found, *(name for name in given.input[1:] if name.startswith("^"))]
    made = {node.name: node for node in result.node}
    for node in result.node:
        node.input[:] = [name for name in node.input if name not in hollow]
    waiting = [*captured.fetches, *captured.control_fetches, *(node.name for node in result.node if _acts(node))]
    needed: set[str] = set()
    while waiting:
        name = op_name(waiting.pop())
        if name not in needed and name in made:
            needed.add(name)
            waiting += made[name].input
    kept = {node.name for node in result.node if node.op == _KEPT}
    stays = [node for node in result.node if node.name in needed - kept or node.op == "Placeholder"]
    del result.node[:]
    result.node.extend(stays)
    return result, kept & needed


def _acts(node: NodeDef) -> bool:
    return is_stateful(node.op) and node.op not in READERS | RANDOM


class _Optionals:
    """What Optionals hold, in a graph of which conditions are inlined."""

    def __init__(self, nodes: Mapping[str, NodeDef]) -> None:
        self._nodes = nodes

    def held(self, tensor: str, reader: str) -> list[str] | None:
        """The tensors in an Optional that `reader` reads; None where it is empty, or unknown."""
        node = self._nodes.get(op_name(tensor))
        if node is None:
            return None
        if node.op == _VALUE:
            return [name for name in node.input if not name.startswith("^")]
        if node.op == "Identity":
            return self.held(node.input[0], reader)
        if node.op == _GET:
            inner = self._element(node, tensor, reader)
            return None if inner is None else self.held(inner, reader)
        if node.op != _KEPT:
            return None
        side = self._side(node.name.rpartition("/")[0], reader)
        if side is not None:
            return self.held(node.input[side], reader)
        found = [held for held in (self.held(name, reader) for name in node.input) if held is not None]
        return found[0] if len(found) == 1 else None

    def _element(self, node: NodeDef, tensor: str, reader: str) -> str | None:
        held = self.held(node.input[0], reader)
        return None if held is None else held[int(tensor.partition(":")[2] or 0)]

    def _side(self, condition: str, reader: str) -> int | None:
        """The branch of an equal condition in which the reader lies: 0 for "then", 1 for "else"; None for neither."""
        predicate = self._origin(f"{condition}/predicate", reader)
        parts = reader.split("/")
        for place, part in enumerate(parts):
            other = "/".join([*parts[:place], "predicate"])
            if part in ("then", "else") and other in self._nodes and self._origin(other, reader) == predicate:
                return int(part == "else")
        return None

    def _origin(self, tensor: str, reader: str) -> str:
        """The tensor that is handed on as `tensor`."""
        node = self._nodes.get(op_name(tensor))
        while node is not None and node.op in ("Identity", _GET):
            source = node.input[0] if node.op == "Identity" else self._element(node, tensor, reader)
            if source is None:
                break
            tensor, node = source, self._nodes.get(op_name(source))
        return tensor.removesuffix(":0")
