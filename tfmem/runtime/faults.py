"""Faults of tfmem's own: told from errors that say what is wrong with a graph, a budget or an option, and what runs
instead of what they were in the way of."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import replace
from math import prod

import tensorflow as tf

from custom_ops.errors import CellError, KernelError, ProgramError, TfmemError
from graph_passes.decision import Decision
from graph_passes.errors import (
    GraphError,
    InfeasibleBudgetError,
    NoGradientError,
    ReplicasError,
    UnknownShapeError,
)
from graph_passes.pipeline import Step
from graph_passes.report import Report, size
from tfmem.capture.captured import BODIES
from tfmem.runtime.engine import Engine
from tfmem.runtime.notices import Notices

NOT_PLANNABLE = (NoGradientError, ReplicasError, UnknownShapeError)  # graphs that the offload pass is not for


def is_fault(error: Exception, reading: bool = False) -> bool:
    """Whether `error` is tfmem's own, not one that tells a user what to change.

    Args:
        error: as it was caught.
        reading: whether it came while a graph was read. A `GraphError` then says what is wrong with that; while a graph
            is planned or edited it says that tfmem went wrong.
    """
    if type(error) is GraphError:
        return not reading
    return not isinstance(error, TfmemError) or isinstance(error, CellError | KernelError | ProgramError)


def fault_note(notices: Notices, name: str, error: Exception, doing: str, instead: str) -> str:
    """The line of a report about a fault, its traceback below it; and the warning, which is shown here.

    Args:
        notices: of the object; the user is warned of its first fault.
        name: of what was optimised.
        error: the fault.
        doing: what failed.
        instead: what happens now.
    """
    what = f"{doing} failed with {type(error).__name__}: {error}; {instead}"
    notices.warn(
        "fault",
        f"tfmem: {name}: {what}. This is a fault of tfmem's: please report it, with the traceback that "
        "tfmem.report(...) shows",
    )
    return f"{what}\n{''.join(traceback.format_exception(error)).rstrip()}"


def left_by_fault(engine: Engine, report: Report, error: Exception, peak: int | None) -> Report:
    """`report` of a step that runs as it was, because planning for its budget failed.

    Args:
        engine: budget and device.
        report: of the step without a budget.
        error: the fault.
        peak: bytes that the step as it was needs, estimated; None if that is not known.

    Raises:
        InfeasibleBudgetError: the user gave a budget, and the step as it was may need more. Nothing ran yet.
    """
    budget = engine.budget
    if budget is not None and engine.must_fit and (peak is None or peak > budget):
        enough = engine.target.memory if peak is None else peak
        needs = "cannot be told" if peak is None else f"is estimated at {peak:,} bytes"
        raise InfeasibleBudgetError(
            f"planning for the budget of {budget:,} bytes failed with {type(error).__name__}: {error}, a fault of "
            f"tfmem's; what the step as it was needs {needs}; give a budget of at least {enough:,} bytes, under which "
            "it runs as it was, and please report the fault: its traceback is above",
            enough,
            "",
        ) from error
    known = "" if peak is None or budget is None else f", which is estimated at {size(peak)}, within the budget"
    note = fault_note(engine.notices, report.graph, error, "planning", f"the step runs as it was{known}")
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
        engine: budget, and what the user is told.
        report: of the step without a budget.
        error: one of `NOT_PLANNABLE`; raised again if the user gave a budget.
        replaced: whether recurrent layers were; else nothing was done to the step, which is worth a warning.
    """
    if engine.must_fit:
        raise error
    if not replaced:
        told = f"tfmem: {report.graph} is left as it was, its memory was not planned: {error}"
        engine.notices.warn("not planned", told)
    return replace(report, notes=(*report.notes, f"memory was not planned: {error}"))


def estimated_peak(engine: Engine, step: Step | None, graph: tf.Graph | None) -> int | None:
    """Bytes that a step needs as it was given, after something failed; None if not even that is known.

    Args:
        engine: device and what is in use.
        step: the step, if it could be read.
        graph: its graph, if there is one.
    """
    with suppress(Exception):  # whatever failed before may fail here again
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
