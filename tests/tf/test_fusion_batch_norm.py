"""Batch norms that Grappler has fused with an addition and a ReLU, which it does on GPUs alone: read as these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.analysis.device_support import CUDA, within, without_forward
from graph_passes.analysis.op_pattern import OpPattern, patterns_of
from graph_passes.graph.serde import from_tf_graph
from graph_passes.refusals import Reason
from tests.tf.fusion_lowering import Lowered

raw = tf.raw_ops
TYPES = {"T", "U"}


def made(op: str, inputs: list[Any], dtypes: list[Any], **attrs: Any) -> list[Any]:
    """The results of an op that has no function in Python, and no kernel on a CPU."""
    graph = tf.compat.v1.get_default_graph()
    values = {name: tf.compat.v1.AttrValue(**value) for name, value in attrs.items()}
    return list(graph.create_op(op, inputs, dtypes, attrs=values, name=op[1:]).outputs)


def attributes(x: Any, training: bool, sides: int, activation: str) -> dict[str, Any]:
    return {
        "T": {"type": x.dtype.as_datatype_enum},
        "U": {"type": tf.float32.as_datatype_enum},
        "epsilon": {"f": 1e-3},
        "is_training": {"b": training},
        "num_side_inputs": {"i": sides},
        "activation_mode": {"s": activation.encode()},
        "data_format": {"s": b"NHWC"},
    }


def fused(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, *side: Any, training: bool, activation: str
) -> Any:
    kinds = [x.dtype] + [tf.float32] * 5
    nodes = [x, scale, offset, mean, variance, *side]
    found = made("_FusedBatchNormEx", nodes, kinds, **attributes(x, training, len(side), activation))
    return found[: 3 if training else 1]


def apart(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, *side: Any, training: bool, activation: str
) -> Any:
    y, *rest = raw.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=1e-3, is_training=training
    )
    y = sum(side, y)
    y = tf.nn.relu(y) if activation == "Relu" else y
    return [y, *rest][: 3 if training else 1]


def arguments(shape: tuple[int, ...], dtype: str, sides: int = 1) -> list[Any]:
    rng = np.random.default_rng(0)
    x, *side = (rng.normal(size=shape).astype(dtype) for _ in range(1 + sides))
    scale, offset, mean = (rng.normal(size=shape[-1:]).astype(np.float32) for _ in range(3))
    return [x, scale, offset, mean, np.abs(rng.normal(size=shape[-1:])).astype(np.float32), *side]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sides", [0, 1])
@pytest.mark.parametrize("activation", ["Relu", "Identity"])
def test_it_is_a_batch_norm_an_addition_and_a_relu(activation: str, sides: int, training: bool, dtype: str) -> None:
    given = arguments((3, 5, 1, 12), dtype, sides)
    options = {"training": training, "activation": activation}
    found = Lowered(lambda *given: fused(*given, **options), *given).run()
    expected = Lowered(lambda *given: apart(*given, **options), *given).expected()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, *((1e-5, 1e-5) if dtype == "float32" else (4e-3, 4e-3)))


def test_what_is_no_number_reaches_what_tensorflow_says() -> None:
    given = arguments((2, 3, 3, 4), "float32")
    given[0][0, 0, 0, 0], given[0][0, 0, 0, 1], given[5][0, 0, 0, 2] = np.nan, np.inf, -np.inf
    options = {"training": False, "activation": "Relu"}
    found = Lowered(lambda *given: fused(*given, **options), *given).run()
    expected = Lowered(lambda *given: apart(*given, **options), *given).expected()
    np.testing.assert_allclose(found[0], expected[0], 1e-5, 1e-6)


def gradient(upstream: Any, x: Any, scale: Any, mean: Any, variance: Any, offset: Any, y: Any, **how: Any) -> Any:
    kinds = [x.dtype] + [tf.float32] * 4 + [x.dtype]
    nodes = [upstream, x, scale, mean, variance, tf.zeros([0]), offset, y]
    found = made("_FusedBatchNormGradEx", nodes, kinds, **attributes(x, how["training"], 1, how["activation"]))
    return [*found[:3], found[5]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["Relu", "Identity"])
def test_its_gradient_is_that_of_all_three(activation: str, training: bool) -> None:
    """The gradient of a side input is, too; behind a ReLU only what is positive has one."""
    x, scale, offset, mean, variance, y = arguments((3, 5, 1, 12), "float32")
    upstream = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def expected(upstream: Any, x: Any, scale: Any, mean: Any, variance: Any, offset: Any, y: Any) -> Any:
        upstream = raw.ReluGrad(gradients=upstream, features=y) if activation == "Relu" else upstream
        found = raw.FusedBatchNormGradV3(
            y_backprop=upstream, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
            reserve_space_3=tf.zeros([0]), epsilon=1e-3, is_training=training,
        )[:3]  # fmt: skip
        return [*found, upstream]

    given = [upstream, x, scale, mean, variance, offset, y]
    found = Lowered(lambda *given: gradient(*given, training=training, activation=activation), *given).run()
    for one, other in zip(found, Lowered(expected, *given[:5], offset, y).expected(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4)


def test_an_activation_of_another_name_stays_outside() -> None:
    def step(*given: Any) -> Any:
        return fused(*given, training=True, activation="Elu")

    graph = tf.function(step, autograph=False).get_concrete_function(
        *(tf.TensorSpec(each.shape, each.dtype) for each in arguments((2, 3, 3, 4), "float32"))
    ).graph  # fmt: skip
    found = patterns_of(from_tf_graph(graph))["FusedBatchNormEx"]
    assert found.reason is not None
    assert found.reason.reason is Reason.BATCH_NORM_ACTIVATION


@pytest.mark.parametrize("training", [True, False])
def test_a_gradient_follows_its_forward_op(training: bool) -> None:
    """cuDNN leaves the inverse of the deviation for its gradient, where it trains; a rule leaves the variance."""

    def step(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = raw.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=mean, variance=variance, is_training=training
            )[0]
        return tape.gradient(y, x, tf.sin(y))

    specs = [tf.TensorSpec(each.shape, each.dtype) for each in arguments((2, 3, 3, 4), "float32", 0)]
    graph = from_tf_graph(tf.function(step, autograph=False).get_concrete_function(*specs).graph)
    known = within(CUDA, graph, patterns_of(graph))
    (forward,) = (node.name for node in graph if node.op == "FusedBatchNormV3")
    (backward,) = (node.name for node in graph if node.op == "FusedBatchNormGradV3")
    assert without_forward(graph, known, []) == {}
    lost = without_forward(graph, known, [forward])
    assert list(lost) == [backward] * training
    assert all(each.pattern is OpPattern.OPAQUE for each in lost.values())
    assert without_forward(graph, known | lost, [forward]) == {}
