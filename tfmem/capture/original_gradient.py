"""A rewritten function with the gradient of the original, for where the original cannot run in its place: a SavedModel
is loaded without it. TensorFlow saves custom gradients (`tf.custom_gradient`) as separate functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop_util
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from tfmem.capture.captured import BODIES, READERS, every_node, is_stateful


def can_run_again(function: ConcreteFunction) -> bool:
    """Whether a second run has the same results as the first, and no effects."""
    harmless = READERS | BODIES.keys()
    return not any(
        is_stateful(node.op) and node.op not in harmless for node in every_node(function.graph.as_graph_def())
    )


def differentiable(original: ConcreteFunction, rewritten: Callable[..., Any]) -> Callable[..., Any]:
    """A function for tracing: it calls `rewritten`; if a gradient is taken, `original` runs again for it.

    Args:
        original: a function that can run again.
        rewritten: the same, optimised.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        inputs = [value for value in given if _has_gradient(value)]

        def run(function: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> Any:
            left = iter(tensors)
            values = [next(left) if _has_gradient(value) else value for value in given]
            arguments, keywords = tf.nest.pack_sequence_as((args, kwargs), values, expand_composites=True)
            return function(*arguments, **keywords)

        structure, others = None, []

        @tf.custom_gradient
        def forward(*tensors: tf.Tensor) -> Any:
            nonlocal structure, others
            structure = run(rewritten, tensors)
            others = tf.nest.flatten(structure, expand_composites=True)

            def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(tensors)
                    results = _with_gradients(run(original, tensors))
                found = tape.gradient(results, [*tensors, *variables], list(upstream))
                dense = [None if each is None else tf.convert_to_tensor(each) for each in found]
                inner, outer = dense[: len(tensors)], dense[len(tensors) :]
                return (inner, outer) if variables else inner

            return _with_gradients(structure), gradient

        outputs = iter(forward(*inputs))
        flat = [next(outputs) if _has_gradient(value) else value for value in others]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return call


def _with_gradients(structure: Any) -> list[tf.Tensor]:
    return [value for value in tf.nest.flatten(structure, expand_composites=True) if _has_gradient(value)]


def _has_gradient(value: Any) -> bool:
    return tf.is_tensor(value) and backprop_util.IsTrainable(value)
