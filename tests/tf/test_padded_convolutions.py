"""Convolutions whose padding differs before and behind, lowered for calls that pad both sides alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from custom_ops.fusion.region import Call, Kernel
from custom_ops.fusion.text import to_text
from graph_passes.analysis.cost.region_costs import region_costs
from graph_passes.analysis.device_support import CUDA
from graph_passes.graph import serde
from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import FUSION_OP
from graph_passes.passes.fuse.lower_region import Lowered, lower_region
from tests.tf import fusion_steps
from tests.tf.padded_reference import (
    BACK,
    DEPTHWISE,
    EXPLICIT,
    LAYOUTS,
    UNEVEN,
    attributes,
    convolved,
    numbers,
)

KINDS = ["", "BackpropInput", "BackpropFilter"]


def lowered(op: str, kind: str, x: Any, w: Any, dy: Any, attrs: Any, evenly: Any = CUDA.convolutions) -> Lowered:
    """The region of a convolution or a gradient of one."""
    tensors = {"x": x, "w": w, "dy": dy}
    specs = {TensorId(name): TensorSpec("float32", 4, value.shape) for name, value in tensors.items()}
    places: dict[str, tuple[str, ...]] = {
        "": ("x", "w"),
        "BackpropInput": ("sizes", "w", "dy"),
        "BackpropFilter": ("x", "sizes", "dy"),
    }
    made = {"": dy, "BackpropInput": x, "BackpropFilter": w}[kind]
    sizes = np.array(made.shape, np.int32)
    nodes = [Node(name, "Placeholder", outputs=1) for name in tensors]
    nodes += [Node("sizes", "Const", outputs=1)]
    inputs = [TensorId(name) for name in places[kind]]
    nodes += [Node("y", op + kind, inputs, attrs={"T": DataType("float32"), **attrs}, outputs=1)]
    specs |= {TensorId("sizes"): TensorSpec("int32", 4, (4,)), TensorId("y"): TensorSpec("float32", 4, made.shape)}
    graph = Graph(nodes, specs, {"sizes": sizes})
    return lower_region(graph, [["y"]], serde.attributes, [TensorId("y")], evenly=evenly)


def called(attrs: bytes, inputs: Any) -> list[Any]:
    """A convolution without padding, in either layout and with dilations."""
    node = node_def_pb2.NodeDef.FromString(attrs)
    layout = node.attr["data_format"].s.decode()
    assert (node.attr["padding"].s, list(node.attr["explicit_paddings"].list.i)) == (b"VALID", [])
    first = 1 if layout == "NHWC" else 2
    strides, dilations = (node.attr[name].list.i[first : first + 2] for name in ("strides", "dilations"))
    op = node.op.partition("Backprop")[0]
    last = lambda image: tf.transpose(image, BACK[layout])  # noqa: E731
    convolve = lambda x, w: tf.transpose(convolved(op, last(x), w, strides, dilations, "VALID"), LAYOUTS[layout])  # noqa: E731
    if node.op == op:
        return [convolve(*map(tf.constant, inputs)).numpy()]
    place = 0 if node.op.endswith("BackpropInput") else 1
    sizes = tf.make_ndarray(node.attr[f"constant_{place}"].tensor)
    factors = [tf.zeros(sizes), tf.constant(inputs[0])]
    factors = factors if place == 0 else factors[::-1]
    with tf.GradientTape() as tape:
        tape.watch(factors[place])
        y = convolve(*factors)
    return [tape.gradient(y, factors[place], tf.constant(inputs[1])).numpy()]


def check(
    monkeypatch: pytest.MonkeyPatch, op: str, size: Any, window: Any, strides: Any, dilations: Any, padding: Any
) -> None:
    monkeypatch.setattr(fusion_steps, "call", called)
    x, w = tf.constant(numbers(2, *size, 3)), tf.constant(numbers(*window, 3, 2 if op == DEPTHWISE else 4))
    with tf.GradientTape() as tape:
        tape.watch((x, w))
        y = convolved(op, x, w, strides, dilations, padding)
    dy = tf.constant(numbers(*y.shape))
    exact = dict(zip(KINDS, (y, *tape.gradient(y, (x, w), dy)), strict=True))
    for layout, order in LAYOUTS.items():
        attrs = attributes(strides, dilations, padding, layout)
        given = {"x": x.numpy().transpose(order), "w": w.numpy(), "dy": dy.numpy().transpose(order)}
        for kind in KINDS:
            found = lowered(op, kind, given["x"], given["w"], given["dy"], attrs)
            assert sum(isinstance(step, Kernel) for step in found.region.steps) == 1
            (made,) = fusion_steps.run(found.region, [given[tensor.node] for tensor in found.inputs], [])
            made = made if kind == "BackpropFilter" else made.transpose(BACK[layout])
            np.testing.assert_allclose(made, exact[kind], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("size", "strides", "window"), UNEVEN)
def test_same(monkeypatch: pytest.MonkeyPatch, size: Any, strides: Any, window: Any) -> None:
    check(monkeypatch, "Conv2D", size, window, strides, (1, 1), "SAME")


@pytest.mark.parametrize("padding", EXPLICIT)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)])
def test_explicit(monkeypatch: pytest.MonkeyPatch, padding: Any, strides: Any) -> None:
    check(monkeypatch, "Conv2D", (8, 7), (3, 2), strides, (1, 1), padding)


@pytest.mark.parametrize("padding", ["SAME", ((1, 2), (0, 4))])
@pytest.mark.parametrize(("strides", "dilations"), [((1, 1), (3, 2)), ((2, 2), (2, 2)), ((3, 3), (1, 3))])
def test_dilations(monkeypatch: pytest.MonkeyPatch, strides: Any, dilations: Any, padding: Any) -> None:
    check(monkeypatch, "Conv2D", (10, 12), (2, 3), strides, dilations, padding)


@pytest.mark.parametrize("padding", ["SAME", *EXPLICIT])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_depthwise(monkeypatch: pytest.MonkeyPatch, stride: int, padding: Any) -> None:
    check(monkeypatch, DEPTHWISE, (8, 9), (3, 2), (stride, stride), (1, 1), padding)


def test_a_call_that_pads_as_tensorflow_does_is_left_as_it_is() -> None:
    x, w, dy = (numbers(*shape) for shape in ((2, 8, 8, 3), (3, 3, 3, 4), (2, 4, 4, 4)))
    (step,) = lowered("Conv2D", "", x, w, dy, attributes((2, 2), (1, 1), "SAME"), evenly=()).region.steps
    assert isinstance(step, Call)
    assert node_def_pb2.NodeDef.FromString(step.attrs).attr["padding"].s == b"SAME"


@pytest.mark.parametrize("kind", KINDS)
def test_the_padded_image_counts_as_memory(kind: str) -> None:
    x, w, dy = (numbers(*shape) for shape in ((2, 8, 8, 3), (3, 3, 3, 4), (2, 4, 4, 4)))
    region = lowered("Conv2D", kind, x, w, dy, attributes((2, 2), (1, 1), "SAME")).region
    found = region_costs(Node("y", FUSION_OP, attrs={"region": to_text(region)}))
    assert found is not None
    assert found.workspace == 2 * 9 * 9 * 3 * 4
