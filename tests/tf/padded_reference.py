"""Convolutions of TensorFlow's on a CPU, in either layout and with dilations, for those that have other padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

# Sizes, strides and windows of which padding "SAME" differs before and behind.
UNEVEN = [
    ((8, 8), (1, 1), (2, 4)),
    ((8, 8), (2, 2), (3, 3)),
    ((7, 10), (1, 1), (2, 4)),
    ((7, 10), (2, 2), (3, 3)),
    ((7, 10), (2, 2), (2, 4)),
    ((7, 10), (3, 3), (2, 4)),
    ((9, 6), (1, 1), (2, 4)),
    ((9, 6), (2, 2), (3, 3)),
    ((9, 6), (2, 2), (2, 4)),
    ((9, 6), (3, 3), (2, 4)),
    ((8, 11), (3, 3), (3, 3)),
]
EXPLICIT = [((0, 1), (0, 1)), ((2, 0), (1, 1)), ((3, 1), (0, 2))]
LAYOUTS = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2)}
BACK = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 2, 3, 1)}
DEPTHWISE = "DepthwiseConv2dNative"


def attributes(strides: Any, dilations: Any, padding: Any, layout: str = "NHWC") -> dict[str, Any]:
    """The attributes of a convolution; `padding` is a name, or pairs for height and width."""

    def along(pair: Any, other: Any) -> tuple[Any, ...]:
        return tuple((other, *pair, other)[place] for place in LAYOUTS[layout])

    named = isinstance(padding, str)
    return {
        "strides": along(strides, 1),
        "dilations": along(dilations, 1),
        "padding": padding if named else "EXPLICIT",
        "explicit_paddings": () if named else tuple(each for pair in along(padding, (0, 0)) for each in pair),
        "data_format": layout,
    }


def convolved(op: str, x: Any, w: Any, strides: Any, dilations: Any, padding: Any) -> Any:
    """Channels last; TensorFlow has no gradients of dilations on a CPU, so the zeros that they mean are written out."""
    for axis, by in enumerate(dilations):
        size = w.shape[axis]
        between = np.zeros((size, (size - 1) * by + 1))
        between[range(size), range(0, size * by, by)] = 1.0
        spread = tf.tensordot(tf.cast(between, w.dtype), w, [[0], [axis]])
        w = tf.transpose(spread, (1, 0, 2, 3) if axis else (0, 1, 2, 3))
    return getattr(tf.raw_ops, op)(input=x, filter=w, **attributes(strides, (1, 1), padding))


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
