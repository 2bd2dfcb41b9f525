"""Says of an op in one sentence in which region it is, or why it is in none. Reads a report."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from graph_passes.errors import GraphError
from graph_passes.report import RegionRecord, Report

_SHOWN = 5  # names in a sentence


def explain(report: Report, op: str) -> str:
    """Say in which region an op is, or why it is in none.

    Args:
        report: the report of a step over which the fusion pass ran.
        op: the name of the op, or of a tensor that it makes ("dense/MatMul:0").

    Raises:
        GraphError: the fusion pass did not run, or has planned nothing yet, or there was no such op when it did.
    """
    for each in (report, *report.others):
        found = explained(each, op.removeprefix("^").partition(":")[0])
        if found:
            return found
    if not report.fusion and not any(other.fusion for other in report.others):
        raise GraphError(f"the fusion pass did not run on '{report.graph}'; ask for it by passes=(..., 'fusion')")
    known = [name for each in (report, *report.others) for name in _names(each)]
    if not known:
        why = f"fusion of '{report.graph}' is not planned yet ({report.fusion})"
        raise GraphError(f"{why}; call it more often, and ask again")
    near = get_close_matches(op, known, 3, 0.5)
    hint = f"; there are: {', '.join(near)}" if near else ""
    raise GraphError(
        f"no op '{op}' was left when regions were planned: TensorFlow's optimizer has folded, merged or removed it, or "
        f"it has another name{hint}"
    )


def explained(report: Report, op: str) -> str:
    """The sentence on an op; "" if the pass says nothing of it."""
    for region in report.regions:
        for number, step in enumerate(region.steps):
            names = [name for name, _ in step.ops]
            if op in names:
                where = f"in region '{region.name}', {_where(region, number, op, names)}"
                if report.running:
                    return f"'{op}' is {where}."
                return f"'{op}' runs in no region ({report.fusion}); stitched it would be {where}."
    why = dict(report.not_stitched).get(op)
    return f"'{op}' is in no region: {why}." if why else ""


def _where(region: RegionRecord, number: int, op: str, names: Sequence[str]) -> str:
    kind = region.steps[number].kind
    if kind == "call":
        return "which runs TensorFlow's own kernel for it"
    if kind == "read":
        return "which reads the variable in place"
    if kind == "view":
        return "where it is another shape of the same memory"
    others = [name for name in names if name != op]
    place = sum(step.kind == "kernel" for step in region.steps[: number + 1])
    which = f"as kernel {place} of {region.count('kernel')}"
    if not others:
        return f"{which}, which holds nothing else"
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"{which}, together with {', '.join(others[:_SHOWN])}{more}"


def _names(report: Report) -> list[str]:
    inside = [name for region in report.regions for step in region.steps for name, _ in step.ops]
    return inside + [name for name, _ in report.not_stitched]
