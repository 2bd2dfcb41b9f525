"""What is known of a step in each phase of its life: one frozen dataclass a phase."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.refusals import Refusal
from graph_passes.report import Report
from tfmem.steps.lane_trials import Lanes, LaneTrial, TrialOutcome
from tfmem.steps.phases import Phase
from tfmem.steps.trials import Plans, Trial

if TYPE_CHECKING:
    from tfmem.steps.fuser import Fuser
    from tfmem.steps.known_profiles import KnownProfiles
    from tfmem.steps.managed_step import ManagedStep
    from tfmem.steps.trace import Trace
    from tfmem.steps.variable_copies import Copies
    from tfmem.steps.variants import Composition, Found, Variants
    from tfmem.steps.work import Work
    from tfmem.timing.ab_timing import Slices, Turns


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What holds in every phase.

    Attributes:
        function: the `ConcreteFunction` that the next call runs: the only reference to what runs.
        report: what was decided and measured so far.
        notes: lines that reports of later phases have, too.
        kept: what has to live as long as the step.
        disturbed: calls so far that could not be measured.
    """

    phase: ClassVar[Phase]
    function: Any
    report: Report
    notes: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()
    disturbed: int = 0

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of a step that was planned for several, as TensorFlow names them."""
        return tuple(f"/device:{found.device}" for found in self.report.devices)


@dataclass(frozen=True, kw_only=True)
class Given(StepState):
    """Nothing is known yet."""

    phase = Phase.GIVEN


@dataclass(frozen=True, kw_only=True)
class Planning(StepState):
    """A thread plans.

    Attributes:
        work: the transition that follows.
    """

    phase = Phase.PLANNING
    work: Work[Any]


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """What is known while a plan is looked for.

    Attributes:
        timeline: the step, by estimate or by measurement.
        first: the plan that was observed, or is to be: also what is left when every trial runs out of memory.
        firsts: what else may be run first, where that runs out of memory; it goes on where it stopped.
        known: profiles of the step.
        observed: whether the costs come from a profile.
        dry_run: whether calls with probes write no variable, so that the step has to be run again.
        seen: the timeline, by what was measured; None until the step was observed.
        lower: the timeline with the least that the step may take by what was measured; None until then, and on a GPU.
        plans: what may be tried, by what was measured; None until then.
        trials: plans that were run.
        observed_trial: the observed step, if its plan could stay.
        tried: what plans did that were built.
        roomy: whether the first plan runs in all of the device's memory, since it ran out of its budget's.
        stays: what was checked, and runs again unless a solver's plan, which is tried, is better; None until then.
        solved: plans of the solver's that were tried.
        within: the observed call, if it kept within the budget; None otherwise, and before.
        began: what trains between trials, each of which is a dry run in a later call; None where there is none.
    """

    timeline: Timeline
    first: OffloadPlan
    firsts: Iterator[OffloadPlan]
    known: KnownProfiles
    observed: bool
    dry_run: bool
    seen: Timeline | None
    lower: Timeline | None = None
    plans: Plans | None = None
    trials: tuple[Trial, ...] = ()
    observed_trial: tuple[Trial, ...] = ()
    tried: frozenset[Any] = frozenset()
    roomy: bool = False
    stays: Solving | None = None
    solved: int = 0
    within: Trial | None = None
    began: StepState | None = None


@dataclass(frozen=True, kw_only=True)
class Probed(StepState):
    """A plan runs with probes.

    Attributes:
        search: what is known so far.
        plan: what runs.
    """

    search: PlanSearch
    plan: OffloadPlan


@dataclass(frozen=True, kw_only=True)
class Warming(Probed):
    """The first plan runs, unmeasured."""

    phase = Phase.WARMING


@dataclass(frozen=True, kw_only=True)
class Observing(Probed):
    """The first plan runs again, measured."""

    phase = Phase.OBSERVING


@dataclass(frozen=True, kw_only=True)
class Trying(Probed):
    """A plan made from measured costs runs.

    Attributes:
        warm: whether it has run before, unmeasured.
    """

    phase = Phase.TRYING
    warm: bool = False


@dataclass(frozen=True, kw_only=True)
class Checking(StepState):
    """What was chosen runs as it will stay, and is watched.

    Attributes:
        timeline, plan: what it was planned by, and the plan; None where a fault left the step unchanged.
        peaks: bytes that its calls took.
        uncounted: bytes of the plan's buffers that the allocator does not count.
        lower: the timeline with the least that the step may take by measurement; None where unknown, and on a GPU.
        replans: how many plans were made so far since one was over the budget.
        tried: what these did.
        nearest: of the plans that were over, the one whose peak was the lowest.
        by_estimates: whether it was taken to fit by estimates, so that it is to be measured if it does not.
        search: what a thread goes on from; None where nothing is left to solve.
    """

    phase = Phase.CHECKING
    timeline: Timeline | None
    plan: OffloadPlan | None
    peaks: tuple[int, ...] = ()
    uncounted: int = 0
    lower: Timeline | None = None
    replans: int = 0
    tried: frozenset[Any] = frozenset()
    nearest: Checking | None = None
    by_estimates: bool = False
    search: PlanSearch | None = None


@dataclass(frozen=True, kw_only=True)
class Solving(StepState):
    """A thread solves the integer program, while what was checked runs.

    Attributes:
        search, plan: what is known, and what runs.
        work: the solver's plan.
    """

    phase = Phase.SOLVING
    search: PlanSearch
    plan: OffloadPlan
    work: Work[OffloadPlan]


@dataclass(frozen=True, kw_only=True)
class Improving(StepState):
    """A thread makes the plan that is tried next, while the plan that was observed trains.

    Attributes:
        search, plan: what is known, and what runs.
        work: the state in which the next plan runs, in a tuple; (None,) if there is none.
    """

    phase = Phase.IMPROVING
    search: PlanSearch
    plan: OffloadPlan
    work: Work[tuple[Probed | None]]


@dataclass(frozen=True, kw_only=True)
class Watching(StepState):
    """Plans of several devices run as they will stay, and memory is watched.

    Attributes:
        plans: what runs on each device.
        warm: whether the step has run before: the first call has cuDNN's trying of algorithms in it.
        replans: how many tighter plans were made so far.
        peaks: of each call, the bytes that it took of each device in `report.devices`.
        seconds: of each call.
        waiting: plans that are to be run yet.
        trials: plans that were run.
        tables: to which the probes of each lane write; () where it holds none.
        costs: what each op takes, once it was measured.
    """

    phase = Phase.CHECKING
    plans: tuple[LanePlan, ...]
    tables: tuple[int, ...] = ()
    costs: CostModel | None = None
    warm: bool = False
    replans: int = 0
    peaks: tuple[tuple[int, ...], ...] = ()
    seconds: tuple[float, ...] = ()
    waiting: tuple[Lanes, ...] = ()
    trials: tuple[LaneTrial, ...] = ()


class Round(enum.Enum):
    """What calls of several workers are watched for.

    Attributes:
        PROBES: where tensors move, they hold probes.
        TRIALS: sets of plans are compared.
        PEAKS: the plans that were chosen have to keep to their budgets.
    """

    PROBES = "probes"
    TRIALS = "trials"
    PEAKS = "peaks"


@dataclass(frozen=True, kw_only=True)
class WatchingTogether(Watching):
    """All workers of a cluster watch the same calls; before plans change, they agree.

    Attributes:
        round: what for; on each worker the same, as the next two.
        calls: that began since the round did, whether they ended well or not.
        outcomes: of `trials`, on all workers together.
    """

    round: Round = Round.PEAKS
    calls: int = 0
    outcomes: tuple[TrialOutcome, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Placed(StepState):
    """Memory is settled.

    Attributes:
        unchanged: whether nothing moves, and ops run in TensorFlow's order.
    """

    phase = Phase.PLACED
    unchanged: bool


@dataclass(frozen=True, kw_only=True)
class Fusing(StepState):
    """A thread plans regions.

    Attributes:
        fuser: plans and chooses.
        work: what it finds.
    """

    phase = Phase.FUSING
    fuser: Fuser
    work: Work[Found]


@dataclass(frozen=True, kw_only=True)
class Composing(StepState):
    """The step with moves and regions runs until its memory is settled; `function` has the moves alone.

    Attributes:
        fuser: plans and chooses.
        compositions: regions that may run; the first do.
        step: runs it under the budget; None before the first call.
    """

    phase = Phase.COMPOSING
    fuser: Fuser
    compositions: tuple[Composition, ...]
    step: ManagedStep | None = None


@dataclass(frozen=True, kw_only=True)
class Comparing(StepState):
    """The step with its regions is timed against the step without.

    Attributes:
        fuser: plans and chooses.
        variants: what is timed.
        timing: of calls on copies; None before the first.
        copies: of the step's variables.
        work: a thread that makes the copies of a large step, and runs the variants once; None: a call does.
        turns: of the step's own calls, where it cannot run on copies.
        peaks: of such calls under a budget: whether they ran with regions, and the bytes that they took of each device.
        instead: what follows where these calls miss the budget with the regions: others may need less.
    """

    phase = Phase.COMPARING
    fuser: Fuser
    variants: Variants
    timing: Slices | None = None
    copies: Copies | None = None
    work: Work[Copies] | None = None
    turns: Turns | None = None
    peaks: tuple[tuple[bool, tuple[int, ...]], ...] = ()
    instead: Composing | None = None


@dataclass(frozen=True, kw_only=True)
class Settled(StepState):
    """What runs is final."""

    phase = Phase.SETTLED


@dataclass(frozen=True, kw_only=True)
class Tuning(StepState):
    """It is decided how the step runs, and a thread times the kernels of its regions.

    Attributes:
        fuser: plans and chooses.
        work: the step with other kernels, where these save enough.
        stays: what follows if there are none.
    """

    phase = Phase.TUNING
    fuser: Fuser
    work: Work[Variants | None]
    stays: Settled


@dataclass(frozen=True, kw_only=True)
class Compiling(StepState):
    """It is decided how the step runs, and a thread has XLA compile it.

    Attributes:
        fuser: plans and chooses.
        stays: what follows if XLA cannot compile it, or is not faster.
        work: what is timed against what runs; None before the next call.
    """

    phase = Phase.COMPILING
    fuser: Fuser
    stays: Settled
    work: Work[Variants] | None = None


@dataclass(frozen=True, kw_only=True)
class Dividing(StepState):
    """A thread divides the step, which runs with its moves until then.

    Attributes:
        stays: what follows if the step stays as it is.
        work: the divided step, or why there is none.
        step: the divided step of several replicas, which calls run until it is settled; None before.
    """

    phase = Phase.DIVIDING
    stays: Settled
    work: Work[Trace | Refusal]
    step: ManagedStep | None = None


@dataclass(frozen=True, kw_only=True)
class Failed(StepState):
    """What runs is final: the step unchanged, because of a bug in tfmem."""

    phase = Phase.FAILED
