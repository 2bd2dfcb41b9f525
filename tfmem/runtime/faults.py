"""Errors that a step survives: how code tells bugs in tfmem from errors of graphs, budgets, options; what runs then."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import replace
from math import prod

import tensorflow as tf

from custom_ops.errors import CellError, KernelError, ProgramError, TfmemError
from graph_passes.decision import Decision
from graph_passes.device_report import size
from graph_passes.errors import (
    GraphError,
    HostMemoryError,
    InfeasibleBudgetError,
    NoGradientError,
    ReplicasError,
    UnknownShapeError,
)
from graph_passes.pipeline import Step
from graph_passes.report import Report
from tfmem.capture.captured import BODIES
from tfmem.runtime.engine import Engine
from tfmem.runtime.notices import REPORT_IT, SEE, Notices

# Why the memory of a step cannot be planned, without a bug: the offload pass is not for it, or there is no plan.
NOT_PLANNABLE = (NoGradientError, ReplicasError, UnknownShapeError, InfeasibleBudgetError, HostMemoryError)
FREE = f"to plan it, free what other models hold of the budget, raise memory_budget, or use a smaller batch; {SEE}"


def is_fault(error: Exception, reading: bool = False) -> bool:
    """Whether `error` is a bug of tfmem, and not an error that tells the user what to change.

    Args:
        error: the error that was caught.
        reading: whether tfmem was reading a graph. A `GraphError` then names what is wrong with the graph; while tfmem
            plans or edits a graph, it is a bug.
    """
    if type(error) is GraphError:
        return not reading
    return not isinstance(error, TfmemError) or isinstance(error, CellError | KernelError | ProgramError)


def error_note(notices: Notices, name: str, error: Exception, doing: str, instead: str) -> str:
    """The line of a report about an error that a step survives; and the warning, which is shown here.

    A fault has its traceback below the line. Any other error is none of tfmem's: the line says what it says.

    Args:
        notices: of the object; the user is warned of its first fault, and of its first other error.
        name: of what was optimised.
        error: the error.
        doing: what failed.
        instead: what happens now.
    """
    if not is_fault(error):
        what = f"{doing} was not possible: {error}; {instead}"
        notices.warn("refused", f"{name}: {what}", FREE if isinstance(error, InfeasibleBudgetError) else SEE)
        return what
    what = f"{doing} failed with {type(error).__name__}: {error}; {instead}"
    notices.warn("fault", f"{name}: {what}", REPORT_IT)
    return f"{what}\n{''.join(traceback.format_exception(error)).rstrip()}"


def left_by_fault(engine: Engine, report: Report, error: Exception, peak: int | None) -> Report:
    """`report` of a step that runs unmodified, because planning for its budget failed.

    Args:
        engine: budget and device.
        report: of the step without a budget.
        error: the fault.
        peak: estimated bytes that the unmodified step needs; None if unknown.

    Raises:
        InfeasibleBudgetError: the user gave a budget, and the unmodified step may need more. Nothing ran yet.
    """
    budget = engine.settings.budget
    if budget is not None and engine.settings.must_fit and (peak is None or peak > budget):
        enough = engine.settings.target.memory if peak is None else peak
        needs = "an unknown amount of memory" if peak is None else f"about {peak:,} bytes"
        failed = f"was not possible: {error}"
        if is_fault(error):
            failed = f"failed with {type(error).__name__}: {error}. This is a bug in tfmem: please report it, with the "
            failed += "traceback of the cause"
        raise InfeasibleBudgetError(
            f"planning for the budget of {budget:,} bytes {failed}. The unmodified step needs {needs}; to run it, give "
            f"a budget of at least {enough:,} bytes",
            enough,
            "",
        ) from error
    known = "" if peak is None or budget is None else f", which is estimated at {size(peak)}, within the budget"
    note = error_note(engine.notices, report.graph, error, "planning", f"the unmodified step runs{known}")
    return replace(
        report,
        decision=Decision.FAILED,
        budget=budget,
        peak_before=peak or 0,
        peak_predicted=peak or 0,
        notes=(*report.notes, note),
    )


def left_alone(engine: Engine, report: Report, error: TfmemError, replaced: bool) -> Report:
    """`report` of a step whose memory cannot be planned, saying why.

    Args:
        engine: budget and warnings.
        report: of the step without a budget.
        error: one of `NOT_PLANNABLE`; raised again if the user gave a budget.
        replaced: whether recurrent layers were; else nothing was done to the step, which is worth a warning.
    """
    if engine.settings.must_fit:
        raise error
    why: object = error
    if isinstance(error, InfeasibleBudgetError):  # its text is about a budget that the user gave
        have, needed = f"{engine.settings.budget:,}", f"{error.smallest_budget:,}"
        why = f"by estimates it needs about {needed} bytes at op '{error.op}', and TensorFlow may use {have}"
    if not replaced:
        told = f"{report.graph} is left unchanged, its memory was not planned: {why}"
        engine.notices.warn(
            "not planned", told, "to leave its memory to TensorFlow, pass passes=('recurrent', 'fusion')"
        )
    return replace(report, notes=(*report.notes, f"memory was not planned: {why}"))


def left_to_tensorflow(engine: Engine, why: str) -> Engine:
    """`engine` for a step that tfmem neither edits nor measures.

    Args:
        engine: passes, budget and warnings.
        why: what keeps tfmem from it, and what the user can do.

    Raises:
        ReplicasError: the user gave a budget.
    """
    if engine.settings.must_fit:
        raise ReplicasError(why)
    if engine.settings.rewrites or engine.settings.budget is not None:
        engine.notices.warn("elsewhere", "the step is left unchanged", why)
    return engine.under(replace(engine.settings, passes=(), budget=None))


def estimated_peak(engine: Engine, step: Step | None, graph: tf.Graph | None) -> int | None:
    """Bytes that the unmodified step needs, for use after an error; None if unknown.

    Args:
        engine: device and what is in use.
        step: the step, if it could be read.
        graph: its graph, if there is one.
    """
    with suppress(Exception):  # what failed before may fail here again
        if step is not None:
            return step.timeline(engine.estimate(workspace=True)).peak
    with suppress(Exception):
        most = None if graph is None else _all_at_once(graph)
        return None if most is None else engine.memory.in_use + most
    return None


def _all_at_once(graph: tf.Graph) -> int | None:
    """Bytes of all tensors of a graph together: more than any step of it needs, where there is no estimate.

    None where that is not known: a shape is open, or ops are in functions.
    """
    total = 0
    for op in graph.get_operations():
        if op.type in BODIES:
            return None
        for tensor in op.outputs:
            if tensor.dtype in (tf.resource, tf.variant, tf.string):
                continue
            if not tensor.shape.is_fully_defined():
                return None
            total += prod(tensor.shape.as_list()) * tensor.dtype.size
    return total
