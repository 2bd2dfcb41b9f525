"""A `tf.function` whose every trace runs under the memory budget."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError
from graph_passes.report import Report
from tfmem.engine import Engine
from tfmem.step import ManagedStep


class OptimizedFunction:
    """Called and traced as the `tf.function` that it was made of; gives the same results.

    Each trace is planned when it is first called, and observed during its first calls (see `tfmem.step`). Called from
    within another `tf.function`, a trace is planned from a cached profile or estimates, and not observed.
    """

    def __init__(self, function: Any, engine: Engine, jit_compile: bool = False, fallback: Callable[..., Any] | None = None) -> None:
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
        self._steps: weakref.WeakKeyDictionary[Any, ManagedStep] = weakref.WeakKeyDictionary()
        self._latest: ManagedStep | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, optimised."""
        step = self._step(*args, **kwargs)
        if not tf.executing_eagerly():
            return step.function(*args, **kwargs)
        if self._fallback is not None and step.unchanged:
            return self._fallback(*args, **kwargs)
        return step(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The `ConcreteFunction` that a call with these arguments runs, as planned by now."""
        return self._step(*args, **kwargs).function

    @property
    def python_function(self) -> Any:
        """The Python function that is traced."""
        return self._function.python_function

    @property
    def report(self) -> Report:
        """What was done to the trace that was used last.

        Raises:
            GraphError: nothing was traced yet.
        """
        if self._latest is None:
            raise GraphError("nothing to report: the function was never called; call it once")
        return self._latest.report

    def _step(self, *args: Any, **kwargs: Any) -> ManagedStep:
        concrete = self._function.get_concrete_function(*args, **kwargs)
        with self._lock:
            step = self._steps.get(concrete)
            if step is None:
                step = self._steps[concrete] = ManagedStep(concrete, self._engine, self._jit_compile)
            self._latest = step
        return step
