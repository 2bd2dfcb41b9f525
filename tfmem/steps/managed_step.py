"""One traced training step that callers call as the trace itself, while it passes through its phases."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from graph_passes.decision import FusionWhy
from graph_passes.report import Report
from tfmem.capture.concrete_function import call_traced, is_recorded
from tfmem.runtime.engine import Engine
from tfmem.runtime.out_of_memory import SUSPECTS
from tfmem.runtime.progress import shown
from tfmem.steps import contest, measuring
from tfmem.steps.after_grappler import with_fusion
from tfmem.steps.agreement import tell_others
from tfmem.steps.contest import fuse, take_turn
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.phases import Event, Machine, Move, Phase
from tfmem.steps.planning import begin
from tfmem.steps.random_streams import Draws
from tfmem.steps.settling import left
from tfmem.steps.states import (
    Checking,
    Contest,
    Failed,
    Fusing,
    Placed,
    Planning,
    Probed,
    Settled,
    State,
    Trying,
    Warming,
)
from tfmem.steps.trace import Trace
from tfmem.steps.trials import CPU_RETRIES, GPU_TRIALS

_FINAL = (Settled, Failed)
_runs = itertools.count(1)


class ManagedStep:
    """One trace of a function, run under a budget. Calls are as to the trace itself."""

    def __init__(
        self,
        concrete: Any,
        engine: Engine,
        jit_compile: bool = False,
        draws: Draws | None = None,
        others: BatchProfiles | None = None,
    ) -> None:
        """Plan by estimate.

        Args:
            concrete: the trace, a `ConcreteFunction`.
            engine: budget, device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move.
            draws: streams of random numbers that this step goes on with, and others; its own if not given.
            others: what was observed of other batch sizes of the function.

        Raises:
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._given = concrete
        self._lock = threading.RLock()  # of calls that run alone, and of what replaces the state
        self._timing = threading.Lock()  # of the thread that times
        self._took = 0.0  # seconds of the latest call with probes
        self._new_trace = partial(Trace, concrete, engine, jit_compile, draws)
        trace = self._new_trace()
        others = BatchProfiles() if others is None else others
        self._job = job = Job(engine, trace, others, engine.budget, next(_runs))
        self._machine: Machine[State] = Machine(engine.label or trace.name, job.given())
        count = len(concrete.graph.get_operations())
        with shown(engine.options.progress, lambda: f"planning {self._machine.name} ({count:,} ops)"):
            self._move(begin(job))
            self._go_on()

    @property
    def _state(self) -> State:
        return self._machine.state

    def _move(self, move: Move[State]) -> State:
        return self._machine.move(move)

    def _go_on(self) -> None:
        """Begin fusion, once memory is settled."""
        if isinstance(state := self._state, Placed):
            self._move(fuse(self._job, state))

    def _take_over(self) -> State:
        """The state, after taking over the plan of a thread that has finished."""
        with self._lock:
            state = self._state
            if not isinstance(state, Planning) or not state.work.done:
                return state
            move = state.work.take()
            if move is not None:
                self._move(move)
            else:
                error = state.work.error or RuntimeError("planning ended without a result")
                self._job = job = replace(self._job, trace=self._new_trace())
                notes = (job.noted(error, "planning in the background", "the unmodified step runs"),)
                report = replace(state.report, notes=notes)
                self._move(left(job, replace(state, report=report), Event.FAULT))
            self._go_on()
            return self._state

    @property
    def phase(self) -> Phase:
        """Where the step is in its life."""
        return self._state.phase

    @property
    def report(self) -> Report:
        """What was decided and measured so far."""
        state = self._state
        if isinstance(state, Fusing) and (found := state.work.result) is not None:
            return found.report
        if isinstance(state, Planning):
            return with_fusion(state.report, FusionWhy.MEANWHILE)
        if self._job.engine.stitches and isinstance(state, Probed | Checking | Placed):
            return with_fusion(state.report, FusionWhy.UNDECIDED)
        return state.report

    @property
    def unchanged(self) -> bool:
        """Whether all further calls run the unmodified trace."""
        state = self._state
        return state.phase.is_final and state.function is self._given

    @property
    def settled(self) -> bool:
        """Whether `function` is final and holds no probes."""
        return self._state.phase.is_final

    @property
    def function(self) -> Any:
        """The `ConcreteFunction` that runs now; callers may call it, put it into other graphs, and save it."""
        function = self._state.function
        return getattr(function, "portable", function)

    def wait(self) -> None:
        """Wait until a planning thread is done; the next call uses its plan."""
        if isinstance(state := self._state, Planning | Fusing):
            state.work.wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        state = self._machine.state
        if isinstance(state, _FINAL):  # the only way that is walked for good, so it is short
            try:
                return call_traced(state.function, args, kwargs)
            except SUSPECTS as error:
                tell_others(self._job, state.report, error)
                raise
        if isinstance(state, Planning):
            state = self._take_over()
        if isinstance(state, Planning):
            result = call_traced(state.function, args, kwargs)
            state.work.begin()
            return result
        if state.phase.is_final or is_recorded(self._given, args, kwargs):  # by a tape: then the original runs
            return call_traced(state.function, args, kwargs)
        if state.phase.is_beside:
            return self._beside(args, kwargs)
        with self._lock:  # an observed step runs alone
            return self._alone(args, kwargs)

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step that is measured, until it has run other than dry; then go on to what follows."""
        done, result = False, None
        while not done and isinstance(state := self._state, Probed):
            del result
            began, doing = time.monotonic(), f"{self._machine.name}: {self._doing(state)}"
            with shown(self._job.engine.options.progress, partial(str, doing), self._took):
                done, result = self._probed(state, args, kwargs)
            self._took = time.monotonic() - began
        if not done:
            result = self._unprobed(args, kwargs)
        self._go_on()
        return result

    def _doing(self, state: Probed) -> str:
        """What the next call with probes does, in words."""
        if isinstance(state, Trying):
            most = GPU_TRIALS if self._job.is_gpu else 1 + CPU_RETRIES
            return f"trial {len(state.search.trials) + 1} of at most {most}"
        return "running a first plan" if isinstance(state, Warming) else "observing a step"

    def _probed(self, state: Probed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run a plan with probes; whether that was the step, and its result."""
        job = self._job
        try:
            function = partial(call_traced, state.function, args, kwargs)
            result, samples, flow = job.engine.meter.sampled(job.run, function)
        except SUSPECTS as error:
            self._move(measuring.short_of_memory(job, state, error))
            return False, None
        job.trace.ran(state.function)
        self._move(measuring.ran(job, state, samples, flow))
        return not state.search.dry_run, result

    def _unprobed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was chosen, and watch it if it is to be."""
        state, job = self._state, self._job
        function = partial(call_traced, state.function, args, kwargs)
        if not isinstance(state, Checking):  # since the call, or since another thread's
            return function()
        result, peak = job.engine.meter.watched(function)
        job.trace.ran(state.function)
        self._move(measuring.watched(job, state, peak))
        return result

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step, and perhaps time it: before, on copies, or as it runs."""
        before = self._state  # what it runs is kept until its successor has run, which goes on with its random numbers
        ready = not isinstance(before, Fusing) or before.work.done
        if ready and self._timing.acquire(blocking=False):
            try:
                state = self._timed(args, kwargs)
                if isinstance(state, Contest) and state.turns is not None:
                    result, move = take_turn(state, state.turns, args, kwargs)
                    self._move(move)
                    return result
            finally:
                self._timing.release()
        with nullcontext() if ready else self._job.engine.alternation.call():
            result = call_traced(self._state.function, args, kwargs)
        if isinstance(before, Fusing):
            before.work.begin()
        return result

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The state after all decisions that are possible now, and after a slice of timing."""
        state = self._state
        if isinstance(state, Fusing):
            state = self._move(contest.planned(state))
        if isinstance(state, Contest) and state.turns is None:
            state = self._move(contest.contest(state, args, kwargs))
        return state
