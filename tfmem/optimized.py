"""A `tf.function` whose every trace runs under the memory budget."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError
from graph_passes.report import Report
from tfmem.capture.function import call_key
from tfmem.engine import Engine
from tfmem.known import BatchProfiles
from tfmem.step import ManagedStep

MOST_KNOWN = 1024  # shapes whose step is remembered


class OptimizedFunction:
    """Called and traced as the `tf.function` that it was made of; gives the same results.

    Each trace is planned when it is first called, and observed during its first calls (see `tfmem.step`). Called from
    within another `tf.function`, a trace is planned from a cached profile or estimates, and not observed.
    """

    def __init__(
        self,
        function: Any,
        engine: Engine,
        jit_compile: bool = False,
        fallback: Callable[..., Any] | None = None,
    ) -> None:
        """Wrap `function`.

        Args:
            function: a `tf.function`.
            engine: budget, device and options.
            jit_compile: whether a step that moves nothing runs under XLA.
            fallback: called in place of a trace that needs no moves; the trace itself if not given.
        """
        self._function = function
        self._engine = engine
        self._jit_compile = jit_compile or bool(getattr(function, "_jit_compile", False))
        self._fallback = fallback
        self._lock = threading.Lock()
        self._steps: MutableMapping[Any, ManagedStep] = weakref.WeakKeyDictionary()
        self._unobserved: MutableMapping[Any, ManagedStep] = weakref.WeakKeyDictionary()
        self._known: dict[Hashable, ManagedStep] = {}  # by `call_key`
        self._profiles = BatchProfiles()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, optimised."""
        if not tf.executing_eagerly():
            return self.get_concrete_function(*args, **kwargs)(*args, **kwargs)
        step = self._step_of(args, kwargs)
        if self._fallback is not None and step.unchanged:
            return self._fallback(*args, **kwargs)
        return step(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """A `ConcreteFunction` for these arguments, with the plan that calls settled on.

        If none did by now, with a plan from a cached profile or from estimates.
        """
        concrete = self._trace(args, kwargs)
        called = self._steps.get(concrete)
        if called is not None and called.settled:
            return called.function
        return self._step(concrete, self._unobserved, self._engine.unobserved()).function

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
        reports = [step.report for steps in (self._steps, self._unobserved) for step in list(steps.values())]
        if not reports:
            raise GraphError("nothing to report: the function was never called; call it once")
        return max(reports, key=lambda report: report.peak_before)

    def _step_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ManagedStep:
        key = call_key(args, kwargs)
        step = None if key is None else self._known.get(key)
        if step is None:
            step = self._step(self._trace(args, kwargs), self._steps, self._engine)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            if key is not None:
                self._known[key] = step
        return step

    def _trace(self, args: Any, kwargs: Any) -> Any:
        return self._function.get_concrete_function(*args, **kwargs)

    def _step(self, concrete: Any, steps: MutableMapping[Any, ManagedStep], engine: Engine) -> ManagedStep:
        with self._lock:
            step = steps.get(concrete)
            if step is None:
                step = steps[concrete] = ManagedStep(concrete, engine, self._jit_compile, self._profiles)
        return step
