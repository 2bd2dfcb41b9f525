"""A Keras model whose functions run optimised: training, evaluation, prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError
from graph_passes.names import suffix_of
from graph_passes.report import Report
from tfmem.capture import keras_functions
from tfmem.capture.call_arguments import IteratorTraces, is_iterator
from tfmem.capture.keras_functions import KerasFunction, to_tensors
from tfmem.capture.strategies import elsewhere_under
from tfmem.frontends.function import OptimizedFunction
from tfmem.kernels.replace_recurrent import mentions_recurrence
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import left_to_tensorflow

CALLED_BY = {"train": "fit", "test": "evaluate", "predict": "predict"}  # what users call for each function


def optimize_model(model: Any, engine: Engine) -> ModelFunctions:
    """Install what runs in place of Keras's functions; calls plan it.

    Without a budget nothing changes but recurrent layers and regions: a function without any is Keras's own, from its
    first call.

    Raises:
        GraphError: the model cannot be trained, or makes its own train function, and there is a budget for it.
        ReplicasError: its steps run in other processes or on a TPU, and the user gave a budget.
    """
    engine = engine.under(replace(engine.settings, label=f"{model.name}.fit"))
    elsewhere = elsewhere_under([getattr(model, "distribute_strategy", None)])
    if elsewhere:
        return ModelFunctions([], left_to_tensorflow(engine, elsewhere).settings.unplanned(engine.settings.label))
    compiled, changes = (
        keras_functions.is_compiled(model),
        engine.settings.rewrites or engine.settings.budget is not None,
    )
    functions = []
    if engine.settings.rewrites and not keras_functions.runs_eagerly(model):
        inference = engine.under(engine.settings.unlimited())
        names = [name for name in ("predict", "test")[: 1 + compiled] if not keras_functions.makes_its_own(model, name)]
        functions = [ModelFunction(model, name, inference) for name in names]
    if compiled or engine.settings.must_fit or not engine.settings.rewrites:
        keras_functions.require_trainable(model)
        if changes and not keras_functions.makes_its_own(model, "train"):
            functions.append(ModelFunction(model, "train", engine))
        elif engine.settings.must_fit:
            raise GraphError(
                f"model '{model.name}' overrides `make_train_function` ({type(model).__name__}), so tfmem does not "
                "know what it runs; write a `train_step` instead, or optimise the tf.function that it calls"
            )
    for function in functions:
        keras_functions.install(model, function.name, function)
    return ModelFunctions(functions[::-1], None if functions else engine.settings.unplanned(engine.settings.label))


class ModelFunctions:
    """The functions that tfmem installed into one model."""

    def __init__(self, functions: list[ModelFunction], untouched: Report | None) -> None:
        """The functions, training first; or the report, where there are none."""
        self._functions = functions
        self._untouched = untouched

    @property
    def report(self) -> Report:
        """The report of training if it ran, with those of the other functions that ran.

        Raises:
            GraphError: none of the functions ran.
        """
        if self._untouched is not None:
            return self._untouched
        reports = [function.report for function in self._functions if function.ran]
        if not reports:
            raise GraphError("nothing to report: the model was never run; call fit, evaluate or predict once")
        return replace(reports[0], others=tuple(reports[1:]))


class ModelFunction:
    """Called as Keras calls `train_function`, `test_function` or `predict_function`."""

    def __init__(self, model: Any, name: str, engine: Engine) -> None:
        """Nothing is made of a model of Keras 3 before the first call: Keras, too, reads its attributes then."""
        self.name = name
        self._model = model
        self._engine = engine.under(replace(engine.settings, label=f"{model.name}.{CALLED_BY[name]}"))
        self._before = keras_functions.installed(model, name)
        self._untouched: bool | None = None  # whether Keras's own runs, as nothing is to be optimised; None: not known
        if keras_functions.is_of_tf_keras(model):  # made within `fit`, several steps per execution gave other losses
            self._before = None
            _ = self._step

    @property
    def own(self) -> Any:
        """Keras's function, if there is one: the model may have been trained, and optimised, before."""
        if "_keras" in vars(self):
            return self._keras.own
        return self._before.own if isinstance(self._before, ModelFunction) else self._before

    @cached_property
    def _keras(self) -> KerasFunction:
        return keras_functions.keras_function(self._model, self.name, self.own)

    @cached_property
    def _step(self) -> OptimizedFunction:
        allowed = keras_functions.may_compile(self._model)
        return OptimizedFunction(self._keras.step, self._engine, self._keras.compiled, allowed)

    @cached_property
    def _traces(self) -> IteratorTraces:
        return IteratorTraces(lambda spec: self._step.trace(to_tensors(spec)))

    @property
    def _traced(self) -> bool:
        return "_step" in vars(self) and self._step.traced

    @property
    def ran(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._untouched) or self._traced

    @property
    def report(self) -> Report:
        """See `OptimizedFunction.report`."""
        found = self._step.report if self._traced else self._engine.settings.unplanned(self._engine.settings.label)
        if not self._untouched and (steps := keras_functions.steps_per_execution(self._model)) > 1:
            one_by_one = f"the {steps} steps of an execution run one by one, with the results of one step per execution"
            found = replace(found, notes=(*found.notes, one_by_one))
        suffix = suffix_of(str(self._model.name), found.named_ops())
        layers = (f"{layer.name}{suffix}" for layer in getattr(self._model, "layers", ()))  # also those without ops
        return replace(found, function=self.name, scope_suffix=suffix, scopes=(*found.scopes, *layers))

    def __call__(self, source: Any) -> Any:
        """Run as many steps as Keras would; returns the last one's logs, or all predictions.

        Args:
            source: what Keras gives its own function: an iterator, a generator, or a list of batches.
        """
        if tf.config.functions_run_eagerly():
            return self._keras.own(source)
        if self._untouched is None and keras_functions.runs_eagerly(self._model):
            self._untouched = True
            if self._engine.settings.must_fit:
                told = f"model '{self._model.name}' was set to run eagerly, so its memory budget is not kept"
                self._engine.notices.warn("eager", told, "set run_eagerly=False before the first call")
        if self._untouched is None:
            if not is_iterator(source):
                source = list(islice(source, keras_functions.steps_per_execution(self._model)))
            self._untouched = self._engine.settings.budget is None and not self._replaces(source)
        if self._untouched:
            if keras_functions.is_installed(self._model, self.name, self):
                keras_functions.install(self._model, self.name, self._keras.own)
            return self._keras.own(source)
        iterator = iter(source)
        outputs: list[Any] = []
        for _ in range(keras_functions.steps_per_execution(self._model)):
            try:
                batch = to_tensors(next(iterator))
            except StopIteration:
                if outputs and not keras_functions.stops_short(self._model):
                    break
                if is_iterator(source):  # Keras's own ends the epoch: what needs no batch runs before it finds none
                    return self._keras.own(source)
                raise
            traced = self._traces.of(source) if is_iterator(source) else self._step.trace(batch)
            made = keras_functions.handed_on(self._model, self.name, self._step.call_as(traced, batch))
            outputs = [*(outputs if self.name == "predict" else ()), made]
        return keras_functions.joined(outputs)

    def _replaces(self, source: Any) -> bool:
        """Whether anything can be replaced in the step that `source` is for; nothing is taken from an iterator.

        A step is traced but once if that can be: what Python code draws while it is traced is part of the numbers.
        """
        whole = self._keras.whole
        recurrent = self._engine.settings.stitches or keras_functions.has_recurrent_layers(self._model)
        if whole is not None and not recurrent:
            graph_def = whole.get_concrete_function(source).graph.as_graph_def()
            if is_iterator(source) and keras_functions.steps_per_execution(self._model) > 1:
                graph_def.ClearField("node")  # the loop over the steps, which are in its body
            if not mentions_recurrence(graph_def):
                return False
        if is_iterator(source):
            return self._step.replaces(self._traces.of(source))
        return bool(source) and self._step.replaces(self._step.trace(to_tensors(source[0])))
