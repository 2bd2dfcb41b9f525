"""The systems that run a workload's step: TensorFlow's executor, XLA in its two modes, tfmem, and its fusion alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import tensorflow as tf

from benchmarks.fusion.cases import DEFAULT, OF_TFMEM
from benchmarks.fusion.workloads.workload import Workload


@dataclass
class System:
    """A workload with separate variables, and what runs its step.

    Attributes:
        name: one of `cases.SYSTEMS`.
        workload: the variables and inputs.
        function: runs the step.
        calls: how often it was called.
        first: seconds of the first call, `tfmem.optimize` included.
        start: the state after it.
        seconds: of the timed steps.
    """

    name: str
    workload: Workload
    function: Callable[..., Any]
    calls: int = 0
    first: float = 0.0
    start: list[np.ndarray] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def begun(cls, name: str, make: Callable[[], Workload]) -> System:
        """A system that was made, and called once."""
        workload = make()
        began = time.perf_counter()
        system = cls(name, workload, function_of(name, workload.step))
        system.enter()
        system.scalar()
        system.first = time.perf_counter() - began
        system.start = [variable.numpy() for variable in workload.state]
        return system

    def enter(self) -> None:
        """Prepare a block of calls: whether XLA clusters ops is a setting of the process, which each call reads."""
        tf.config.optimizer.set_jit("autoclustering" if self.name == "auto-jit" else "")

    def __call__(self) -> Any:
        """One step, perhaps not done yet."""
        self.calls += 1
        return self.function(*self.workload.inputs)

    def scalar(self) -> float:
        """One step, and its first number on the host: that ends it."""
        result = self()
        return float(np.ravel(result[0] if isinstance(result, tuple) else result)[0])

    def is_decided(self) -> bool:
        """Whether it is decided how tfmem runs the step."""
        import tfmem

        return self.name not in OF_TFMEM or tfmem.report(self.function).decided

    def is_tuned(self) -> bool:
        """Whether it is decided, and tfmem times nothing any more that would disturb others."""
        import tfmem

        return self.is_decided() and (self.name not in OF_TFMEM or not tfmem.report(self.function).tuning)

    def values(self) -> list[np.ndarray]:
        """One step: all that it computed."""
        result = self()
        return [np.asarray(each) for each in (result if isinstance(result, tuple) else (result,))]

    def timed(self) -> None:
        """Adds to `seconds` what a step takes."""
        calls = self.workload.calls
        began = time.perf_counter()
        for _ in range(calls - 1):
            self()
        self.scalar()
        self.seconds.append((time.perf_counter() - began) / calls)


def function_of(name: str, step: Any) -> Callable[..., Any]:
    """What runs `step`, a `tf.function`."""
    if name == "jit_compile":
        return tf.function(step.python_function, jit_compile=True)
    if name == DEFAULT:
        import tfmem

        return tfmem.optimize(step)
    return stitched(step, alone=name == "fusion") if name in OF_TFMEM else step


def stitched(step: Any, *, alone: bool) -> Callable[..., Any]:
    """The step as tfmem has it, with all of its passes or with fusion alone."""
    import tfmem
    from tfmem.options import PassName

    return tfmem.optimize(step, passes=("fusion",) if alone else get_args(PassName))
