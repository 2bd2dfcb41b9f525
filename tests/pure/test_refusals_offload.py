"""Every reason for which the offload pass leaves a tensor in device memory, as a tensor that stays for this reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.refusals import Reason

MIB = 1 << 20


def why(
    shape: Any = (MIB,),
    dtype: str = "float32",
    op: str = "Relu",
    reader: str = "Neg",
    fetched: bool = False,
    merging: bool = False,
) -> set[Reason]:
    """Why `x`, which is made first and read last, cannot be moved."""
    nodes = [
        Node("given", "Placeholder", outputs=1),
        Node("x", op, [TensorId("given")], outputs=1),
        Node("a", "Neg", [TensorId("x")], outputs=1),
        Node("b", "Neg", [TensorId("a")], outputs=1),
        Node("late", reader, [TensorId("given"), TensorId("x"), TensorId("b")], outputs=1),
    ]
    specs = {TensorId(node.name): TensorSpec("float32", 4, (MIB,)) for node in nodes}
    specs[TensorId("x")] = TensorSpec(dtype, 4, shape)
    fetches: Sequence[TensorId] = [TensorId("x")] if fetched else []
    step = pipeline.Step.read(Graph(nodes, specs), [node.name for node in nodes], fetches, merging=merging)
    buffers = step.timeline(Roofline(load("unit"))).buffers
    return {each.pinned_by.reason for each in buffers if each.tensor == TensorId("x") and each.pinned_by}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": "qint32"}, Reason.NO_SIZE),
        ({"shape": (4,)}, Reason.SMALL),
        ({"dtype": "int32"}, Reason.HOST_INT32),
        ({"fetched": True}, Reason.RETURNED),
        ({"op": "CollectiveReduceV2"}, Reason.COLLECTIVE),
        ({"shape": (None, 4)}, Reason.UNKNOWN_SIZE),
        ({"op": "MaxPool", "reader": "MaxPoolGrad", "merging": True}, Reason.PAIRED),
        ({}, None),
    ],
    ids=str,
)
def test_tensors_that_stay(given: dict[str, Any], reason: Reason | None) -> None:
    assert why(**given) == ({reason} if reason else set())


def test_a_tensor_that_is_read_under_two_shapes() -> None:
    nodes = [
        Node("given", "Placeholder", outputs=1),
        Node("x", "Relu", [TensorId("given")], outputs=1),
        Node("turned", "Reshape", [TensorId("x"), TensorId("given")], outputs=1),
        Node("a", "MatMul", [TensorId("turned")], outputs=1),
        Node("b", "MatMul", [TensorId("a")], outputs=1),
        Node("late", "MatMul", [TensorId("x"), TensorId("b")], outputs=1),
        Node("later", "MatMul", [TensorId("turned"), TensorId("late")], outputs=1),
    ]
    specs = {TensorId(node.name): TensorSpec("float32", 4, (MIB,)) for node in nodes}
    specs[TensorId("turned")] = TensorSpec("float32", 4, (2, MIB // 2))
    step = pipeline.Step.read(Graph(nodes, specs), [node.name for node in nodes])
    buffers = step.timeline(Roofline(load("unit"))).buffers
    assert Reason.SEVERAL_SHAPES in {each.pinned_by.reason for each in buffers if each.pinned_by}
