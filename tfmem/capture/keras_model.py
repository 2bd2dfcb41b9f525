"""Puts a step of one's own under `model.fit`, for Keras 3 (TensorFlow backend) and tf_keras.

`Model.fit` and `Model.train_on_batch` call `model.train_function(iterator)`, which Keras makes only
where it is None. `install` sets that attribute of the user's model and changes nothing else.
`model.compile` sets it back to None: compile first, then optimise; a model compiled again trains as
Keras trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from graph_passes.errors import GraphError

Step = Callable[[Any], Any]


def is_keras_model(model: object) -> bool:
    """Whether `model` is a model of Keras 3 or of tf_keras; imports neither."""
    return _keras_of(model) is not None


def install(model: Any, make_step: Callable[[Step], Step]) -> Any:
    """Train `model` with the step that `make_step` builds.

    Args:
        model: a compiled model.
        make_step: takes Keras's step (batch -> logs, a Python function to be traced) and returns
            what runs in its place, called eagerly with batches: nested tensors, with None where
            there is no target or weight.

    Returns:
        The same model. Callbacks, validation, `steps_per_execution`, loss scaling and clipping are
        Keras's own still.

    Raises:
        GraphError: not a Keras model, not compiled, compiled with `run_eagerly`, or under a
        distribution strategy.
    """
    keras = _check(model)
    step = make_step(_python_step(model, keras))

    def train_function(iterator: Iterator[Any]) -> Any:
        logs = step(_to_tensors(next(iterator)))  # StopIteration ends the epoch
        for _ in range(_steps_per_execution(model, keras) - 1):
            try:
                batch = next(iterator)
            except StopIteration:
                break
            logs = step(_to_tensors(batch))
        return logs

    model.train_function = train_function
    return model


def install_inference(model: Any, make_step: Callable[[Step, Step], Step]) -> Any:
    """Predict, and evaluate if the model is compiled, with the steps that `make_step` builds.

    Args:
        model: a model, compiled or not.
        make_step: takes Keras's step (batch -> outputs or logs, a Python function to be traced) and the same step as
            Keras runs it; returns what runs in its place, called eagerly with batches.

    Returns:
        The same model. `model.compile` takes back what was installed; `model(x)` runs as Keras runs it.
    """
    keras = _keras_of(model)
    counter = "_predict_counter" if keras == "tf_keras" else ""
    predict = make_step(_python_method(model.predict_step), _traced(model, model.predict_step))

    def predict_function(data: Any) -> Any:
        batches = list(data) if keras == "keras" else [next(data)]
        outputs = [predict(_to_tensors(batch)) for batch in batches]
        if counter:
            getattr(model, counter).assign_add(1)
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    model.predict_function = predict_function
    if is_compiled(model):
        test = make_step(_python_method(model.test_step), _traced(model, model.test_step))

        def test_function(iterator: Iterator[Any]) -> Any:
            logs = test(_to_tensors(next(iterator)))
            for _ in range(_steps_per_execution(model, str(keras)) - 1):
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                logs = test(_to_tensors(batch))
            return logs

        model.test_function = test_function
    return model


def is_compiled(model: Any) -> bool:
    """Whether `model` can be trained and evaluated."""
    keras = _keras_of(model)
    return bool(model.compiled if keras == "keras" else model._is_compiled) and model.optimizer is not None


def _python_method(method: Step) -> Step:
    @tf.autograph.experimental.do_not_convert
    def step(batch: Any) -> Any:
        return method(batch)

    return step


def _traced(model: Any, method: Step) -> Step:
    return tf.function(_python_method(method), jit_compile=jit_compile(model), reduce_retracing=True)


def original_train_function(model: Any) -> Callable[[Iterator[Any]], Any]:
    """The train function that Keras would have made, XLA included where it is on; what is installed
    stays installed.

    Raises:
        GraphError: see `install`.
    """
    _check(model)
    installed = model.train_function
    try:
        model.make_train_function(force=True)
        return model.train_function
    finally:
        model.train_function = installed


def original_step(model: Any) -> Step:
    """Keras's own step (batch -> logs), traced, with XLA where Keras uses it."""
    keras = _check(model)
    return tf.function(_python_step(model, keras), jit_compile=jit_compile(model), reduce_retracing=True)


def jit_compile(model: Any) -> bool:
    """Whether Keras would compile the step with XLA (Keras 3 decides so by itself on GPUs)."""
    return bool(getattr(model, "jit_compile", False))


def _keras_of(model: object) -> str | None:
    """The package that the model's class comes from: "keras", "tf_keras" or None."""
    for base in type(model).__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == "Model" and package in ("keras", "tf_keras"):
            return package
    return None


def _check(model: Any) -> str:
    keras = _keras_of(model)
    if keras is None:
        raise GraphError(f"{type(model).__name__} is not a Keras model; pass a keras.Model or a tf_keras.Model")
    compiled = model.compiled if keras == "keras" else model._is_compiled
    if not compiled or model.optimizer is None:
        raise GraphError(f"model '{model.name}' is not compiled; call model.compile(...) before optimising it")
    if model.run_eagerly:
        raise GraphError(f"model '{model.name}' runs eagerly and has no graph; compile it with run_eagerly=False")
    if keras == "keras" and not hasattr(model, "distribute_strategy"):
        raise GraphError(
            f"model '{model.name}' does not train on TensorFlow; set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    strategy = model.distribute_strategy
    if type(strategy).__name__ != "_DefaultDistributionStrategy" and strategy.num_replicas_in_sync > 1:
        raise GraphError(
            f"model '{model.name}' trains under {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas; only the default strategy is supported"
        )
    return keras


def _python_step(model: Any, keras: str) -> Step:
    @tf.autograph.experimental.do_not_convert
    def step(batch: Any) -> Any:
        logs = model.train_step(batch)
        if keras == "tf_keras":
            model._train_counter.assign_add(1)  # summaries and callbacks count steps by it
        return logs

    return step


def _steps_per_execution(model: Any, keras: str) -> int:
    if keras == "keras":
        return model.steps_per_execution
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())


def _to_tensors(batch: Any) -> Any:
    """Arrays become tensors, as in a call of a `tf.function`; an Optional of a data set means that
    nothing is there.
    """

    def convert(item: Any) -> Any:
        if isinstance(item, tf.experimental.Optional):
            return None
        return tf.convert_to_tensor(item) if isinstance(item, np.ndarray | np.generic) else item

    return tf.nest.map_structure(convert, batch)
