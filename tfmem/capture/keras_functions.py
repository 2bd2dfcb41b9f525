"""What Keras 3 (TensorFlow backend) and tf_keras run under `fit`, `evaluate` and `predict`, and how it is replaced.

`Model.fit` and `Model.train_on_batch` call `model.train_function(iterator)`, which Keras makes only where it is None;
`test_function` and `predict_function` likewise. `install` sets those attributes of the user's model and changes nothing
else. `model.compile` sets them back to None: compile first, then optimise; a model compiled again runs as Keras has it.

Which trace a step gets is Keras's choice, and it shows in the numbers: a loss tracker of Keras 3 weights only batches
of known size. So the step is the `tf.function` that Keras makes itself, where it makes one of a single batch: Keras 3
holds it in the closure of its train function. Elsewhere it is written here as Keras has it. Relies on that closure, on
`Model.make_*_function`, tf_keras's step counters, and on autograph's status (as tf_keras's layers do).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from graph_passes.errors import GraphError


@dataclass(frozen=True)
class KerasFunction:
    """One of the three functions of a model.

    Attributes:
        name: "train", "test" or "predict".
        own: what Keras would call.
        whole: `own`, if it is a `tf.function` that computes the step by itself; else it calls `step`.
        step: the `tf.function` of one batch, without XLA.
        compiled: the same with XLA, if Keras would compile it.
    """

    name: str
    own: Callable[[Any], Any]
    whole: Any
    step: Any
    compiled: Any


def is_keras_model(model: object) -> bool:
    """Whether `model` is a model of Keras 3 or of tf_keras; imports neither."""
    return _keras_of(model) is not None


def is_of_tf_keras(model: Any) -> bool:
    """Whether `model` is one of tf_keras."""
    return _keras_of(model) == "tf_keras"


def is_compiled(model: Any) -> bool:
    """Whether `model` can be trained and evaluated."""
    keras = _keras_of(model)
    return bool(model.compiled if keras == "keras" else model._is_compiled) and model.optimizer is not None


def makes_its_own(model: Any, name: str) -> bool:
    """Whether the user's class overrides how Keras makes the function: then it need not run the model's step."""
    made_by: str = getattr(type(model), f"make_{name}_function").__module__
    return made_by.partition(".")[0] not in ("keras", "tf_keras")


def require_trainable(model: Any) -> None:
    """
    Raises:
        GraphError: not a Keras model, not compiled, or compiled with `run_eagerly`.
    """
    keras = _keras_of(model)
    if keras is None:
        raise GraphError(f"{type(model).__name__} is not a Keras model; pass a keras.Model or a tf_keras.Model")
    if not is_compiled(model):
        raise GraphError(f"model '{model.name}' is not compiled; call model.compile(...) before optimising it")
    if model.run_eagerly:
        raise GraphError(f"model '{model.name}' runs eagerly and has no graph; compile it with run_eagerly=False")
    if keras == "keras" and not hasattr(model, "distribute_strategy"):
        raise GraphError(
            f"model '{model.name}' does not train on TensorFlow; set KERAS_BACKEND=tensorflow before Keras is imported"
        )


def keras_function(model: Any, name: str, own: Any = None) -> KerasFunction:
    """The model's function as Keras makes it; what is installed stays installed.

    Args:
        model: of Keras 3 or of tf_keras.
        name: "train", "test" or "predict".
        own: what Keras made before, whose traces stay; None: nothing.
    """
    own = own or _made(model, name)
    step = tf.function(_as_keras(model, name), reduce_retracing=_keras_of(model) == "keras")
    if bool(getattr(model, "jit_compile", False)):
        compiled = _single_step(own) or tf.function(_as_keras(model, name), jit_compile=True, reduce_retracing=True)
        return KerasFunction(name, own, None, step, compiled)
    single = _single_step(own)
    if single is not None:
        return KerasFunction(name, own, None, single, None)
    return KerasFunction(name, own, own if hasattr(own, "get_concrete_function") else None, step, None)


def may_compile(model: Any) -> bool:
    """Whether the user allows XLA: not with `jit_compile=False`, which "auto" becomes where XLA cannot run a layer."""
    return getattr(model, "jit_compile", None) is not False


def install(model: Any, name: str, function: Callable[[Any], Any]) -> None:
    """Let `function` run in place of Keras's; it is called with an iterator, for "predict" of Keras 3 with a list."""
    setattr(model, f"{name}_function", function)


def installed(model: Any, name: str) -> Any:
    """What Keras would call now; None: it makes its function in the next call of `fit`, `evaluate` or `predict`."""
    return getattr(model, f"{name}_function", None)


def runs_eagerly(model: Any) -> bool:
    """Whether the function that Keras makes now is no graph."""
    return bool(getattr(model, "run_eagerly", False))


def is_installed(model: Any, name: str, function: Callable[[Any], Any]) -> bool:
    """Whether the model calls `function` now."""
    return installed(model, name) is function


def steps_per_execution(model: Any) -> int:
    """How many batches one call of a function takes."""
    if _keras_of(model) == "keras":
        return int(model.steps_per_execution)
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())


def stops_short(model: Any) -> bool:
    """Whether a call that finds fewer batches than `steps_per_execution` ends with `StopIteration`, its steps done."""
    return _keras_of(model) == "tf_keras"


def has_recurrent_layers(model: Any) -> bool:
    """Whether one of Keras's recurrent layers is in the model; there may be others."""
    return any(base.__name__ == "RNN" for layer in model._flatten_layers() for base in type(layer).__mro__)


def handed_on(model: Any, name: str, outputs: Any) -> Any:
    """What Keras makes of the results of a step: Keras 3 hands logs on in an Optional, in which lists are tensors."""
    if name == "predict" or _keras_of(model) != "keras" or not _has_list(outputs):
        return outputs
    return tf.experimental.Optional.from_value(outputs).get_value()


def joined(outputs: Sequence[Any]) -> Any:
    """What Keras's predict function returns for the outputs of several batches."""

    def concatenated(*parts: Any) -> Any:
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)

    return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(concatenated, *outputs)


def to_tensors(batch: Any) -> Any:
    """Arrays become tensors, as in a call of a `tf.function`; an Optional of a data set means that nothing is there."""

    def convert(item: Any) -> Any:
        if isinstance(item, tf.experimental.Optional | tf.OptionalSpec):
            return None
        return tf.convert_to_tensor(item) if isinstance(item, np.ndarray | np.generic) else item

    return tf.nest.map_structure(convert, batch)


def _has_list(outputs: Any) -> bool:
    if isinstance(outputs, Mapping):
        return any(map(_has_list, outputs.values()))
    return isinstance(outputs, list) or (isinstance(outputs, tuple) and any(map(_has_list, outputs)))


def _keras_of(model: object) -> str | None:
    """The package that the model's class comes from: "keras", "tf_keras" or None."""
    for base in type(model).__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == "Model" and package in ("keras", "tf_keras"):
            return package
    return None


def _made(model: Any, name: str) -> Callable[[Any], Any]:
    attribute = f"{name}_function"
    installed = getattr(model, attribute)
    try:
        getattr(model, f"make_{attribute}")(force=True)
        made: Callable[[Any], Any] = getattr(model, attribute)
        return made
    finally:
        setattr(model, attribute, installed)


def _single_step(own: Callable[[Any], Any]) -> Any:
    """The `tf.function` of one batch in the closure of a function of Keras 3, or None."""
    held = inspect.getclosurevars(own).nonlocals.get("one_step_on_data") if inspect.isfunction(own) else None
    step = getattr(held, "__wrapped__", None)
    return step if hasattr(step, "get_concrete_function") else None


def _as_keras(model: Any, name: str) -> Callable[[Any], Any]:
    """The step of one batch, as Keras's function runs it."""
    if _keras_of(model) == "keras":

        def run_step(data: Any) -> Any:
            return getattr(model, f"{name}_step")(data)  # looked up when traced, as Keras does it

    else:

        def run_step(data: Any) -> Any:
            with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):  # layers convert their `call` where this is so
                outputs = getattr(model, f"{name}_step")(data)
            getattr(model, f"_{name}_counter").assign_add(1)  # summaries and callbacks count steps by it
            return outputs

    reduce_per_replica = getattr(type(model), f"make_{name}_function").__globals__["reduce_per_replica"]
    reduction = "concat" if name == "predict" else getattr(model, "distribute_reduction_method", "auto")

    @tf.autograph.experimental.do_not_convert
    def step(data: Any) -> Any:
        outputs = model.distribute_strategy.run(run_step, args=(data,))
        return reduce_per_replica(outputs, model.distribute_strategy, reduction=reduction)

    return step
