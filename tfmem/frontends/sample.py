"""The specs of one batch of a Keras model's training, from a number or from an example."""

from __future__ import annotations

from collections.abc import Mapping
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
    named = getattr(model, "output", None)
    if isinstance(named, Mapping):
        return x[0] if len(x) == 1 else x, {
            name: _target(model, _sized(tensor, batch), name, name) for name, tensor in named.items()
        }
    names = [*getattr(model, "output_names", ()), *[""] * len(outputs)]
    y = [_target(model, _sized(tensor, batch), number, names[number]) for number, tensor in enumerate(outputs)]
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


def _target(model: Any, output: tf.TensorSpec, place: int | str, name: str) -> tf.TensorSpec:
    """What the loss compares an output with: a class for each row where the loss is a sparse one, else its shape.

    Args:
        model: the model, whose losses are one, a list or a dict.
        output: what the loss compares.
        place: of the output among the others, by which a list or a dict of them has it.
        name: of the output, by which a dict of losses has that of a list.
    """
    loss = model.loss
    if isinstance(loss, Mapping):
        loss = loss.get(place, loss.get(name))
    elif isinstance(loss, list | tuple):
        loss = loss[place] if isinstance(place, int) else None
    called = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    if "sparse" in str(called).lower():
        return tf.TensorSpec(output.shape[:-1], tf.int32)
    return tf.TensorSpec(output.shape, output.dtype)
