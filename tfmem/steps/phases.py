"""The life of a training step as one table: its phases, what may happen in each, and which phase follows.

Neither TensorFlow nor a step is needed here: `StepMachine` holds one state and lets it change as the table says.
"""

from __future__ import annotations

import enum
import logging
from typing import Generic, NamedTuple, Protocol, TypeVar

_LOG = logging.getLogger("tfmem.steps")


class Phase(enum.Enum):
    """Where a step is in its life.

    Attributes:
        GIVEN: the step is new.
        PLANNING: a thread replaces its recurrent layers and plans; calls run the unmodified trace.
        WARMING: calls run a first plan, with probes: cuDNN chooses its algorithms when they first run, among those
            whose workspace fits, so much memory should be free then.
        OBSERVING: calls run that plan again, and what the probes read becomes costs.
        TRYING: calls run plans made from these costs, with probes. On a GPU each runs twice, for falling shares of the
            budget; the fastest within the budget stays. More memory is not always faster: an allocator near its limit
            is fragmented, and then convolutions fall back to slower algorithms.
        IMPROVING: calls run the plan that was observed, as it is without probes; a thread makes the graph of the plan
            that is tried next. Only large steps that have dry runs.
        CHECKING: calls run the chosen plan as it will stay, without probes: does its peak stay within the budget? Plans
            of several devices are compared here.
        SOLVING: calls run what was checked; a thread solves a large step's integer program, by measured costs. If
            its plan is predicted to be faster, that is tried. Of a step that is not observed, calls run the plan of
            `hybrid`, costs are estimates, and the faster plan runs untried.
        PLACED: memory is settled; fusion comes next, if it was asked for.
        FUSING: a thread plans regions; calls run the step without them.
        COMPOSING: tensors move, and regions were planned for the same budget; calls run the step with both, which
            is a step inside this one, until its memory is settled.
        COMPARING: calls time the step with its regions against the step without.
        TUNING: it is decided how the step runs; a thread times the kernels of its regions, and if others save enough,
            they are timed against these.
        COMPILING: it is decided how the step runs; a thread has XLA compile it, and if XLA can, that is timed against
            what runs.
        DIVIDING: all else is decided, tensors move, and parts may be faster on pieces of the batch: a thread divides
            the step; then a call tries it in dry runs, and the faster one stays.
        SETTLED: what runs is final.
        FAILED: what runs is final, without a plan and without regions, because of a bug in tfmem.
    """

    GIVEN = "given"
    PLANNING = "planning"
    WARMING = "warming"
    OBSERVING = "observing"
    TRYING = "trying"
    IMPROVING = "improving"
    CHECKING = "checking"
    SOLVING = "solving"
    PLACED = "placed"
    FUSING = "fusing"
    COMPOSING = "composing"
    COMPARING = "comparing"
    TUNING = "tuning"
    COMPILING = "compiling"
    DIVIDING = "dividing"
    SETTLED = "settled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether no other phase follows."""
        return self in (Phase.SETTLED, Phase.FAILED)

    @property
    def is_beside(self) -> bool:
        """Whether calls of several threads run at once although the step is not settled."""
        return self in (Phase.FUSING, Phase.COMPARING, Phase.TUNING, Phase.COMPILING)


class Event(enum.Enum):
    """What happened in a phase; the value says so in words where the table is drawn."""

    DEFERRED = "it may wait for its plan"
    UNKNOWN = "costs are estimates"
    KNOWN = "a profile holds the costs"
    CHOSEN = "what will run is chosen, and is to be checked"
    UNWATCHED = "what will run is chosen, and needs no check"
    RAN = "it ran"
    DISTURBED = "another call was measured meanwhile"
    IMPATIENT = "three calls could not be measured"
    SHORT = "out of memory, and there is another plan, or more memory for this one"
    NEXT = "there is a plan to try"
    BESIDE = "a thread makes the plan to try"
    DIVIDED = "no plan meets the budget, and parts will run on pieces of the batch"
    OVER = "over the budget, and there is a tighter plan"
    MISJUDGED = "over the budget, though by estimates it fits"
    WITHIN = "enough calls were checked"
    SOLVES = "a thread solves the integer program"
    DIVIDES = "parts may be faster on pieces of the batch"
    STAYS = "fusion is decided without timing, or not asked for"
    THREAD = "a thread plans regions"
    COMPOSED = "regions and moves are planned together"
    TIMED = "regions are to be timed"
    UNCLEAR = "the times are not clear yet"
    CLEAR = "the times are clear, or cannot be taken"
    TUNES = "it is decided, and kernels are to be tuned"
    COMPILES = "it is decided, and XLA may be faster"
    BEGUN = "a call brings its arguments"
    FAULT = "a fault"


def _probed(own: Phase, **more: Phase) -> dict[Event, Phase]:
    """What may follow a call with probes in phase `own`."""
    return {
        **{Event[name]: phase for name, phase in more.items()},
        Event.DISTURBED: own,
        Event.IMPATIENT: Phase.PLACED,
        Event.NEXT: Phase.TRYING,
        Event.CHOSEN: Phase.CHECKING,
        Event.UNWATCHED: Phase.PLACED,
        Event.FAULT: Phase.PLACED,
    }


_PLANNED = {
    Event.UNKNOWN: Phase.WARMING,
    Event.KNOWN: Phase.TRYING,
    Event.CHOSEN: Phase.CHECKING,
    Event.UNWATCHED: Phase.PLACED,
    Event.SOLVES: Phase.SOLVING,
}

TABLE: dict[Phase, dict[Event, Phase]] = {
    Phase.GIVEN: {Event.DEFERRED: Phase.PLANNING, **_PLANNED},
    Phase.PLANNING: {**_PLANNED, Event.FAULT: Phase.PLACED},
    Phase.WARMING: _probed(Phase.WARMING, RAN=Phase.OBSERVING, SHORT=Phase.WARMING),
    Phase.OBSERVING: _probed(Phase.OBSERVING, SHORT=Phase.OBSERVING, DIVIDED=Phase.WARMING, BESIDE=Phase.IMPROVING),
    Phase.TRYING: _probed(
        Phase.TRYING, RAN=Phase.TRYING, DIVIDED=Phase.WARMING, SOLVES=Phase.SOLVING, BESIDE=Phase.IMPROVING
    ),
    Phase.IMPROVING: {
        Event.NEXT: Phase.TRYING,
        Event.CHOSEN: Phase.CHECKING,
        Event.UNWATCHED: Phase.PLACED,
        Event.FAULT: Phase.PLACED,
    },
    Phase.CHECKING: {
        Event.RAN: Phase.CHECKING,
        Event.DISTURBED: Phase.CHECKING,
        Event.IMPATIENT: Phase.PLACED,
        Event.OVER: Phase.CHECKING,
        Event.MISJUDGED: Phase.WARMING,
        Event.WITHIN: Phase.PLACED,
        Event.SOLVES: Phase.SOLVING,
        Event.FAULT: Phase.PLACED,
    },
    Phase.SOLVING: {Event.NEXT: Phase.TRYING, Event.UNWATCHED: Phase.PLACED},
    Phase.PLACED: {
        Event.STAYS: Phase.SETTLED,
        Event.THREAD: Phase.FUSING,
        Event.COMPOSED: Phase.COMPOSING,
        Event.TIMED: Phase.COMPARING,
        Event.COMPILES: Phase.COMPILING,
        Event.DIVIDES: Phase.DIVIDING,
        Event.FAULT: Phase.FAILED,
    },
    Phase.FUSING: {
        Event.STAYS: Phase.SETTLED,
        Event.DIVIDES: Phase.DIVIDING,
        Event.COMPOSED: Phase.COMPOSING,
        Event.TIMED: Phase.COMPARING,
        Event.TUNES: Phase.TUNING,
        Event.COMPILES: Phase.COMPILING,
        Event.FAULT: Phase.FAILED,
    },
    Phase.COMPOSING: {
        Event.RAN: Phase.COMPOSING,
        Event.STAYS: Phase.SETTLED,
        Event.DIVIDES: Phase.DIVIDING,
        Event.TIMED: Phase.COMPARING,
        Event.FAULT: Phase.FAILED,
    },
    Phase.COMPARING: {
        Event.UNCLEAR: Phase.COMPARING,
        Event.CLEAR: Phase.SETTLED,
        Event.DIVIDES: Phase.DIVIDING,
        Event.COMPOSED: Phase.COMPOSING,
        Event.TUNES: Phase.TUNING,
        Event.COMPILES: Phase.COMPILING,
        Event.FAULT: Phase.FAILED,
    },
    Phase.TUNING: {Event.STAYS: Phase.SETTLED, Event.TIMED: Phase.COMPARING, Event.COMPILES: Phase.COMPILING},
    Phase.COMPILING: {Event.BEGUN: Phase.COMPILING, Event.STAYS: Phase.SETTLED, Event.TIMED: Phase.COMPARING},
    Phase.DIVIDING: {Event.RAN: Phase.DIVIDING, Event.CHOSEN: Phase.CHECKING, Event.STAYS: Phase.SETTLED},
    Phase.SETTLED: {},
    Phase.FAILED: {},
}


def picture() -> str:
    """The table as `docs/architecture.md` shows it, a line for each phase and each that follows it."""
    lines = ["| phase | what happens | then |", "|---|---|---|"]
    for phase, events in TABLE.items():
        by_next: dict[Phase, list[str]] = {}
        for event, following in events.items():
            by_next.setdefault(following, []).append(event.value)
        for following, happened in by_next.items():
            lines.append(f"| {phase.value} | {'; '.join(happened)} | {following.value} |")
    return "\n".join(lines)


class Phased(Protocol):
    """A state of some phase."""

    @property
    def phase(self) -> Phase: ...


S = TypeVar("S", bound=Phased)


class Transition(NamedTuple, Generic[S]):
    """What happened, and the state that follows."""

    event: Event
    state: S


class TransitionError(AssertionError):
    """A move that is not in the table: a bug in tfmem."""


class StepMachine(Generic[S]):
    """One step's state, and the only place where it is replaced. Callers hold a lock; readers need none.

    Attributes:
        name: of the step, for the log.
        state: what holds now.
    """

    def __init__(self, name: str, state: S) -> None:
        """Begin with `state`."""
        self.name = name
        self.state = state

    def take(self, transition: Transition[S]) -> S:
        """Go on to the next state.

        Raises:
            TransitionError: the table has no such transition.
        """
        before, after = self.state.phase, transition.state.phase
        wanted = TABLE[before].get(transition.event)
        if wanted is not after:
            expected = "no such event there" if wanted is None else f"that leads to {wanted.value}"
            found = f"{before.value} --{transition.event.name}--> {after.value}"
            raise TransitionError(f"internal error in tfmem: {self.name}: {found}: {expected}; please report this")
        _LOG.debug("%s: %s --%s--> %s", self.name, before.value, transition.event.name, after.value)
        self.state = transition.state
        return transition.state
