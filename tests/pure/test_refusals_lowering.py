"""Reasons for which ops of a region are no program together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from custom_ops.errors import ProgramError
from graph_passes.analysis.op_pattern import NodePattern
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import OpPattern
from graph_passes.lower import lower_nodes, program_writer
from graph_passes.lower.lower_nodes import Lowering, lower_kernel
from graph_passes.lower.program_writer import LoweringError
from graph_passes.lower.shapes import Shapes
from graph_passes.passes.fuse import lower_region as lower_region_module
from graph_passes.passes.fuse.lower_region import lower_region
from graph_passes.passes.fuse.partition import regions
from graph_passes.passes.fuse.plan import refusal
from graph_passes.refusals import Reason
from tests.refused_graphs import chain, tensors

Shape = tuple[int | None, ...] | None


def lowered(graph: Graph, *members: str, outputs: Sequence[TensorId] | None = None) -> Any:
    with pytest.raises(LoweringError) as raised:
        lower_kernel(graph, members, outputs or [TensorId(members[-1])])
    return raised.value.refusal


def test_ops_that_are_no_program_together() -> None:
    x = ("x", "Placeholder", (), (None, 3), {})
    open_rows = tensors(x, ("w", "Placeholder", (), (None, 3), {}), ("y", "AddV2", ("x", "w"), (None, 3), {}))
    assert lowered(open_rows, "y").reason is Reason.BROADCAST
    paddings = ("p", "Const", (), (2, 2), {"dtype": "int32", "value": [[1, 0], [0, 0]]})
    assert lowered(tensors(x, paddings, ("y", "Pad", ("x", "p"), (None, 3), {})), "y").reason is Reason.PICKED
    many = ("m", "Const", (), (2,), {"dtype": "int32", "value": [2, 1]})
    assert lowered(tensors(x, many, ("y", "Tile", ("x", "m"), (None, 3), {})), "y").reason is Reason.REPEATED
    norm = tensors(
        ("x", "Placeholder", (), (2, 2, 2, 3), {}),
        ("s", "Placeholder", (), (3,), {}),
        ("y", "FusedBatchNormV3", ("x", "s", "s", "s", "s"), (2, 2, 2, 3), {"outputs": 6, "epsilon": 1e-3}),
    )
    assert lowered(norm, "y", outputs=[TensorId("y", 5)]).reason is Reason.RESERVE_SPACE


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_writer, "MOST_NODES", 2)
    graph = chain(("a", "Exp", ("x",)), ("b", "Tanh", ("a",)), ("out", "Exp", ("b",)))
    assert lowered(graph, "a", "b", "out") == Reason.NODES(count=2)


def test_a_position_that_a_dtype_does_not_hold() -> None:
    graph = tensors(
        ("x", "Placeholder", (), (4,), {"dtype": "int32"}),
        ("c", "Const", (), (), {"dtype": "int32", "value": 1}),
        ("y", "ArgMax", ("x", "axis"), (), {"dtype": "int64"}),
        ("axis", "Const", (), (), {"dtype": "int32", "value": 0}),
    )
    found = program_writer.ProgramWriter(graph, None, lambda *_: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(LoweringError) as raised:
        found.number("int32", 1 << 40)
    assert raised.value.refusal == Reason.NUMBERS(low=1 << 40, high=1 << 40, dtype="int32")


def test_a_region_of_tensors_and_variables_of_unknown_shape() -> None:
    def region(graph: Graph, *steps: str) -> Any:
        with pytest.raises(LoweringError) as raised:
            lower_region(graph, [[step] for step in steps], lambda node: b"", [TensorId(steps[-1])], called=steps)
        return raised.value.refusal

    called = tensors(("x", "Placeholder", (), None, {}), ("y", "MatMul", ("x", "x"), None, {}))
    assert region(called, "y") == Reason.TENSOR_RANK()
    x, y = Node("x", "Placeholder", outputs=1), Node("y", "MatMul", [TensorId("x")] * 2, outputs=1)
    unknown = Graph([x, y], {TensorId("y"): TensorSpec("float32", 4, (4, 4))})
    assert region(unknown, "y") == Reason.TENSOR_UNKNOWN(tensor=TensorId("x"))
    assigned = tensors(
        ("v", "Placeholder", (), (), {"dtype": "resource"}),
        ("x", "Placeholder", (), (4,), {}),
        ("y", "AssignVariableOp", ("v", "x"), None, {"outputs": 0}),
    )
    with pytest.raises(LoweringError) as raised:
        _assigning(assigned)
    assert raised.value.refusal == Reason.VARIABLE_UNKNOWN(node="y", op="AssignVariableOp")


def _assigning(graph: Graph) -> None:
    builder = lower_region_module._Builder(
        graph, [["y"]], lambda node: b"", frozenset(), frozenset(), frozenset(), Shapes(graph)
    )
    builder._variable(graph["y"], 0)


def test_products_that_no_tiles_compute() -> None:
    graph = tensors(
        ("x", "Placeholder", (), (4, 4), {}),
        ("axes", "Const", (), (1,), {"dtype": "int32", "value": [0]}),
        ("sum", "Sum", ("x", "axes"), (1, 4), {"keep_dims": True}),
        ("sub", "Sub", ("x", "sum"), (4, 4), {}),
        ("y", "MatMul", ("sub", "x"), (4, 4), {"T": DataType("float32")}),
    )
    found = refusal(graph, ["y"], Lowering(graph, Shapes(graph)))(["sum", "sub", "y"])
    assert found is not None
    assert found.reason is Reason.PRODUCT_TILES


def test_places_that_another_tensor_says() -> None:
    indices = ("i", "Placeholder", (), (2,), {"dtype": "int32"})
    state = [
        ("k", "Placeholder", (), (1,), {"dtype": "uint64"}),
        ("c", "Placeholder", (), (2,), {"dtype": "uint64"}),
        ("a", "Const", (), (), {"dtype": "int32", "value": 1}),
        ("s", "Const", (), (1,), {"dtype": "int32", "value": [4]}),
        ("axis", "Const", (), (), {"dtype": "int32", "value": 0}),
    ]
    drawn = tensors(
        indices,
        *state,
        ("r", "StatelessRandomUniformV2", ("s", "k", "c", "a"), (4,), {}),
        ("y", "GatherV2", ("r", "i", "axis"), (2,), {}),
    )
    assert lowered(drawn, "r", "y") == Reason.GATHER_AGAIN(tensor=TensorId("r"))
    large = tensors(
        indices,
        state[-1],
        ("x", "Placeholder", (), (1 << 11, 1 << 10, 1 << 11), {}),
        ("shape", "Const", (), (2,), {"dtype": "int32", "value": [1 << 10, 1 << 22]}),
        ("r", "Reshape", ("x", "shape"), (1 << 10, 1 << 22), {}),
        ("y", "GatherV2", ("r", "i", "axis"), (2, 1 << 22), {}),
    )
    assert lowered(large, "r", "y").reason is Reason.GATHER_RANGE


def test_dear_values_that_each_segment_would_compute_again() -> None:
    graph = tensors(
        ("x", "Placeholder", (), (8,), {}),
        ("ids", "Placeholder", (), (8,), {"dtype": "int32"}),
        ("n", "Const", (), (), {"dtype": "int32", "value": 4}),
        ("e", "Exp", ("x",), (8,), {}),
        ("y", "UnsortedSegmentSum", ("e", "ids", "n"), (4,), {}),
    )
    assert lowered(graph, "e", "y") == Reason.SEGMENTS_AGAIN(tensor=TensorId("e"))


def test_dear_values_that_each_number_of_a_cumulative_sum_would_compute_again() -> None:
    graph = tensors(
        ("x", "Placeholder", (), (8,), {}),
        ("axis", "Const", (), (), {"dtype": "int32", "value": 0}),
        ("e", "Exp", ("x",), (8,), {}),
        ("y", "Cumsum", ("e", "axis"), (8,), {}),
    )
    assert lowered(graph, "e", "y") == Reason.CUMULATED_AGAIN(tensor=TensorId("e"))


def test_a_seed_that_the_same_kernel_would_compute() -> None:
    graph = tensors(
        ("state", "Placeholder", (), (2,), {"dtype": "int64"}),
        ("shape", "Const", (), (1,), {"dtype": "int32", "value": [8]}),
        ("seed", "Neg", ("state",), (2,), {"dtype": "int64"}),
        ("y", "StatelessRandomUniform", ("shape", "seed"), (8,), {}),
    )
    assert lowered(graph, "seed", "y") == Reason.RANDOM_SEED(tensor=TensorId("seed"))


def test_a_called_op_that_takes_a_variable_which_its_region_assigns() -> None:
    """As `find_regions` asks it of the members of each region."""
    nodes = [
        Node("v", "VarHandleOp", outputs=1),
        Node("x", "Placeholder", outputs=1),
        Node("assign", "AssignVariableOp", [TensorId("v"), TensorId("x")]),
        Node("call", "Lgamma", [TensorId("v")], outputs=1),
    ]
    known = {
        "assign": NodePattern(OpPattern.UPDATE, writes=(0,)),
        "call": NodePattern(OpPattern.CALL, reads=(0,)),
    }
    found = regions._conflicts(Graph(nodes), known, ["assign", "call"])
    assert found == {"call": Reason.VARIABLE_ASSIGNED(tensor=TensorId("v"))}


def test_a_program_that_the_language_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise ProgramError("too many axes")

    monkeypatch.setattr(lower_nodes, "finished", refuses)
    graph = chain(("out", "Exp", ("x",)))
    assert lowered(graph, "out").reason is Reason.PROGRAM
