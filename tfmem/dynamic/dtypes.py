"""The type of a net's numbers, and the type that its op computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from custom_ops.errors import DynamicError

NAMES = "float32, float64 or bfloat16"
_TYPES = (tf.float32, tf.float64, tf.bfloat16)


def is_type(dtype: tf.DType) -> bool:
    """Whether a net may have numbers of this type."""
    return dtype in _TYPES


def type_of(parameters: Sequence[Any]) -> tf.DType:
    """The type of a net's parameters; float32 if it has none.

    Raises:
        DynamicError: two parameters have different types.
    """
    for parameter in parameters:
        if parameter.dtype != parameters[0].dtype:
            raise DynamicError(
                f"parameter '{parameters[0].name}' is {parameters[0].dtype.name}, and parameter '{parameter.name}' is "
                f"{parameter.dtype.name}; expected one type for all"
            )
    return parameters[0].dtype if parameters else tf.float32


def computed(dtype: tf.DType) -> tf.DType:
    """The type that the op computes in: float32 for bfloat16, which is converted where it enters and leaves the op."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


def may_hold(dtype: tf.DType, net: tf.DType) -> bool:
    """Whether a tensor of `dtype` in the function of a node loses no digits in a net of numbers of type `net`."""
    return dtype in {net, tf.bool} or (net == tf.bfloat16 and dtype == tf.float32)


def is_updated_outside(dtype: tf.DType, parameters: Sequence[Any]) -> bool:
    """Whether a step updates parameters outside of its op: it has no bfloat16, and on a GPU no float64.

    The op runs on the CPU for float64, where it cannot write variables of a GPU.
    """
    return computed(dtype) != dtype or (dtype == tf.float64 and any("GPU" in str(each.device) for each in parameters))
