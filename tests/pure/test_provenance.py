"""Tensors traced through ops that only move elements, against NumPy doing the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.recurrent.find.provenance import integers, is_zero, spread, trace
from tests.tiers import examples


class Moves:
    """A graph of moves, and what they make of numbers."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[TensorId, TensorSpec] = {}
        self.constants: dict[str, Any] = {}
        self.values: dict[TensorId, Any] = {}

    def add(self, op: str, inputs: list[TensorId], values: list[Any]) -> list[TensorId]:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(Node(name, op, inputs, outputs=len(values)))
        tensors = [TensorId(name, index) for index in range(len(values))]
        for tensor, value in zip(tensors, values, strict=True):
            self.specs[tensor] = TensorSpec("float32", 4, np.shape(value))
            self.values[tensor] = value
        return tensors

    def constant(self, value: Any) -> TensorId:
        (tensor,) = self.add("Const", [], [np.asarray(value, np.int32)])
        self.constants[tensor.node] = np.asarray(value, np.int32)
        return tensor

    def source(self, *shape: int) -> TensorId:
        start = 1000 * len(self.nodes)
        return self.add("ReadVariableOp", [], [np.arange(start, start + np.prod(shape)).reshape(shape)])[0]

    def transpose(self, tensor: TensorId) -> TensorId:
        return self.add("Transpose", [tensor, self.constant([1, 0])], [self.values[tensor].T])[0]

    def flat(self, tensor: TensorId) -> TensorId:
        return self.add("Reshape", [tensor, self.constant([-1])], [self.values[tensor].reshape(-1)])[0]

    def split(self, tensor: TensorId, pieces: int, axis: int) -> list[TensorId]:
        return self.add("Split", [self.constant(axis), tensor], np.split(self.values[tensor], pieces, axis))

    def slice(self, tensor: TensorId, begin: list[int], size: list[int]) -> TensorId:
        ends = [b + (s if s >= 0 else n - b) for b, s, n in zip(begin, size, self.values[tensor].shape, strict=True)]
        value = self.values[tensor][tuple(map(slice, begin, ends))]
        return self.add("Slice", [tensor, self.constant(begin), self.constant(size)], [value])[0]

    def concat(self, tensors: list[TensorId], axis: int = 0) -> TensorId:
        value = np.concatenate([self.values[tensor] for tensor in tensors], axis)
        return self.add("ConcatV2", [*tensors, self.constant(axis)], [value])[0]

    def graph(self) -> Graph:
        return Graph(self.nodes, self.specs, self.constants)


def check(moves: Moves, tensor: TensorId) -> None:
    """Every element is the one that NumPy put there."""
    traced = trace(moves.graph(), tensor)
    assert traced is not None
    flat = np.concatenate([moves.values[source].reshape(-1) for source in traced.sources])
    np.testing.assert_array_equal(flat[traced.places], moves.values[tensor])


@settings(max_examples=examples(60))
@given(st.data())
def test_any_chain_of_moves(data: st.DataObject) -> None:
    moves = Moves()
    tensors = [moves.source(4, 6), moves.source(4, 6)]
    for _ in range(data.draw(st.integers(1, 6))):
        tensor = data.draw(st.sampled_from(tensors))
        shape = moves.values[tensor].shape
        match data.draw(st.integers(0, 3)):
            case 0:
                tensors.append(moves.transpose(tensor))
            case 1:
                axis = data.draw(st.integers(0, 1))
                tensors += moves.split(tensor, 2, axis) if shape[axis] % 2 == 0 else []
            case 2:
                begin = [data.draw(st.integers(0, size - 1)) for size in shape]
                tensors.append(moves.slice(tensor, begin, [-1, shape[1] - begin[1]]))
            case _:
                same = [other for other in tensors if moves.values[other].shape[1] == shape[1]]
                tensors.append(moves.concat([tensor, data.draw(st.sampled_from(same))]))
    check(moves, tensors[-1])
    check(moves, moves.flat(tensors[-1]))


def packed(moves: Moves) -> tuple[TensorId, TensorId, TensorId]:
    """A kernel and a bias as Keras packs them for cuDNN: (kernel, bias, vector)."""
    kernel, bias = moves.source(3, 8), moves.source(8)
    parts = [moves.flat(moves.transpose(gate)) for gate in moves.split(kernel, 4, 1)]
    return kernel, bias, moves.concat([*parts, *moves.split(bias, 4, 0)])


def test_sources_and_where_they_went() -> None:
    moves = Moves()
    kernel, bias, vector = packed(moves)
    check(moves, vector)
    traced = trace(moves.graph(), vector)
    assert traced is not None
    assert traced.sources == (kernel, bias)
    for source, places in zip(traced.sources, traced.arrangements(), strict=True):
        np.testing.assert_array_equal(moves.values[vector][places], moves.values[source])


def test_a_vector_taken_apart_again() -> None:
    moves = Moves()
    *_, vector = packed(moves)
    (gradient,) = moves.add("Backprop", [vector], [np.arange(32)])
    gates = [moves.slice(gradient, [6 * gate], [6]) for gate in range(4)]
    columns = [moves.add("Reshape", [g, moves.constant([2, 3])], [moves.values[g].reshape(2, 3)])[0] for g in gates]
    of_kernel = moves.concat([moves.transpose(column) for column in columns], 1)
    of_bias = moves.slice(gradient, [24], [8])
    for tensor in (of_kernel, of_bias):
        moves.add("Update", [tensor], [0.0])
    graph = moves.graph()
    traced, parts = trace(graph, vector), spread(graph, gradient)
    assert traced is not None
    assert parts is not None
    assert set(parts) == {of_kernel, of_bias}
    for tensor, places in zip((of_kernel, of_bias), traced.arrangements(), strict=True):
        np.testing.assert_array_equal(parts[tensor], places)


def test_what_is_mixed_with_other_tensors_is_not_followed() -> None:
    moves = Moves()
    (gradient,) = moves.add("Backprop", [], [np.arange(4)])
    moves.add("Update", [moves.concat([gradient, moves.source(4)])], [0.0])
    assert spread(moves.graph(), gradient) is None


def test_an_unknown_shape_is_not_traced() -> None:
    moves = Moves()
    tensor = moves.flat(moves.source(2, 3))
    graph = moves.graph()
    graph.specs[TensorId(moves.nodes[0].name)] = TensorSpec("float32", 4, (None, 3))
    assert trace(graph, tensor) is None


def test_integers_computed_from_shapes() -> None:
    moves = Moves()
    first, second = moves.constant([2, 3]), moves.constant([5, 3])
    offsets = moves.add("ConcatOffset", [moves.constant(0), first, second], [np.array([0, 0]), np.array([2, 0])])
    inverse = moves.add("InvertPermutation", [moves.constant([2, 0, 1])], [np.array([1, 2, 0])])[0]
    shape = moves.add("Shape", [moves.source(7, 4)], [np.array([7, 4])])[0]
    computed = moves.source(2)
    graph = moves.graph()
    for tensor in (*offsets, inverse, shape):
        np.testing.assert_array_equal(integers(graph, tensor), moves.values[tensor])
    assert integers(graph, computed) is None


def test_zeros() -> None:
    moves = Moves()
    number, zero = moves.constant([1, 0]), moves.constant([0, 0])
    (filled,) = moves.add("Fill", [number, moves.constant(0)], [np.zeros(1)])
    (like,) = moves.add("ZerosLike", [number], [np.zeros(2)])
    graph = moves.graph()
    assert [is_zero(graph, tensor) for tensor in (number, zero, filled, like)] == [False, True, True, True]
