"""What `tfmem.plan` is asked about: a step's name, its trace, and the shapes that its caller leaves open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError
from tfmem.capture import concrete_function as functions
from tfmem.capture import keras_functions
from tfmem.frontends.keras import CALLED_BY
from tfmem.frontends.sample import specs_of


def traced(x: Any, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    """What users call a step, its trace, and shapes of inputs that it leaves open.

    Raises:
        GraphError: `x` is nothing that can be traced, or `batch` is missing.
    """
    if isinstance(x, str | os.PathLike):
        return _of_saved_model(Path(x), batch)
    if keras_functions.is_keras_model(x):
        keras_functions.require_trainable(x)
        step = keras_functions.keras_function(x, "train").step
        label = f"{x.name}.{CALLED_BY['train']}"
        return label, step.get_concrete_function(specs_of(x, batch)), {}
    if isinstance(x, functions.ConcreteFunction):
        return "", x, _sized(x, batch)
    if hasattr(x, "get_concrete_function"):
        return _of_function(x, batch)
    raise GraphError(
        f"cannot plan a {type(x).__name__}; expected a compiled Keras model, a tf.function, a ConcreteFunction or the "
        "path of a SavedModel"
    )


def _of_function(x: Any, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    name = getattr(x.python_function, "__name__", "")
    if batch is None or isinstance(batch, int):
        if x.input_signature is None:
            raise GraphError(f"`{name}` has no input signature; give batch=(argument, ...), tensors or tf.TensorSpec")
        concrete = x.get_concrete_function()
        return name, concrete, _sized(concrete, batch)
    given = batch if isinstance(batch, tuple) else (batch,)
    concrete = x.get_concrete_function(*given)
    shapes = [value.shape for value in tf.nest.flatten(given) if hasattr(value, "shape")]
    inputs = _inputs(concrete)
    if len(inputs) != len(shapes):
        return name, concrete, {}
    opened = {
        t.op.name: tuple(shape) for t, shape in zip(inputs, shapes, strict=True) if not t.shape.is_fully_defined()
    }
    return name, concrete, {input_name: shape for input_name, shape in opened.items() if None not in shape}


def _sized(concrete: Any, batch: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of a trace that has open dimensions: each is the batch."""
    opened = [t for t in _inputs(concrete) if t.shape.rank is not None and not t.shape.is_fully_defined()]
    if not opened or batch is None:
        return {}
    if not isinstance(batch, int):
        raise GraphError(f"batch={batch!r}: expected a number, which replaces the open dimensions of the inputs")
    return {t.op.name: tuple(batch if size is None else size for size in t.shape) for t in opened}


def _inputs(concrete: Any) -> list[tf.Tensor]:
    """The tensors that a caller gives."""
    captured = {id(inner) for _, inner in concrete.graph.captures}
    return [tensor for tensor in concrete.inputs if id(tensor) not in captured]


def _of_saved_model(path: Path, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    if not (path / "saved_model.pb").is_file():
        raise GraphError(f"'{path}' is not a SavedModel, it has no saved_model.pb; pass the directory with it")
    model = tf.saved_model.load(str(path))
    if not model.signatures:
        raise GraphError(f"the SavedModel in '{path}' has no signature to plan; save it with signatures")
    name = "train" if "train" in model.signatures else next(iter(model.signatures))
    concrete = model.signatures[name]
    concrete.graph.saved_model = model  # else its variables are gone with the model
    return f"{path.name}.{name}", concrete, _sized(concrete, batch)
