"""Regions of a few variables that several tests run."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Assign, Kernel, Read, Region, TensorType

ADD = """program 1
axes 0
tensor float32 1
tensor float32 1
input 0 a0
input 1 a0
add 0 1
output 2 0
"""
FOUR = TensorType("float32", (4,))


def kernel(text: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Kernel:
    return Kernel(from_text(text), inputs, outputs)


# v += x, giving nothing.
INCREMENT = Region(1, (FOUR,), (FOUR,) * 3, (Read(0, 1), kernel(ADD, (1, 0), (2,)), Assign(0, 2)), ())


def ones(count: int = 4) -> Any:
    return tf.ones([count])
