"""The specs of one batch of a Keras model's training, from a number or from an example."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from graph_passes.errors import GraphError


def specs_of(model: Any, batch: Any) -> Any:
    """What `train_step` takes, as `tf.TensorSpec`.

    Args:
        model: a compiled Keras model.
        batch: the number of examples, or one batch: `(x, y)` of arrays, tensors or specs.

    Raises:
        GraphError: the batch is missing, or the model does not say what its inputs are.
    """
    if batch is None:
        raise GraphError(
            f"`{model.name}` needs a batch: give a number (`--batch` on the command line), or (x, y) of arrays or "
            "tf.TensorSpec"
        )
    if not isinstance(batch, int):
        return tf.nest.map_structure(_spec, batch)
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs:
        raise GraphError(f"`{model.name}` does not say what its inputs are; give batch=(x, y), arrays or tf.TensorSpec")
    x = [_sized(tensor, batch) for tensor in inputs]
    y = [_target(model, _sized(tensor, batch), number) for number, tensor in enumerate(outputs)]
    return (x[0] if len(x) == 1 else x, y[0] if len(y) == 1 else y)


def _spec(value: Any) -> Any:
    if isinstance(value, tf.TensorSpec):
        return value
    if isinstance(value, np.ndarray | np.generic) or tf.is_tensor(value):
        found = tf.convert_to_tensor(value)
        return tf.TensorSpec(found.shape, found.dtype)
    return value


def _sized(tensor: Any, batch: int) -> tf.TensorSpec:
    sizes = tuple(tensor.shape)
    if None in sizes[1:]:
        raise GraphError(f"input or output '{tensor.name}' has the shape {sizes}; give batch=(x, y) with known sizes")
    return tf.TensorSpec((batch, *sizes[1:]), tensor.dtype)


def _target(model: Any, output: tf.TensorSpec, number: int) -> tf.TensorSpec:
    """What the loss compares an output with: a class for each row where the loss is a sparse one, else its shape."""
    loss = model.loss[number] if isinstance(model.loss, list | tuple) else model.loss
    name = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    if "sparse" in str(name).lower():
        return tf.TensorSpec(output.shape[:-1], tf.int32)
    return tf.TensorSpec(output.shape, output.dtype)
