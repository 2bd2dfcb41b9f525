"""The life of a step is one table: every edge can be walked, no other can, and the docs show what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tfmem.steps.phases import TABLE, Event, Phase, StepMachine, Transition, TransitionError, picture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
EDGES = [(phase, event, following) for phase, events in TABLE.items() for event, following in events.items()]


@dataclass(frozen=True)
class Fake:
    """A state of a step that runs nothing."""

    phase: Phase


def after(phase: Phase, *events: Event) -> Phase:
    """Where a fake step is after these events."""
    machine = StepMachine("step", Fake(phase))
    for event in events:
        machine.take(Transition(event, Fake(TABLE[machine.state.phase][event])))
    return machine.state.phase


@pytest.mark.parametrize(("phase", "event", "following"), EDGES, ids=lambda each: each.name)
def test_every_edge(phase: Phase, event: Event, following: Phase) -> None:
    machine = StepMachine("step", Fake(phase))
    found = Fake(following)
    assert machine.take(Transition(event, found)) is machine.state is found


@pytest.mark.parametrize("phase", Phase, ids=lambda each: each.name)
def test_no_other_edge(phase: Phase) -> None:
    machine = StepMachine("step", Fake(phase))
    for event in Event:
        for following in Phase:
            if TABLE[phase].get(event) is not following:
                with pytest.raises(TransitionError, match=f"step: {phase.value} --{event.name}--> {following.value}: "):
                    machine.take(Transition(event, Fake(following)))
                assert machine.state.phase is phase


def test_every_phase_can_be_reached_and_left_for_an_end() -> None:
    assert set(TABLE) == set(Phase)
    assert {event for _, event, _ in EDGES} == set(Event)
    reached = {Phase.GIVEN}
    while more := {following for phase in reached for following in TABLE[phase].values()} - reached:
        reached |= more
    assert reached == set(Phase)
    ends = {phase for phase in Phase if phase.is_final}
    assert {phase for phase in Phase if not TABLE[phase]} == ends
    while more := {phase for phase in Phase if set(TABLE[phase].values()) & ends} - ends:
        ends |= more
    assert ends == set(Phase)


def test_some_lives() -> None:
    tried = (Event.RAN, Event.NEXT, Event.CHOSEN, Event.RAN, Event.RAN, Event.WITHIN)
    assert after(Phase.GIVEN, Event.UNKNOWN, *tried, Event.STAYS) is Phase.SETTLED
    assert after(Phase.GIVEN, Event.KNOWN, Event.IMPATIENT, Event.STAYS) is Phase.SETTLED
    timed = (Event.THREAD, Event.TIMED, Event.UNCLEAR, Event.CLEAR)
    assert after(Phase.GIVEN, Event.DEFERRED, Event.UNWATCHED, *timed) is Phase.SETTLED
    assert after(Phase.GIVEN, Event.DEFERRED, Event.FAULT, Event.THREAD, Event.FAULT) is Phase.FAILED


def test_no_final_phase_lets_calls_run_beside_it() -> None:
    assert not [phase for phase in Phase if phase.is_beside and phase.is_final]


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not installed; run from a checkout")
def test_the_docs_show_the_table() -> None:
    assert picture() in PAGE.read_text()
