"""TensorFlow's ops by the names that the table of elementwise ops gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def raw_op(name: str, arity: int) -> Callable[..., Any]:
    """A raw op, its arguments in order; a condition is where the first one is not zero."""
    function = getattr(tf.raw_ops, name)
    names = list(inspect.signature(function).parameters)[:arity]

    def call(*arguments: Any) -> Any:
        first = tf.cast(arguments[0], tf.bool) if arity == 3 else arguments[0]
        return function(**dict(zip(names, (first, *arguments[1:]), strict=True)))

    return call
