"""What became of a step, a layer or an op, in words. Reads a report."""

from __future__ import annotations

from difflib import get_close_matches

from graph_passes.device_report import duration, many, size
from graph_passes.errors import GraphError
from graph_passes.headline import RECOMPUTED
from graph_passes.names import part_of, plain
from graph_passes.passes.fuse import explain as regions
from graph_passes.report import Report, TransferRecord


def explain(report: Report, name: str = "") -> str:
    """What tfmem did to an op or a layer; without a name, to the step.

    Args:
        report: the report of a step.
        name: the name of an op, of a tensor that it makes, or of a layer, as Keras or a name scope has it.

    Raises:
        GraphError: there is nothing of that name in the report.
    """
    if not name:
        return "\n".join(each.headline for each in (report, *report.others))
    op = name.removeprefix("^").partition(":")[0]
    for each in (report, *report.others):
        found = _of_op(each, op) or _of_layer(each, op)
        if found:
            return found
    if any(each.fusion for each in (report, *report.others)):
        return regions.explain(report, name)
    ops = (*report.replaced_layers, *(layer for layer, _ in report.kept_layers))
    scopes = (*report.scopes, *(name.rpartition("/")[0] for name in ops))
    known = {part for scope in scopes for part in plain(f"{scope}/", report.scope_suffix).split("/")}
    near = get_close_matches(op, sorted(known), 3, 0.5)
    hint = f"there are: {', '.join(near)}" if near else "print the report, which names them"
    raise GraphError(f"the report of `{report.graph}` names no layer and no changed op '{name}'; {hint}")


def _of_op(report: Report, op: str) -> str:
    """What became of the op's tensors, and of the op; "" if the report names neither."""
    names = (op, plain(op, report.scope_suffix))
    moves = [
        record for record in report.transfers if plain(record.tensor, report.scope_suffix).partition(":")[0] in names
    ]
    fused = regions.explained(report, op)
    return " ".join([*(_moved(report, record) for record in moves), *([fused] if fused else [])])


def _moved(report: Report, record: TransferRecord) -> str:
    tensor, released, prefetched, used, after = (
        plain(name, report.scope_suffix)
        for name in (
            record.tensor,
            record.release_before,
            record.prefetch_before,
            record.first_use,
            record.offload_after,
        )
    )
    what = f"'{tensor}' ({size(record.bytes)})"
    if record.offload_after == RECOMPUTED:
        return f"{what} is freed before '{released}' and recomputed before '{used}'."
    waits = dict(report.stalls).get(record.tensor, 0)
    stall = f", which waits {duration(waits)} for it" if waits else ""
    return f"{what} is offloaded after '{after}', and comes back from before '{prefetched}' on for '{used}'{stall}."


def _of_layer(report: Report, layer: str) -> str:
    """What became of a layer: of the ops below its name; "" if the report names none."""

    def is_of(name: str, layer: str) -> bool:
        return is_within(plain(name, report.scope_suffix), layer)

    if any(is_of(name, layer) for name in report.replaced_layers):
        return f"recurrent layer '{layer}' is replaced by one op."
    kept = next((why for name, why in report.kept_layers if is_of(name, layer)), "")
    if kept:
        return f"recurrent layer '{layer}' is not replaced: {kept}."
    moves = [record for record in report.transfers if is_of(record.tensor, layer)]
    again = [record for record in moves if record.offload_after == RECOMPUTED]
    out = [record for record in moves if record.offload_after != RECOMPUTED]
    fused = [name for region in report.running for step in region.steps for name, _ in step.ops if is_of(name, layer)]
    outside = [name for name, _ in report.not_stitched if is_of(name, layer)]
    waits = sum(ns for tensor, ns in report.stalls if is_of(tensor, layer))
    parts = {part_of(scope) for scope in report.scopes if is_of(f"{scope}/", layer)} & set(range(len(report.splits)))
    pieces = [len(report.splits[part].pieces) for part in sorted(parts)]
    found = [
        pieces and f"runs in {max(pieces)} pieces along the batch",
        out and f"{many(len(out), 'tensor')} offloaded ({size(sum(record.bytes for record in out))})",
        waits and f"the step waits {duration(waits)} for them",
        again and f"{many(len(again), 'tensor')} recomputed ({size(sum(record.bytes for record in again))})",
        fused and f"{many(len(fused), 'op')} fused",
        outside and f"{many(len(outside), 'op')} not fused",
    ]
    words = ", ".join(each for each in found if each)
    if words:
        return f"layer '{layer}': {words}."
    known = any(is_of(f"{scope}/", layer) for scope in report.scopes)
    return f"layer '{layer}': nothing was changed." if known else ""


def is_within(name: str, layer: str) -> bool:
    """Whether an op or a tensor lies in a layer: one of the scopes of its name is the layer's."""
    return f"/{layer}/" in f"/{name.partition(':')[0]}/"
