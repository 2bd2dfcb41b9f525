"""XLA as one more runner of a step: a thread has it compile the step, which is then timed against what runs.

XLA may run a step that it computes like TensorFlow but for the order of sums: with the same random numbers, the same
checks and the same errors. On a CPU it loses NaN in a minimum or a maximum, so steps with one are left alone. Its
compiler is C++ that holds no interpreter, so steps go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from custom_ops.background import NEXT, go_on
from graph_passes.decision import Decision, Fusion, Xla
from graph_passes.device_report import milliseconds
from tfmem.capture.concrete_function import RestoredFunction, asks_for_xla, flat_arguments
from tfmem.capture.xla_draws import differs_in
from tfmem.capture.xla_errors import left_out
from tfmem.capture.xla_function import compilable, xla_function
from tfmem.devices import conditions, is_deterministic
from tfmem.steps.fuser import Fuser
from tfmem.steps.phases import Event, Transition
from tfmem.steps.results import MOST, StepResults, moved_by_rounding, unexplained
from tfmem.steps.states import Comparing, Compiling, Failed, Settled, StepState
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import Copies, Run, noticed
from tfmem.steps.variants import Before, Variants
from tfmem.steps.work import Work
from tfmem.timing.ab_timing import Times
from tfmem.timing.choices import key_of

State = TypeVar("State", bound=StepState)

COMPILES = "XLA compiles the step, and will be timed against what runs"
WHAT_DIFFERS = (
    "its sums have another order, half types may keep more digits, an index out of range raises no error, and NaN may "
    "be lost in the gradient of ReLU, in the index of the largest number, and where floats become integers"
)


def may_run(trace: Trace, timed: bool, must_fit: bool, wanted: bool) -> bool:
    """Whether XLA may run a step in which no tensor moves.

    Args:
        trace: the step.
        timed: whether steps are timed.
        must_fit: whether the user gave a memory budget: what XLA needs is not planned.
        wanted: the user's option.
    """
    allowed = wanted and trace.jit_compile is not False and not asks_for_xla(trace.concrete)
    return allowed and timed and not must_fit and not trace.of_replicas and not is_deterministic()


def against(trace: Trace) -> str:
    """Why XLA would compute something else than TensorFlow; "" if it would not."""
    graph_def = trace.given().graph_def
    return differs_in(graph_def) or noticed(graph_def)


def loses(fuser: Fuser) -> str:
    """Why XLA would lose an error, NaN or an order; "" if it would not, or the user has XLA run the step."""
    if fuser.with_xla:
        return ""
    return left_out(fuser.trace.given().graph_def, not fuser.engine.settings.target.is_gpu)


def then_xla(fuser: Fuser, transition: Transition[StepState]) -> Transition[StepState]:
    """`transition`, or that XLA compiles the step first, where what runs is decided and XLA may be faster.

    So it does where a fault left the step without regions.
    """
    stays = transition.state
    if not fuser.xla or not isinstance(stays, Settled | Failed):
        return transition
    try:
        if why := against(fuser.trace) or loses(fuser):
            return Transition(transition.event, _without(stays, f"XLA may not run the step: {why}"))
        known = fuser.known.find(_key(fuser, stays))
    except Exception as error:
        return Transition(transition.event, _without(stays, f"XLA was not timed: {type(error).__name__}: {error}"))
    if known is not None and not known.is_faster:
        return Transition(transition.event, _slower(fuser, stays, known))
    settled = Settled(**vars(stays))
    return Transition(Event.COMPILES, Compiling(**vars(_without(stays, COMPILES)), fuser=fuser, stays=settled))


def begun(state: Compiling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compiling:
    """The state whose thread compiles for the arguments of a call."""
    if state.work is not None:
        return state
    fuser = state.fuser
    arguments = flat_arguments(fuser.trace.concrete, args, kwargs)
    work: Work[Variants] = Work(partial(_compiled, fuser, state.stays, arguments), "tfmem XLA", NEXT)
    work.begin()
    return replace(state, work=work)


def compiled(state: Compiling) -> Transition[StepState]:
    """What follows once the thread has ended: a comparison, if XLA could compile the step."""
    work, fuser, stays = state.work, state.fuser, state.stays
    variants = work.take() if work is not None else None
    if work is None or variants is None:
        error = work.error if work is not None else None
        return Transition(Event.STAYS, _without(stays, f"XLA does not run the step: {_said(error)}"))
    if (times := fuser.known.find(variants.key)) is not None:
        return _raced(state, variants, times, "; known from the cache", Event.STAYS)
    return Transition(Event.TIMED, Comparing(**vars(stays), fuser=fuser, variants=variants))


def decided(state: Comparing, times: Times) -> Transition[StepState]:
    """The faster one runs from now on."""
    state.fuser.known.keep(state.variants.key, times)
    return _raced(state, state.variants, times, ", on copies", Event.CLEAR)


def untimed(state: Comparing, error: Exception) -> Transition[StepState]:
    """What ran before goes on, since XLA cannot be timed."""
    before = state.variants.before
    assert before is not None
    return Transition(Event.CLEAR, _without(before.stays, f"XLA was not timed: {_said(error)}"))


def _compiled(fuser: Fuser, stays: Settled, arguments: Sequence[tf.Tensor]) -> Variants:
    """XLA's function of the step, compiled and compared with what runs.

    Raises:
        NotCopiedError: there is no memory for copies of the variables.
        tf.errors.OpError: XLA cannot compile the step, or has no memory for it.
        ArithmeticError: the results differ by more than rounding explains.
    """
    trace, free = fuser.trace, fuser.engine.memory.free
    given = _runs(fuser, stays.function)
    given_to_xla = compilable(trace.given(), fuser.engine.settings.target.is_gpu)
    function = xla_function(trace.concrete, given_to_xla, arguments, stays.function)
    copies = Copies(trace.concrete, arguments, free)
    others = Copies(trace.concrete, arguments, free, like=copies)
    go_on()
    found = StepResults.of(copies, function)
    go_on()
    differs = found.differences(StepResults.of(others, given))
    del copies, others

    def own() -> list[float]:
        """What the results of the step differ by on numbers that are moved by rounding."""
        begin = Copies(trace.concrete, arguments, free)
        tf32 = fuser.engine.settings.target.precision == "tf32"
        moved = moved_by_rounding(Copies(trace.concrete, arguments, free, like=begin), tf32)
        go_on()
        return StepResults.of(begin, given).differences(StepResults.of(moved, given))

    refused, most = unexplained(differs, own), max(differs, default=0.0)
    if refused is not None:
        raise ArithmeticError(f"its results differ by {refused:.2g} of the largest number of a tensor")
    seen = f"differed by {most:.1e} of the largest number of a tensor" if most else "were equal"
    seen += ", where rounding decides" if most > MOST else ""
    note = f"XLA runs the step: {WHAT_DIFFERS}; it draws TensorFlow's random numbers; results of one step {seen}"
    before = Before(stays, Times(1.0, 1.0), "")
    return Variants(function, given, function, "", _key(fuser, stays), before=before, xla=note)


def _runs(fuser: Fuser, function: Any) -> Run:
    """What runs the step now, on copies. No op of it keeps a random stream: see `differs_in`."""
    if isinstance(function, RestoredFunction):
        return function
    optimized = fuser.trace.optimized()
    return fuser.trace.graphs_of(optimized).apart(optimized.graph_def)


def _key(fuser: Fuser, stays: StepState) -> str:
    beside = [str(region) for region in stays.report.running]
    facts = {**conditions(fuser.engine.settings.target), "runner": "XLA", "beside": beside}
    return key_of(fuser.known, fuser.trace.given().graph_def, facts)


def _raced(state: StepState, variants: Variants, times: Times, how: str, event: Event) -> Transition[StepState]:
    before, fuser = variants.before, state.fuser  # type: ignore[attr-defined]
    assert before is not None
    stays = before.stays
    if not times.is_faster:
        return Transition(event, _slower(fuser, stays, times))
    beside = "stitched" if stays.report.fusion_state is Fusion.STITCHED else "without XLA"
    text = f"left to XLA: {milliseconds(times.stitched)} a step against {milliseconds(times.given)} {beside}{how}"
    report = replace(
        stays.report,
        decision=Decision.XLA,
        fusion=text,
        fusion_state=Fusion.LEFT,
        jit_compile=Xla.RUNS,
        notes=(*stays.report.notes, variants.xla),
    )
    kept = (*stays.kept, stays.function)  # runs other shapes
    return Transition(event, replace(stays, function=variants.function, report=report, kept=kept))


def _slower(fuser: Fuser, stays: State, times: Times) -> State:
    """What ran before goes on."""
    found = _without(stays, f"XLA took {milliseconds(times.stitched)} a step against {milliseconds(times.given)}")
    if not fuser.with_xla:
        return found
    stitched = found.report.fusion_state is Fusion.STITCHED
    return replace(found, report=replace(found.report, jit_compile=Xla.STITCHED if stitched else Xla.EXECUTOR))


def _without(stays: State, note: str) -> State:
    return replace(stays, report=replace(stays.report, notes=(*stays.report.notes, note)))


def _said(error: Exception | None) -> str:
    text = str(error).strip() if error is not None else "its thread ended without a result"
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"[:300] if error is not None else first
