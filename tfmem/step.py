"""One traced training step under a memory budget: estimated, observed, planned, tried; see `tfmem.stages`.

Every call computes the same step, so training starts with the first. A step that fits by far is left as it was; three
of its calls are watched, too, for what it takes.

A GPU's memory may run out under a plan, and a step that has written variables cannot be run again. So there the first
three stages are rehearsals, all of them in the first call: the same graph, but no variable is written.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import tensorflow as tf

from custom_ops.errors import TfmemError
from custom_ops.load import Counters
from graph_passes import pipeline, serde
from graph_passes.analysis.fragmentation import Room
from graph_passes.analysis.region import keep_variables_in_place
from graph_passes.analysis.timeline import Timeline
from graph_passes.cost.model import Measured
from graph_passes.cost.observe import Observation, Sample, observe
from graph_passes.ir import parse_input
from graph_passes.offload.apply import Probing
from graph_passes.offload.plan import OffloadPlan
from graph_passes.report import ORDERED, Report
from tfmem.capture.captured import require_feeds
from tfmem.capture.function import call_traced, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.devices import conditions
from tfmem.draws import Draws, StepGraphs
from tfmem.engine import NOT_PLANNABLE, Engine
from tfmem.profile import ProfileCache, fingerprint
from tfmem.recurrent import with_swaps
from tfmem.rehearsal import can_rehearse
from tfmem.rooms import find_room, keep_apart, separate
from tfmem.sampling import sampled, watched
from tfmem.shortage import SUSPECTS, lacks_memory
from tfmem.stages import Stage
from tfmem.trials import CPU_RETRIES, Trial, checked, choose, first_plans, judged, no_room, untried

SURELY_FITS = 0.75  # of the budget: a step estimated at less is not observed
GOOD_ENOUGH = 1.02  # times the ops' own run times: nothing is left to gain
CHECKS = 3  # unprobed steps whose peak is watched
PATIENT_CALLS = 3  # that could not be measured, until the step does without

_runs = itertools.count(1)


class ManagedStep:
    """One trace of a function, run under a budget. Calls are as to the trace itself.

    Attributes:
        report: what was decided and measured by now.
    """

    def __init__(self, concrete: Any, engine: Engine, jit_compile: bool = False, draws: Draws | None = None) -> None:
        """Plan by estimate.

        Args:
            concrete: the trace, a `ConcreteFunction`.
            engine: budget, device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move.
            draws: streams of random numbers that this step goes on with, and others; its own if not given.

        Raises:
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._concrete = concrete
        self._engine = engine
        self._walls: list[Any] = []  # see `keep_apart`
        self._make: Callable[..., OffloadPlan] | None = None
        self._free: Room | None = None
        self._jit_compile = jit_compile
        self._lock = threading.RLock()
        self._notes: list[str] = []
        self._trials: list[Trial] = []
        self._tried: set[Any] = set()  # what the plans did
        self._checked: list[int] = []  # peaks of the unprobed steps
        self._replans = 0
        self._unmeasured = 0  # calls during which another was measured
        self._warm = False  # whether the current trial's first, unmeasured run is done
        self._stage = Stage.READY
        self._run = next(_runs)
        self._name = tf.compat.as_str(concrete.name)
        self._source, self._swaps, self._base = engine.swapped(concrete)
        self._function = self._base
        self.report = with_swaps(engine.unlimited(self._name), self._swaps)
        budget = engine.budget
        if budget is None:
            return
        self._budget = budget
        try:
            self._read(draws)
            self._begin()
        except NOT_PLANNABLE as error:
            self.report = engine.left_alone(self.report, error)

    @property
    def unchanged(self) -> bool:
        """Whether calls go to the trace as it was given, by now and for good."""
        return self._function is self._concrete and self._stage is Stage.READY

    @property
    def settled(self) -> bool:
        """Whether `function` is final and holds no probes."""
        return self._stage is Stage.READY

    @property
    def function(self) -> Any:
        """The `ConcreteFunction` that runs by now; it can be called, put into other graphs, and saved."""
        return getattr(self._function, "portable", self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if self.settled:
            return call_traced(self._function, args, kwargs)
        with self._lock:  # an observed step runs alone
            if self.settled:
                return self._function(*args, **kwargs)
            return self._staged(args, kwargs)

    def _read(self, draws: Draws | None) -> None:
        concrete, engine = self._concrete, self._engine
        captured = self._source
        serde.refuse_optimized((node.name, node.op) for node in captured.graph_def.node)
        require_feeds(captured, engine.options.input_shapes)
        self._captured = run_grappler(captured, device=engine.target.kind)
        self._shapes = engine.feed_shapes
        inferred = restore_concrete(concrete, self._captured, self._captured.graph_def, self._shapes)
        graph = serde.from_graph_def(self._captured.graph_def, inferred=inferred.graph)
        if engine.target.is_gpu:
            keep_variables_in_place(graph)
        fetches = [parse_input(name)[0] for name in self._captured.fetches]
        self._step = pipeline.Step.read(graph, self._captured.creation_order, fetches, merging=not engine.target.is_gpu)
        self._rehearsing = engine.target.is_gpu and can_rehearse(graph)
        self._graphs = StepGraphs(concrete, self._captured, self._shapes, draws, engine)
        self._key = fingerprint(graph, {**conditions(engine.target), "budget": self._budget})
        self._cache = ProfileCache(engine.options.cache_directory)

    def _begin(self) -> None:
        engine = self._engine
        careful = self._step.timeline(engine.estimate(workspace=True))
        if careful.peak <= SURELY_FITS * self._budget:
            self._settle(careful, self._plan(careful, self._budget))
            return
        # Workspace is not known yet. Without, this is the least that any plan needs.
        self._timeline = self._step.timeline(engine.estimate(workspace=False))
        least = self._plan(self._timeline, self._budget)  # raises where no plan can meet the budget
        engine.require_host_room(self._timeline, least)
        if engine.options.observe:
            separate(engine, self._concrete.variables)
        self._in_use = engine.in_use_alone
        known = self._cache.load(self._key, self._in_use)
        if known is not None:
            self._notes.append("op times and memory were measured by an earlier process")
            self._learn(known)
            least = self._plan(self._timeline, self._budget, timed=True)
        if not engine.observes:
            if known is None:
                self._notes.append("op times and memory are estimates: nothing was observed")
            if engine.options.observe:
                self._notes.append("nothing can be observed: the allocator keeps no statistics (oneDNN is off)")
            self._settle(self._timeline, least)
            return
        self._observed = known is not None
        if engine.target.is_gpu:
            self._walls = keep_apart(engine, self._timeline)
        plan = partial(self._plan, self._timeline)
        self._firsts = first_plans(engine, self._timeline, self._budget, plan, least, self._room())
        self._first = next(self._firsts)  # also what is left when every trial runs out of memory
        if self._observed and not engine.target.is_gpu:
            self._next_trial()
            return
        self._tried.add(self._first.actions)
        self._build(self._first, probed=True)
        self._stage = Stage.WARM
        self.report = self._describe(self._timeline, self._first)

    def _room(self) -> Room | None:
        return find_room(self._engine, self._timeline, self._budget) if self._engine.target.is_gpu else None

    def _staged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while self._stage not in (Stage.CHECK, Stage.READY):
            try:
                result, samples, flow = sampled(self._engine, self._run, self._function, args, kwargs)
            except SUSPECTS as error:
                self._give_up(error)
                continue
            self._graphs.ran(self._function)
            self._go_on(samples, flow)
            if not self._rehearsing:
                return result
            del result
        if self._stage is Stage.READY:
            return self._function(*args, **kwargs)
        result, peak = watched(self._engine, self._function, args, kwargs)
        self._graphs.ran(self._function)
        self._check(peak)
        return result

    def _go_on(self, samples: list[Sample] | None, flow: tuple[Counters, Counters]) -> None:
        """What follows a probed step that ran through."""
        try:
            if self._stage is Stage.WARM and not self._observed:
                self._stage = Stage.OBSERVE
            elif self._stage is Stage.WARM:
                self._next_trial()
            elif samples is None:
                self._try_again()
            elif self._stage is Stage.OBSERVE:
                seen = observe(self._timeline, self._first.moves, samples, self._first.fillings)
                self._cache.store(self._key, seen, self._in_use)
                self._learn(seen)
                self._next_trial()
            elif not self._warm and self._engine.target.is_gpu:
                self._warm = True
            else:
                self._judge(samples, flow)
        except TfmemError as error:  # measured, it needs more than the graph told; training goes on with what runs
            self._notes.append(f"OVER BUDGET: {error}")
            self._choose()

    def _learn(self, seen: Observation) -> None:
        estimate = self._engine.estimate(workspace=False)
        costs = Measured(seen.seconds, seen.workspace, seen.base, estimate.roofline)
        self._timeline = self._step.timeline(costs)

    def _next_trial(self) -> None:
        """Start the next plan worth trying, or settle on the best that was tried.

        A step that fits in the planned order may not fit in the order TensorFlow would choose, unless by far.
        """
        if self._timeline.peak <= SURELY_FITS * self._budget:
            self._settle(self._timeline, self._plan(self._timeline, self._budget, timed=True))
            return
        if self._make is None:  # the same plans are asked for before each trial
            self._make, self._free = cache(partial(self._plan, self._timeline, timed=True)), self._room()
        known = self._trials, self._make, self._first, self._free
        for plan in untried(self._engine, self._timeline, self._budget, *known):
            if plan.actions not in self._tried:
                self._tried.add(plan.actions)
                self._candidate, self._warm = plan, False
                self._build(plan, probed=True)
                self._stage = Stage.TRIAL
                self.report = self._describe(self._timeline, plan)
                return
        self._choose()

    def _judge(self, samples: list[Sample], flow: tuple[Counters, Counters]) -> None:
        seen = observe(self._timeline, self._candidate.moves, samples, self._candidate.fillings)
        self._trials.append(judged(self._candidate, self._describe(self._timeline, self._candidate), seen, flow))
        floor = sum(step.seconds for step in self._timeline.steps)
        good = not self._engine.target.is_gpu or seen.step_seconds <= GOOD_ENOUGH * floor
        if good and seen.peak <= self._budget:
            self._choose()
        else:
            self._next_trial()

    def _give_up(self, error: Exception) -> None:
        """A plan ran out of memory before any variable was written: go on to the next, with the same step.

        Raises:
            Exception: `error`, if it does not speak of memory, if a weight may have been updated already, so that the
                step cannot be run again, or if there is no other plan.
            InfeasibleBudgetError: there is no other plan, because no plan's allocations find room.
        """
        rows = self._engine.library.probes(self._run)
        reached = max((row.index // 2 for row in rows), default=0)
        if not lacks_memory(error) or (reached >= self._step.first_update and not self._rehearsing):
            raise error
        plan = self._candidate if self._stage is Stage.TRIAL else self._first
        where = str(error).partition("Detected at node ")[2].partition(" ")[0].strip("'")
        self._notes.append(
            f"a plan for {plan.budget:,} bytes ran out of memory at '{where}', before any variable was written; the "
            f"step was run again under another plan{self._graphs.again(self._rehearsing)}"
        )
        if self._stage is Stage.TRIAL:
            self._next_trial()
            return
        following = next((plan for plan in self._firsts if plan.actions not in self._tried), None)
        if following is None:
            room = self._room()
            widest = partial(self._plan, self._timeline, self._budget, widest=True)
            raise (room and no_room(self._engine, self._timeline, widest, room, where)) or error from error
        self._tried.add(following.actions)
        self._first = following
        self._build(following, probed=True)

    def _choose(self) -> None:
        """Settle on the fastest trial that met the budget; if none did, on the one that came nearest."""
        if not self._trials:  # every plan ran out of memory: what ran first is known to run
            self._settle(self._timeline, self._first, force=True)
            return
        best, notes = choose(self._trials, self._budget)
        self._notes += notes
        self._engine.library.trim()  # what trials moved beyond what the best of them does
        self._settle(self._timeline, best.plan, force=True)
        self.report = replace(best.report, notes=self.report.notes)

    def _try_again(self) -> None:
        """Another measured call ran meanwhile, so nothing is known of this one: the next is measured, or none."""
        self._unmeasured += 1
        if self._unmeasured < PATIENT_CALLS:
            return
        if self._stage is not Stage.CHECK:
            self._choose()
        self._stage = Stage.READY
        note = f"not measured: {PATIENT_CALLS} calls ran while another step was measured"
        self.report = replace(self.report, notes=(*self.report.notes, note))

    def _check(self, peak: int | None) -> None:
        """Take note of an unprobed step's peak; plan for less if it is over the budget."""
        if peak is None:
            self._try_again()
            return
        self._checked.append(peak)
        over = peak - self._budget
        if over > 0 and self._replans < CPU_RETRIES:
            try:
                plan = self._plan(self._timeline, self._candidate.tightened(over), timed=True)
                self._engine.require_host_room(self._timeline, plan)
            except TfmemError:
                self._replans = CPU_RETRIES  # nothing is left to try
            else:
                self._notes.append(
                    f"replanned: a plan for {self._candidate.budget:,} bytes ran {over:,} over the budget"
                )
                self._replans += 1
                self._checked = []
                self._settle(self._timeline, plan, force=True)
                return
        if len(self._checked) >= CHECKS:
            notes = tuple(dict.fromkeys((*self._notes, *self.report.notes)))
            known = replace(self.report, notes=notes)
            self.report = checked(known, self._checked, self._budget, planned=self._function is not self._base)
            self._stage = Stage.READY

    def _settle(self, timeline: Timeline, plan: OffloadPlan, force: bool = False) -> None:
        """Make `plan` final. Without moves the trace stays as it was, unless its order is part of what was tried.

        Steps that are observed are watched for a while, but not in place of XLA's.
        """
        self._timeline, self._candidate = timeline, plan
        if plan.moves or force:
            self._build(plan, probed=False)
        else:
            self._function = self._base = self._graphs.unmoved(self._base, self._jit_compile)
        left_to_xla = self._jit_compile and self._function is self._base
        self._stage = Stage.CHECK if self._engine.observes and not left_to_xla else Stage.READY
        self.report = self._describe(timeline, plan)

    def _plan(self, timeline: Timeline, budget: int, **how: Any) -> OffloadPlan:
        engine = self._engine
        return pipeline.plan_step(self._step, timeline, engine.link, budget, engine.options.offload, **how)

    def _build(self, plan: OffloadPlan, *, probed: bool) -> None:
        options = self._engine.options.offload
        probing = Probing(self._run, self._engine.target.name) if probed else None
        edited = pipeline.edit_step(self._step, self._timeline, plan, options, probing)
        graph_def = serde.to_graph_def(edited, self._captured.graph_def)
        self._function = self._graphs.restore(graph_def, rehearsed=probed and self._rehearsing)

    def _describe(self, timeline: Timeline, plan: OffloadPlan) -> Report:
        report = pipeline.describe(
            self._step,
            timeline,
            plan,
            self._engine.options.offload.policy,
            graph=self._name,
            device=self._engine.target.description,
            notes=self._notes,
        )
        note = ""
        if self._jit_compile:
            note = "off: memory ops cannot live inside XLA" if plan.moves else "left on"
            note = "off: recurrent kernels cannot live inside XLA" if self._swaps.matches else note
        ordered = not plan.moves and self._function is not self._base
        decision = ORDERED if ordered else report.decision
        report = replace(report, decision=decision, budget=self._budget, jit_compile=note)
        return with_swaps(report, self._swaps)
