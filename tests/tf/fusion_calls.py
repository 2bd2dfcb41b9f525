"""Calls of a region as TensorFlow would have them: their attributes as a NodeDef."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

from custom_ops.fusion.region import Call


def call(
    op: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    variables: tuple[int, ...] = (),
    **attributes: Any,
) -> Call:
    """With attributes that are types, truth values, numbers, texts, or lists of texts."""
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
        else:
            attr.CopyFrom(attr_value_pb2.AttrValue(list={"s": [text.encode() for text in value]}))
    return Call(op, node.SerializeToString(deterministic=True), inputs, outputs, variables, (op,))


def product(inputs: tuple[int, int], output: int, transposed: bool) -> Call:
    """MatMul of float32."""
    return call("MatMul", inputs, (output,), T=tf.float32, transpose_a=transposed, transpose_b=False)
