"""Products of matrices as programs, beside TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr import reference
from custom_ops.expr.nodes import Reduce
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.lower_nodes import LoweredKernel, lower_kernel
from graph_passes.lower.shapes import Shapes


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def lowered(graph: Graph, outputs: Sequence[TensorId]) -> LoweredKernel:
    members = [node.name for node in graph if node.op not in ("Placeholder", "Const", "NoOp")]
    return lower_kernel(graph, members, outputs, Shapes(graph))


def computed(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the program of a function computes, in the function's shapes."""
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in arguments]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = from_tf_graph(concrete.graph)
    kernel = lowered(graph, [TensorId(tensor.op.name, tensor.value_index) for tensor in concrete.outputs])
    given = dict(zip([tensor.op.name for tensor in concrete.inputs], arguments, strict=True))
    tensors = [
        np.asarray(given[value.node]).reshape(shape)
        for value, shape in zip(kernel.inputs, kernel.input_shapes, strict=True)
    ]
    shapes = [tensor.shape for tensor in concrete.outputs]
    results = reference.run(kernel.program, tensors)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]


@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", [(3, 5, 4), (1, 5, 4), (3, 1, 4), (3, 5, 1)])
def test_matrices(flips: tuple[bool, bool], size: tuple[int, int, int]) -> None:
    rows, columns, depth = size
    x = normal(*((depth, rows) if flips[0] else (rows, depth)))
    y = normal(*((columns, depth) if flips[1] else (depth, columns)), seed=1)

    def function(x: Any, y: Any) -> Any:
        return tf.matmul(x, y, transpose_a=flips[0], transpose_b=flips[1])

    (found,) = computed(function, x, y)
    np.testing.assert_allclose(found, function(x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flips", [(False, False), (True, True)])
@pytest.mark.parametrize("batches", [((2, 3), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (2, 1)), ((2, 3), (3,)), ((), (2,))])
def test_batches(flips: tuple[bool, bool], batches: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x = normal(*batches[0], *((6, 4) if flips[0] else (4, 6)))
    y = normal(*batches[1], *((5, 6) if flips[1] else (6, 5)), seed=1)

    def function(x: Any, y: Any) -> Any:
        return tf.raw_ops.BatchMatMulV2(x=x, y=y, adj_x=flips[0], adj_y=flips[1])

    (found,) = computed(function, x, y)
    np.testing.assert_allclose(found, function(x, y), rtol=1e-5, atol=1e-5)


def test_attention_is_one_program() -> None:
    def function(x: Any, q: Any, k: Any, v: Any) -> Any:
        query, key, value = (tf.transpose(tf.reshape(x @ w, [2, 7, 3, 4]), [0, 2, 1, 3]) for w in (q, k, v))
        weights = tf.nn.softmax(tf.matmul(query * 0.5, key, transpose_b=True))
        return tf.reshape(tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3]), [14, 12]) + x

    given = normal(14, 12), *(normal(12, 12, seed=seed) for seed in range(3))
    (found,) = computed(function, *given)
    np.testing.assert_allclose(found, function(*given), rtol=1e-4, atol=1e-4)


def test_half_types_are_added_up_in_float32() -> None:
    x, y = np.full((1, 4096), 0.1, np.float16), np.full((4096, 2), 0.1, np.float16)
    (found,) = computed(lambda x, y: x @ y, x, y)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, 40.94, rtol=1e-3)


def test_what_may_be_rounded_to_tf32_is_marked() -> None:
    @tf.function(input_signature=[tf.TensorSpec((3, 4)), tf.TensorSpec((4, 5))])
    def step(x: Any, y: Any) -> Any:
        return x @ y, tf.reduce_sum(x[:, :, None] * y[None], 1)

    concrete = step.get_concrete_function()
    graph = from_tf_graph(concrete.graph)
    kernel = lowered(graph, [TensorId(tensor.op.name) for tensor in concrete.outputs])
    kinds = [node.kind for node in kernel.program.nodes if isinstance(node, Reduce)]
    assert sorted(kinds) == ["dot", "sum"]


@pytest.mark.parametrize("fused", [("BiasAdd",), ("BiasAdd", "Relu")])
def test_fused_products(fused: tuple[str, ...]) -> None:
    shapes = {"x": (4, 6), "w": (6, 5), "b": (5,), "y": (4, 5)}
    nodes = [Node(name, "Placeholder", [], [], "", {}, 1) for name in "xwb"]
    nodes.append(Node("y", "_FusedMatMul", [TensorId(name) for name in "xwb"], [], "", {"fused_ops": fused}, 1))
    graph = Graph(nodes, {TensorId(name): TensorSpec("float32", 4, shape) for name, shape in shapes.items()})
    kernel = lowered(graph, [TensorId("y")])
    given = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    (found,) = reference.run(kernel.program, [given[value.node] for value in kernel.inputs])
    expected = given["x"] @ given["w"] + given["b"]
    np.testing.assert_allclose(found, np.maximum(expected, 0) if "Relu" in fused else expected, rtol=1e-5, atol=1e-5)
