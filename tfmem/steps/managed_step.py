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
from graph_passes.errors import BudgetError
from graph_passes.report import Report
from tfmem.capture.concrete_function import call_traced, is_recorded
from tfmem.capture.strategies import runs_elsewhere
from tfmem.runtime.collector import held_off
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import left_to_tensorflow
from tfmem.runtime.out_of_memory import SUSPECTS, lacks_memory
from tfmem.runtime.progress import shown
from tfmem.steps import agreed_peaks, agreed_trials, comparing, composed, dividing, improving, measuring, xla_runner
from tfmem.steps.agreement import tell_others
from tfmem.steps.checking import watched
from tfmem.steps.comparing import fuse, take_turn
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.phases import Event, Phase, StepMachine, Transition
from tfmem.steps.planning import begin
from tfmem.steps.random_streams import Draws
from tfmem.steps.settling import left
from tfmem.steps.so_far import doing, so_far
from tfmem.steps.states import (
    Checking,
    Comparing,
    Compiling,
    Composing,
    Dividing,
    Failed,
    Fusing,
    Improving,
    Placed,
    Planning,
    Probed,
    Settled,
    Solving,
    StepState,
    Tuning,
    Watching,
    WatchingTogether,
)
from tfmem.steps.trace import Trace

_FINAL = (Settled, Failed)
_runs = itertools.count(1)


class ManagedStep:
    """One trace of a function, with what tfmem makes of it. Calls are as to the trace itself."""

    def __init__(
        self,
        concrete: Any,
        engine: Engine,
        jit_compile: bool | None = False,
        draws: Draws | None = None,
        others: BatchProfiles | None = None,
        elsewhere: str = "",
        trace: Trace | None = None,
    ) -> None:
        """Plan the trace: by estimates, or by a plan or a profile that is known.

        Args:
            concrete: the trace, a `ConcreteFunction`.
            engine: budget, device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move; None: it may, False: it must not.
            draws: streams of random numbers that this step goes on with, and others; its own if not given.
            others: what was observed of other batch sizes of the function.
            elsewhere: why what it is called with is left to TensorFlow; "" if it is not.
            trace: the trace on its way through the passes; by default a new one.

        Raises:
            ReplicasError: the step runs in other processes, on a TPU or on a mesh, and the user gave a budget.
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._given = concrete
        elsewhere = elsewhere or runs_elsewhere(concrete)
        if elsewhere:
            engine = left_to_tensorflow(engine, elsewhere)
        self._lock = threading.RLock()  # of calls that run alone, and of what replaces the state
        self._timing = threading.Lock()  # of the thread that times
        self._took = 0.0  # seconds of the latest call with probes
        self._new_trace = partial(Trace, concrete, engine, jit_compile, draws)
        trace = trace or self._new_trace()
        others = BatchProfiles() if others is None else others
        self._job = job = Job(engine, trace, others, engine.settings.budget, next(_runs), elsewhere)
        self._machine: StepMachine[StepState] = StepMachine(trace.name, job.given())
        what = f"planning {trace.name} ({len(concrete.graph.get_operations()):,} ops)"
        with shown(engine.settings.options.progress, lambda: what), held_off():
            self._take(begin(job))
            self._go_on()

    @property
    def _state(self) -> StepState:
        return self._machine.state

    def _take(self, transition: Transition[StepState]) -> StepState:
        return self._machine.take(dividing.before_the_end(self._job, transition))

    def _go_on(self) -> None:
        """Begin fusion, once memory is settled."""
        if isinstance(state := self._state, Placed):
            self._take(fuse(self._job, state))
        if not self._job.engine.settings.observes:
            self._compose()

    def _take_over(self) -> StepState:
        """The state, after taking over the plan of a thread that has finished."""
        with self._lock:
            state = self._state
            if not isinstance(state, Planning) or not state.work.done:
                return state
            if (transition := state.work.take()) is not None:
                self._take(transition)
            else:
                error = state.work.error or RuntimeError("planning ended without a result")
                self._job = job = replace(self._job, trace=self._new_trace())
                notes = (job.noted(error, "planning in the background", "the unmodified step runs"),)
                self._take(left(job, replace(state, report=replace(state.report, notes=notes)), Event.FAULT))
            self._go_on()
            return self._state

    def _after_solving(self) -> StepState:
        """The state, after going on from a plan that a thread has made."""
        with self._lock:
            state = self._state
            if isinstance(state, Improving | Solving) and state.work.done:
                with held_off():
                    self._take(improving.ended(self._job, state))
                self._go_on()
            return self._state

    def _after_dividing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepState:
        """The state, after dry runs of a step that a thread has divided."""
        with self._lock:
            state, job = self._state, self._job
            if not isinstance(state, Dividing) or state.step is not None or not state.work.done:
                return state
            try:
                trace = dividing.divided(state)
                if not isinstance(trace, Trace):
                    return self._machine.take(dividing.refused(state, trace))
                step = ManagedStep(self._given, composed.memory_engine(job.engine), trace=trace)
                if trace.shared:  # calls train with it, since replicas have no dry runs
                    return self._machine.take(Transition(Event.RAN, replace(state, step=step)))
                step._run_probed(args, kwargs)
                self._job, transition = dividing.decided(job, state, trace, step._state)
            except Exception as error:  # no variable was written: the step keeps its moves
                transition = dividing.failed(job, state, error)
            return self._machine.take(transition)

    @property
    def phase(self) -> Phase:
        """Where the step is in its life."""
        return self._state.phase

    @property
    def report(self) -> Report:
        """What was decided and measured so far."""
        return replace(so_far(self._state, self._job.engine.settings.stitches), decided=self.decided)

    @property
    def unchanged(self) -> bool:
        """Whether all further calls run the unmodified trace, with XLA if that would run it."""
        state = self._state
        return state.phase.is_final and state.function is self._given and not state.report.xla_lost

    @property
    def settled(self) -> bool:
        """Whether `function` is final and holds no probes."""
        return self._state.phase.is_final

    @property
    def wrote_nothing(self) -> bool:
        """Whether a call that has failed is known to have written no variable."""
        return isinstance(state := self._state, Probed) and measuring.wrote_nothing(self._job, state)

    @property
    def decided(self) -> bool:
        """Whether `function` is what a caller would be given for good, but for tuned kernels, and for XLA."""
        return self.settled or isinstance(self._state, Tuning | Compiling)

    @property
    def function(self) -> Any:
        """The `ConcreteFunction` that runs now; callers may call it, put it into other graphs, and save it."""
        function = self._state.function
        return getattr(function, "portable", function)

    @property
    def running(self) -> Any:
        """The function that calls run now."""
        return self._state.function

    def wait(self) -> None:
        """Wait until a planning thread is done; the next call uses its plan."""
        state = self._state
        threads = Planning | Improving | Solving | Dividing | Fusing | Tuning | Compiling | Comparing
        if isinstance(state, threads) and state.work is not None:
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
        elif isinstance(state, Improving | Solving):
            state = self._after_solving()
        elif isinstance(state, Dividing):
            state = self._after_dividing(args, kwargs)
        if isinstance(state, Planning | Improving | Solving) or (isinstance(state, Dividing) and state.step is None):
            result = call_traced(state.function, args, kwargs)
            state.work.begin()
            return result
        if state.phase.is_final or is_recorded(self._given, args, kwargs):  # by a tape: its gradient is the original's
            return call_traced(state.function, args, kwargs)
        if state.phase.is_beside:
            return self._beside(args, kwargs)
        with self._lock:  # an observed step runs alone
            return self._alone(args, kwargs)

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step that is measured, until it has run other than dry; then go on to what follows."""
        if isinstance(state := self._state, Composing):
            return self._with_regions(args, kwargs)
        if isinstance(state, Dividing) and state.step is not None:
            call = partial(state.step, *args, **kwargs)
            return dividing.called(self._job, state, state.step, call, self._machine.take)
        done, result = self._run_probed(args, kwargs)
        if not done:
            result = self._unprobed(args, kwargs)
        self._go_on()
        return result

    def _run_probed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run with probes, dry or until the step has run; whether it has, and its result."""
        done, result = False, None
        while not done and isinstance(state := self._state, Probed):
            del result
            began, what = time.monotonic(), f"{self._machine.name}: {doing(state, self._job.is_gpu)}"
            with shown(self._job.engine.settings.options.progress, partial(str, what), self._took), held_off():
                done, result = self._probed(state, args, kwargs)
            self._took = time.monotonic() - began
        return done, result

    def _probed(self, state: Probed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run a plan with probes; whether that was the step, and its result."""
        job, held = self._job, False
        try:
            function = partial(call_traced, state.function, args, kwargs)
            with job.room(state) as held:
                result, samples, flow = job.engine.meter.sampled(job.run, function, job.waits_for)
        except SUSPECTS as error:
            self._take(measuring.short_of_memory(job, state, error, held))
            return False, None
        job.trace.ran(state.function)
        self._take(measuring.ran(job, state, samples, flow))
        return not state.search.dry_run, result

    def _unprobed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was chosen, and watch it if it is to be."""
        state, job = self._state, self._job
        function = partial(call_traced, state.function, args, kwargs)
        if isinstance(state, WatchingTogether):
            return self._together(state, args, kwargs)
        if isinstance(state, Watching) and state.tables:
            result, samples, _ = job.engine.meter.sampled_on(state.tables, function, job.waits_for)
            job.trace.ran(state.function)
            self._take(measuring.timed_on(job, state, samples))
            return result
        if isinstance(state, Watching):
            result, peaks, seconds = job.engine.meter.timed_on(state.devices, function, job.waits_for)
            job.trace.ran(state.function)
            self._take(measuring.watched_on(job, state, peaks, seconds))
            return result
        if isinstance(state, Improving):
            return improving.called(job, state, function)
        if not isinstance(state, Checking):  # since the call, or since another thread's
            return function()
        result, peak = job.engine.meter.watched(function, job.waits_for)
        job.trace.ran(state.function)
        self._take(watched(job, state, peak))
        return result

    def _together(self, state: WatchingTogether, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what all workers watch, or what they have agreed on since."""
        job = self._job
        after: StepState = state
        if agreed_trials.is_due(state):
            after = self._take(agreed_trials.agreed(job, job.engine.workers.board(), state))
            self._go_on()  # before the call: another worker's may fail, and end later
        function = partial(call_traced, self._state.function, args, kwargs)
        try:
            if not isinstance(after, WatchingTogether):
                return function()
            self._take(Transition(Event.RAN, begun := agreed_peaks.begins(after)))
            result, transition = agreed_trials.run(job, begun, function)
        except SUSPECTS as error:
            tell_others(job, after.report, error)
            raise
        self._take(transition)
        return result

    def _with_regions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step with its regions, as a step inside this one, until that is settled."""
        state = self._compose()
        if not isinstance(state, Composing) or state.step is None:  # decided, perhaps by another thread's call
            return call_traced(state.function, args, kwargs)
        call = partial(state.step, *args, **kwargs)
        return composed.called(state, state.step, call, lambda run: call_traced(run, args, kwargs), self._take)

    def _compose(self) -> StepState:
        """The state once there is a step that runs with its regions; where nothing is measured, that is the choice."""
        while isinstance(state := self._state, Composing) and state.step is None:
            try:
                engine = composed.memory_engine(self._job.engine)
                step = ManagedStep(self._given, engine, trace=composed.prepared(state))
            except BudgetError as error:
                self._take(composed.gave_up(state, error))
                continue
            except Exception as error:  # after any error, the step runs without regions
                return self._take(state.fuser.failed(state, error, "stitching", FusionWhy.FAILED))
            self._take(Transition(Event.RAN, state := replace(state, step=step)))
            if step.settled:
                self._take(composed.decided(state, step.report, step.running))
        return self._state

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step, and perhaps time it: before, on copies, or as it runs."""
        before = self._state  # what it runs is kept until its successor has run, which goes on with its random numbers
        work = before.work if isinstance(before, Fusing | Tuning | Compiling | Comparing) else None
        ready = work is None or work.done
        if ready and self._timing.acquire(blocking=False):
            try:
                state = self._timed(args, kwargs)
                if isinstance(state, Comparing) and state.turns is not None:
                    try:
                        result, transition = take_turn(state, state.turns, args, kwargs)
                    except SUSPECTS as error:
                        tell_others(self._job, state.report, error)
                        if state.turns.stitched and lacks_memory(error):
                            self._take(comparing.without_room(state))
                        raise
                    self._take(transition)
                    return result
            finally:
                self._timing.release()
        with nullcontext() if ready else self._job.engine.alternation.call():
            result = call_traced(self._state.function, args, kwargs)
        if isinstance(before, Fusing | Tuning):
            before.work.begin()
        return result

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepState:
        """The state after all decisions that are possible now, and after a slice of timing."""
        state = self._state
        if isinstance(state, Fusing):
            state = self._take(comparing.planned(state))
        elif isinstance(state, Tuning) and state.work.done:
            state = self._take(comparing.tuned(state))
        if isinstance(state, Comparing) and state.turns is None:
            state = self._take(comparing.compare(state, args, kwargs))
        if isinstance(state, Compiling):
            state = self._with_xla(state, args, kwargs)
        return state

    def _with_xla(self, state: Compiling, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepState:
        """The state once XLA compiles the step for the arguments of a call, or has done so."""
        if state.work is None:
            state = xla_runner.begun(state, args, kwargs)
            self._take(Transition(Event.BEGUN, state))
            if self._job.engine.settings.options.fusion.tune == "full":
                self.wait()
        if state.work is None or not state.work.done:
            return state
        found = self._take(xla_runner.compiled(state))
        return self._take(comparing.compare(found, args, kwargs)) if isinstance(found, Comparing) else found
