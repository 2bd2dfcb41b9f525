"""What a GPU leaves out of its regions, though a CPU has it in them; and what a CPU calls."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.fusion.capabilities import CUDA, on_a_cpu, within
from graph_passes.fusion.lower.meaning import Kind, Meaning, meanings
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec


def kind_and_reason(
    op: str, dtype: str, inputs: int, shape: tuple[int, ...] = (4, 4), **attrs: Any
) -> tuple[Kind, str]:
    """Of an op whose tensors are all alike."""
    names = [f"x{number}" for number in range(inputs)]
    given = [Node(name, "Placeholder", outputs=1) for name in names]
    node = Node("y", op, list(map(TensorId, names)), outputs=1, attrs={"T": DataType(dtype), **attrs})
    spec = TensorSpec(dtype, 4, shape)
    graph = Graph([*given, node], dict.fromkeys(map(TensorId, [*names, "y"]), spec))
    found = within(CUDA, graph, meanings(graph))["y"]
    return found.kind, found.reason


def test_int32_lies_on_the_host() -> None:
    assert kind_and_reason("AddV2", "float32", 2) == (Kind.ELEMENTWISE, "")
    assert kind_and_reason("AddV2", "int64", 2) == (Kind.ELEMENTWISE, "")
    kind, reason = kind_and_reason("AddV2", "int32", 2)
    assert kind is Kind.OPAQUE
    assert reason == "'x0:0' of dtype int32, which lies in the host's memory on a GPU"


@pytest.mark.parametrize("op", ["MatMul", "BatchMatMulV2"])
def test_products_of_floats_are_called(op: str) -> None:
    kind, reason = kind_and_reason(op, "float32", 2)
    assert kind in (Kind.PRODUCT, Kind.BATCHED_PRODUCT)
    assert not reason
    assert kind_and_reason(op, "int64", 2) == (Kind.OPAQUE, "regions on a GPU multiply no int64")


def test_other_products_are_not() -> None:
    assert kind_and_reason("Einsum", "float32", 2) == (Kind.OPAQUE, "regions on a GPU call no Einsum")
    assert kind_and_reason("_FusedMatMul", "float32", 3, fused_ops=("BiasAdd", "Relu"))[0] is Kind.PRODUCT
    found = kind_and_reason("_FusedMatMul", "float32", 3, fused_ops=("BiasAdd", "Tanh"))
    assert found == (Kind.OPAQUE, "regions on a GPU call no _FusedMatMul of BiasAdd, Tanh")


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
    given = {name: Meaning(Kind.OPAQUE) for name in names} | {"y": Meaning(Kind.LAYOUT, operands=(0, 1))}
    found = on_a_cpu(graph, given)["y"]
    assert found.kind is (Kind.CALL if known and rows == 4096 else Kind.LAYOUT)
    assert found.reason == ("TensorFlow's kernel joins by copies" if found.kind is Kind.CALL else "")
