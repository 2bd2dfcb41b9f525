"""What a GPU leaves out of its regions, though a CPU has it in them; and what a CPU calls."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.analysis.device_support import CUDA, on_a_cpu, within
from graph_passes.analysis.op_pattern import NodePattern, OpPattern, patterns_of
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec
from graph_passes.refusals import Reason


def kind_and_reason(
    op: str, dtype: str, inputs: int, shape: tuple[int, ...] = (4, 4), **attrs: Any
) -> tuple[OpPattern, str]:
    """The pattern of an op whose tensors are all alike."""
    names = [f"x{number}" for number in range(inputs)]
    given = [Node(name, "Placeholder", outputs=1) for name in names]
    node = Node("y", op, list(map(TensorId, names)), outputs=1, attrs={"T": DataType(dtype), **attrs})
    spec = TensorSpec(dtype, 4, shape)
    graph = Graph([*given, node], dict.fromkeys(map(TensorId, [*names, "y"]), spec))
    found = within(CUDA, graph, patterns_of(graph))["y"]
    return found.pattern, str(found.reason or "")


def counted(reader: str, index: int, fetched: bool = False) -> tuple[OpPattern, str]:
    """The count of a sum of int32 numbers that an op reads as input `index`."""
    given = [Node(name, "Placeholder", outputs=1) for name in ("i", "x")]
    total = Node("total", "AddV2", [TensorId("i"), TensorId("i")], outputs=1, attrs={"T": DataType("int32")})
    inputs = [TensorId("x"), TensorId("x")]
    inputs[index] = TensorId("total")
    node = Node("y", reader, inputs, outputs=1)
    specs = {TensorId(name): TensorSpec("int32", 4, (4,)) for name in ("i", "total")}
    specs |= {TensorId(name): TensorSpec("float32", 4, (4,)) for name in ("x", "y")}
    graph = Graph([*given, total, node], specs)
    found = within(CUDA, graph, patterns_of(graph), ["total"] if fetched else [])["total"]
    return found.pattern, str(found.reason or "")


def test_int32_is_computed_on_the_gpu_where_nobody_reads_it_on_the_host() -> None:
    assert kind_and_reason("AddV2", "int32", 2) == (OpPattern.ELEMENTWISE, "")
    assert counted("SparseSoftmaxCrossEntropyWithLogits", 1) == (OpPattern.ELEMENTWISE, "")
    assert counted("UnsortedSegmentSum", 1) == (OpPattern.ELEMENTWISE, "")  # outside, and reads it on the device
    read = "'total:0' is int32, which 'y' reads in host memory on a GPU"
    assert counted("Reshape", 1) == (OpPattern.OPAQUE, read)
    assert counted("Bincount", 0) == (OpPattern.OPAQUE, read)
    kept = "'total:0' is int32, which TensorFlow keeps in host memory on a GPU, and is a result"
    assert counted("AddV2", 1, fetched=True) == (OpPattern.OPAQUE, kept)


def test_what_only_the_host_reads_is_computed_there_altogether() -> None:
    names = ["a", "b", "c"]
    nodes = [Node(name, "AddV2", [TensorId(before)] * 2, outputs=1) for before, name in zip("xab", "abc", strict=True)]
    graph = Graph(
        [Node("x", "Placeholder", outputs=1), *nodes],
        {TensorId(name): TensorSpec("int32", 4, (4,)) for name in ["x", *names]},
    )
    found = within(CUDA, graph, patterns_of(graph), ["c"])
    assert [found[name].pattern for name in names] == [OpPattern.OPAQUE] * 3


@pytest.mark.parametrize(
    ("dtype", "reader", "index", "fetched", "stays"),
    [
        ("int32", "If", 0, False, True),
        ("int32", "LoopCond", 0, False, True),
        ("int32", "If", 1, False, False),  # handed on to a branch
        ("int32", "LogicalNot", 0, False, False),
        ("int32", "LogicalNot", 0, True, True),  # whether a loop goes on
        ("float32", "If", 0, True, False),  # computed on the device, whatever reads it
    ],
)
def test_what_decides_is_compared_where_it_lies(
    dtype: str, reader: str, index: int, fetched: bool, stays: bool
) -> None:
    nodes = [Node(name, "Placeholder", outputs=1) for name in ("a", "b", "p")]
    less = Node("less", "Less", [TensorId("a"), TensorId("b")], outputs=1, attrs={"T": DataType(dtype)})
    inputs = [TensorId("p")] * index + [TensorId("less")]
    specs = dict.fromkeys(map(TensorId, ("a", "b")), TensorSpec(dtype, 4, ()))
    specs |= dict.fromkeys(map(TensorId, ("less", "p", "y")), TensorSpec("bool", 1, ()))
    graph = Graph([*nodes, less, Node("y", reader, inputs, outputs=1)], specs)
    found = within(CUDA, graph, patterns_of(graph), ["less"] if fetched else [])["less"]
    assert (found.pattern is OpPattern.OPAQUE) == stays, found
    assert not stays or str(found.reason).startswith("'less:0' is bool, which ")


def test_variables_of_int32_lie_on_the_host() -> None:
    read = Node("y", "ReadVariableOp", [TensorId("v")], outputs=1, attrs={"dtype": DataType("int32")})
    specs = {TensorId("v"): TensorSpec("resource", 8, ()), TensorId("y"): TensorSpec("int32", 4, (4,))}
    graph = Graph([Node("v", "Placeholder", outputs=1), read], specs)
    known = patterns_of(graph) | {"y": NodePattern(OpPattern.READ, reads=(0,))}
    assert within(CUDA, graph, known)["y"].reason == Reason.HOST_VARIABLE(dtype="int32")


@pytest.mark.parametrize("op", ["MatMul", "BatchMatMulV2"])
def test_products_of_floats_are_called(op: str) -> None:
    kind, reason = kind_and_reason(op, "float32", 2)
    assert kind in (OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT)
    assert not reason
    assert kind_and_reason(op, "int64", 2) == (OpPattern.OPAQUE, "regions on a GPU do not multiply int64")


def test_other_products_are_not() -> None:
    assert kind_and_reason("Einsum", "float32", 2) == (OpPattern.OPAQUE, "regions on a GPU do not call Einsum")
    assert kind_and_reason("_FusedMatMul", "float32", 3, fused_ops=("BiasAdd", "Relu"))[0] is OpPattern.PRODUCT
    found = kind_and_reason("_FusedMatMul", "float32", 3, fused_ops=("BiasAdd", "Tanh"))
    assert found == (OpPattern.OPAQUE, "regions on a GPU do not call _FusedMatMul with BiasAdd, Tanh")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", ["_FusedMatMul", "_FusedConv2D", "_FusedDepthwiseConv2dNative"])
@pytest.mark.parametrize(
    ("fused", "by_tensorflow"),
    [
        (("BiasAdd",), True),
        (("BiasAdd", "Relu"), True),
        (("FusedBatchNorm", "LeakyRelu"), True),
        (("BiasAdd", "Add", "Relu"), False),
        (("BiasAdd", "GeluExact"), False),
    ],
)
def test_what_only_onednn_has_a_kernel_for_stays_outside_on_a_cpu(
    op: str, dtype: str, fused: tuple[str, ...], by_tensorflow: bool
) -> None:
    by_tensorflow = by_tensorflow and (op, dtype) in {
        ("_FusedMatMul", "float32"),
        ("_FusedMatMul", "float16"),
        ("_FusedConv2D", "float32"),
    }
    node = Node("y", op, [TensorId("x")], outputs=1, attrs={"T": DataType(dtype), "fused_ops": fused})
    spec = TensorSpec(dtype, 4, (4, 4))
    graph = Graph([Node("x", "Placeholder", outputs=1), node], dict.fromkeys(map(TensorId, ("x", "y")), spec))
    found = on_a_cpu(graph, {"y": NodePattern(OpPattern.CALL, "no rule")})["y"]
    assert found.pattern is (OpPattern.CALL if by_tensorflow else OpPattern.OPAQUE)
    if not by_tensorflow:
        assert str(found.reason) == f"only oneDNN runs {op} of {dtype} with {', '.join(fused)}"


@pytest.mark.parametrize(("op", "known"), [("Pack", True), ("ConcatV2", True), ("Pack", False)])
@pytest.mark.parametrize("rows", [4, 4096])
def test_much_is_joined_by_copies(op: str, known: bool, rows: int) -> None:
    part = TensorSpec("float32", 4, (rows, 2))
    names = ["a", "b"]
    nodes = [Node(name, "Placeholder", outputs=1) for name in names]
    specs = dict.fromkeys(map(TensorId, names), part)
    if op == "ConcatV2":
        nodes.append(Node("axis", "Const", outputs=1, attrs={"value": 1}))
        specs[TensorId("axis")] = TensorSpec("int32", 4, ())
        names.append("axis")
    whole = (rows, 4) if op == "ConcatV2" else (2, rows if known else None, 2)
    specs[TensorId("y")] = TensorSpec("float32", 4, whole)
    graph = Graph([*nodes, Node("y", op, list(map(TensorId, names)), outputs=1, attrs={"axis": 0})], specs)
    given = {name: NodePattern(OpPattern.OPAQUE) for name in names} | {
        "y": NodePattern(OpPattern.LAYOUT, operands=(0, 1))
    }
    found = on_a_cpu(graph, given)["y"]
    assert found.pattern is (OpPattern.CALL if known and rows == 4096 else OpPattern.LAYOUT)
    assert found.reason == (Reason.JOINS() if found.pattern is OpPattern.CALL else None)
