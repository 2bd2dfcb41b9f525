"""Tensors that are the same number everywhere."""

from __future__ import annotations

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.known_numbers import number_of
from graph_passes.lower.program_writer import ProgramWriter, Steps
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal


def _constant(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    number = number_of(w.graph, TensorId(node.name))
    return w.number(w.shapes.dtype(TensorId(node.name)), 0 if number is None else number)
    yield


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    return None if number_of(graph, TensorId(node.name)) is not None else Reason.CONSTANTS()


def _fill(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    return (yield node.inputs[1], ())


RULES = {
    "Const": Rule(_constant, OpPattern.CONSTANT, (0, 0), _refusal),
    "ZerosLike": Rule(_constant, OpPattern.CONSTANT, (0, 0)),
    "OnesLike": Rule(_constant, OpPattern.CONSTANT, (0, 0)),
    "Fill": Rule(_fill, OpPattern.LAYOUT, (1, 2)),
}
