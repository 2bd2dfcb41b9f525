"""Regions that tests write: calls with the attributes that TensorFlow would have, and functions that run a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

from custom_ops.fusion.region import Call, Region, TensorType
from custom_ops.fusion.text import to_text
from custom_ops.load import load

if TYPE_CHECKING:
    from tests.tf.fake_gpu import FakeGpu

DOUBLED = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\nadd 0 0\noutput 1 0 1\n"


def run_region(
    region: Region, args: Sequence[Any], variables: Sequence[tf.Tensor] = (), name: str | None = None
) -> list[tf.Tensor]:
    """TfmemFusion: runs a region on `args`; `variables` are handles of variables, which it updates.

    Raises:
        RegionError: the region is malformed.
    """
    outputs = [tf.as_dtype(region.values[value].dtype) for value in region.outputs]
    text = tf.autograph.experimental.do_not_convert(to_text)(region)
    found = load().ops.tfmem_fusion(args=list(args), variables=list(variables), T_out=outputs, region=text, name=name)
    return list(found) if outputs else []


def call(
    op: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    variables: tuple[int, ...] = (),
    **attributes: Any,
) -> Call:
    """With attributes that are types, truth values, numbers, texts, or lists of texts or numbers."""
    node = node_def_pb2.NodeDef()
    for name, value in attributes.items():
        attr = node.attr[name]
        if isinstance(value, tf.DType):
            attr.type = value.as_datatype_enum
        elif isinstance(value, bool):
            attr.b = value
        elif isinstance(value, int):
            attr.i = value
        elif isinstance(value, float):
            attr.f = value
        elif isinstance(value, str):
            attr.s = value.encode()
        elif value and isinstance(value[0], int):
            attr.CopyFrom(attr_value_pb2.AttrValue(list={"i": value}))
        else:
            attr.CopyFrom(attr_value_pb2.AttrValue(list={"s": [text.encode() for text in value]}))
    return Call(op, node.SerializeToString(deterministic=True), inputs, outputs, variables, (op,))


def product(inputs: tuple[int, int], output: int, transposed: bool) -> Call:
    """MatMul of float32."""
    return call("MatMul", inputs, (output,), T=tf.float32, transpose_a=transposed, transpose_b=False)


def floats(*shape: int | None) -> TensorType:
    return TensorType("float32", shape)


def stitched(gpu: FakeGpu, region: Region, handles: Sequence[Any] = (), made: Any = None) -> Callable[..., Any]:
    """A function of the op alone."""
    programs = gpu.programs(region) if made is None else made

    @tf.function(reduce_retracing=True, autograph=False)
    def step(*args: Any) -> Any:
        return gpu.fusion(region, args, handles, programs)

    return step
