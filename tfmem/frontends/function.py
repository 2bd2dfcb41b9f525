"""A `tf.function` whose every trace runs under the memory budget."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError, ShapesError
from graph_passes.report import Report
from tfmem.capture.call_arguments import open_shapes, shapes_key, with_defaults
from tfmem.capture.concrete_function import call_key, call_traced, flat_arguments, is_for_xla
from tfmem.capture.strategies import merges_told, on_mesh
from tfmem.runtime.engine import Engine
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.managed_step import ManagedStep
from tfmem.steps.random_streams import Draws

MOST_KNOWN = 1024  # shapes whose step is remembered

Steps = dict[Any, dict[Hashable, ManagedStep]]  # by trace, then by the shapes that it leaves open


class OptimizedFunction(tf.__internal__.tracking.Trackable):
    """Called and traced as the `tf.function` that it was made of; gives the same results.

    What else a `tf.function` has, such as `input_signature`, is that one's. An object that holds this one is saved with
    that one, so what is loaded runs without tfmem.

    Each trace is planned when it is first called, and observed during its first calls (see
    `tfmem.steps.managed_step`). Called from within another `tf.function`, a trace is planned from a cached profile or
    estimates, and not observed; from within one that XLA compiles, what it was made of is called.
    """

    def __init__(self, function: Any, engine: Engine, compiled: Any = None, may_compile: bool = True) -> None:
        """Wrap `function`.

        Args:
            function: a `tf.function`.
            engine: budget, device and options.
            compiled: the same function with XLA; runs in place of a trace that needs no moves. Without, the trace does.
            may_compile: whether the user allows XLA; `jit_compile=False` of the function itself does not.
        """
        for name in ("__name__", "__qualname__", "__doc__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))
        self.__signature__ = inspect.signature(function.python_function)  # else it has none: see `__get__`
        self._name = ""  # as an attribute of a class
        self._object: weakref.ref[Any] | None = None  # whose method this is
        self._function = function
        self._compiled = compiled
        self._engine = engine
        asked: bool | None = getattr(function, "_jit_compile", None)
        self._jit_compile = True if compiled is not None else asked if may_compile else False
        self._lock = threading.Lock()
        # Batches of all sizes go on with the random numbers of their trace.
        self._draws: dict[Any, Draws] = {}
        self._profiles = BatchProfiles()
        self._steps: Steps = {}
        self._unobserved: Steps = {}
        self._with_xla: dict[Any, Any] = {}
        self._known: dict[Hashable, tuple[Any, ManagedStep]] = {}  # by `call_key`
        self._methods: MutableMapping[Any, OptimizedFunction] = weakref.WeakKeyDictionary()  # by the object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, optimised."""
        if tf.config.functions_run_eagerly():
            return self._function(*args, **kwargs)
        if not tf.executing_eagerly():
            if is_for_xla():
                return self._function(*args, **kwargs)
            args, kwargs = with_defaults(self._function, args, kwargs)
            return call_traced(self.get_concrete_function(*args, **kwargs), args, kwargs)
        step, tensors = self._step_of(args, kwargs)
        return step(*tensors)

    def __getattr__(self, name: str) -> Any:
        """What the `tf.function` has, and this has not."""
        if name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._function, name)

    def __reduce__(self) -> Any:
        """The method of whatever its object becomes: a copy, or what another process reads."""
        if self._object is None:
            raise TypeError(f"cannot pickle '{type(self).__name__}' object; optimise the function where it is read")
        return getattr, (self._object(), self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedFunction:
        """A function with separate traces and plans; a method is the copied object's."""
        if self._object is not None:
            method: OptimizedFunction = getattr(copy.deepcopy(self._object(), memo), self._name)
            return method
        function, compiled = (copy.deepcopy(each, memo) for each in (self._function, self._compiled))
        return OptimizedFunction(function, self._engine, compiled, self._jit_compile is not False)

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the name of the method that this is."""
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> OptimizedFunction:
        """The method of `instance`, with separate traces and plans, as a method that is a `tf.function` has."""
        if instance is None:
            return self
        if instance not in self._methods:
            compiled = None if self._compiled is None else self._compiled.__get__(instance, owner)
            method = OptimizedFunction(
                self._function.__get__(instance, owner), self._engine, compiled, self._jit_compile is not False
            )
            self._methods[instance] = method
            tracks = isinstance(instance, tf.__internal__.tracking.AutoTrackable)  # it is saved with what it tracks
            if self._name and tracks:
                method._name, method._object = self._name, weakref.ref(instance)
                instance._track_trackable(method, self._name, overwrite=True)
        return self._methods[instance]

    def _trackable_children(self, save_type: str = "checkpoint", **how: Any) -> dict[str, Any]:
        """What a SavedModel holds: the function that is called. A checkpoint holds nothing of it."""
        return {"__call__": self._function} if save_type == "savedmodel" else {}

    def call_as(self, traced: Any, *args: Any) -> Any:
        """Run the step on `args`, with a trace of this function whose shapes may be less known than theirs.

        Under a budget, each set of shapes is planned by itself, with the ops of that one trace.

        Args:
            traced: what `trace` gave.
            *args: arguments that the trace takes.
        """
        key = shapes_key(args)
        known = None if key is None else self._known.get((id(traced), key))
        if known is None:
            shapes = {} if self._engine.settings.budget is None else open_shapes(traced, args)
            known = traced, self._step(traced, self._steps, self._engine, shapes)
            if key is not None:
                self._remember((id(traced), key), known)
        step = known[1]
        if self._compiled is not None and step.unchanged:
            if traced not in self._with_xla:
                self._with_xla[traced] = self._compiled.get_concrete_function(*traced.structured_input_signature[0])
            return self._with_xla[traced](*args)
        return step(*args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The `ConcreteFunction` for arguments, or for their specs, as `tf.function` chooses it."""
        with merges_told():
            return self._function.get_concrete_function(*args, **kwargs)

    def replaces(self, traced: Any) -> bool:
        """Whether calls with this trace run another graph; for engines without a budget, which need no shapes."""
        return not self._step(traced, self._steps, self._engine).unchanged

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """A `ConcreteFunction` for these arguments, with the plan that calls settled on.

        If calls have not settled yet, its plan comes from a cached profile or from estimates.
        """
        concrete = self.trace(*args, **kwargs)
        called = self._steps.get(concrete, {}).get(())
        if called is not None and called.decided:
            return called.function
        return self._step(concrete, self._unobserved, self._engine.under(self._engine.settings.unobserved())).function

    @property
    def python_function(self) -> Any:
        """The Python function that is traced."""
        return self._function.python_function

    @property
    def traced(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._steps or self._unobserved)

    @property
    def report(self) -> Report:
        """What was done to the trace that needs the most memory: a last batch may be smaller than the others.

        Raises:
            GraphError: nothing was traced yet.
        """
        shaped = [found for steps in (self._steps, self._unobserved) for found in list(steps.values())]
        reports = [step.report for found in shaped for step in list(found.values())]
        if not reports and self._methods:
            raise GraphError("nothing to report: this is a method of a class; ask for the report of an object's method")
        if not reports:
            raise GraphError("nothing to report: the function was never called; call it once")
        return max(reports, key=lambda report: report.peak_before)

    def _step_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ManagedStep, Sequence[tf.Tensor]]:
        """The step for a call, and the tensors that it takes."""
        key = call_key(args, kwargs)
        if key is not None and (known := self._known.get(key)) is not None:
            return known[1], args
        all_args, all_kwargs = with_defaults(self._function, args, kwargs)
        concrete = self.trace(*all_args, **all_kwargs)
        sizes = self._sizes(concrete, all_args, all_kwargs)
        tensors = flat_arguments(concrete, all_args, all_kwargs)
        step = self._step(concrete, self._steps, self._engine, sizes, on_mesh(tensors))
        if key is not None and len(tensors) == len(args):  # else a default is a tensor
            self._remember(key, (concrete, step))
        return step, tensors

    def _sizes(self, concrete: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes that a trace leaves open since TensorFlow relaxed it (`reduce_retracing`): each is planned by itself.

        Where the user left them open, with an input signature, the user knows them: see `input_shapes`.
        """
        relaxed = self._engine.settings.budget is not None and getattr(self._function, "input_signature", None) is None
        return open_shapes(concrete, args, kwargs) if relaxed else {}

    def _remember(self, key: Hashable, known: tuple[Any, ManagedStep]) -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[key] = known

    def _step(
        self,
        concrete: Any,
        steps: Steps,
        engine: Engine,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        elsewhere: str = "",
    ) -> ManagedStep:
        key: Hashable = tuple(sorted((shapes or {}).items()))
        key = (key, elsewhere) if elsewhere else key
        with self._lock:
            step = steps.get(concrete, {}).get(key)
            if step is None:
                if concrete not in self._draws:
                    self._draws[concrete] = Draws(engine.library)
                shaped = engine.under(engine.settings.shaped(shapes)) if shapes else engine
                draws = self._draws[concrete]
                new = partial(ManagedStep, concrete, jit_compile=self._jit_compile, draws=draws, others=self._profiles)
                try:
                    step = new(shaped, elsewhere=elsewhere)
                except ShapesError:
                    if not shapes:  # those are the user's option
                        raise
                    # TensorFlow says what is wrong with them when it runs the step
                    step = new(engine.under(replace(engine.settings, passes=(), budget=None)))
                steps.setdefault(concrete, {})[key] = step
        return step
