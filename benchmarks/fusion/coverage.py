"""Which ops of a network's step are inside regions, as a GPU would have them, found without one.

    python -m benchmarks.fusion.coverage --only gpt vit
    python -m benchmarks.fusion.coverage --device h200 --kernels
    python -m benchmarks.fusion.coverage --document docs/fusion.md

Steps are traced, optimised by Grappler as for a GPU, and planned by the cost model; nothing runs. `--kernels` also
chooses a template for each kernel, which takes a while. `--document` writes the table of all public models into a
page, between two comments; it takes half an hour on two cores."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fusion.anyone import NETS

MARKS = "<!-- benchmarks.fusion.coverage -->", "<!-- end -->"
FEW = 4  # reasons in the page, for each model
SHOWN = 12  # kinds of ops that stay outside


@dataclass(frozen=True)
class Coverage:
    """What regions hold of a step.

    Attributes:
        inside: ops in regions, those of bodies among them.
        regions, kernels, calls: how many.
        different: kernels that differ.
        outside: (op, why) of the others, with how often; constants, arguments and results do not count.
        seconds: of the processor, to plan.
        choosing: the same, to choose templates; None where that was not asked for.
    """

    inside: int
    regions: int
    kernels: int
    calls: int
    different: int
    outside: Counter[tuple[str, str]]
    seconds: float
    choosing: float | None = None


def main(arguments: list[str] | None = None) -> int:
    """Plan, and print a table and what stays outside."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fusion.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=NETS, default=list(NETS), help="networks (all)")
    parser.add_argument("--device", default="h100", help="a profile of custom_ops/devices (h100)")
    parser.add_argument("--kernels", action="store_true", help="choose a template for each kernel, too")
    parser.add_argument("--document", type=Path, help="write the table of all public models into this page")
    options = parser.parse_args(arguments)
    if options.document:
        rows = [row(*model, options.device) for model in models()]
        put(options.document, HEAD, rows)
        return 0
    print("| net | ops | inside | outside | regions | kernels | different | calls | planning, s | ranking, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    details = []
    for name in options.only:
        found = covered(f"anyone/{name}", options.device, options.kernels)
        ranking = "-" if found.choosing is None else f"{found.choosing:.1f}"
        outside = found.outside.total()
        numbers = (found.inside + outside, found.inside, outside, found.regions, found.kernels, found.different)
        print(
            f"| {name} | {' | '.join(map(str, numbers))} | {found.calls} | {found.seconds:.1f} | {ranking} |",
            flush=True,
        )
        details += [f"{name}:", *(f"  {count:4d} {op}: {why}" for (op, why), count in found.outside.most_common(SHOWN))]
    print("\n".join(details))
    return 0


def models() -> list[tuple[str, str, str]]:
    """All public models: workload, name, and what it was written after."""
    from benchmarks.fusion.workloads.public import WORKLOADS, source

    nets = [(f"anyone/{name}", name, text) for name, text in NETS.items()]
    return [*nets, *((f"public/{name}", name, source(name)) for name in WORKLOADS)]


HEAD = (
    "| model | written after | ops inside | outside | regions | what stays outside |",
    "|---|---|---|---|---|---|",
)


def row(workload: str, name: str, text: str, device: str) -> str:
    """A model's row of the page; says on stderr that it is done."""
    found = covered(workload, device)
    reasons = Counter[str]()
    for (op, why), count in found.outside.items():
        reasons[f"{op}: {why}"] += count
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(FEW))
    more = len(reasons) - FEW
    why += f"; {more} other reasons" if more > 0 else ""
    print(f"{name}: {found.regions} regions, {found.seconds:.1f} s", file=sys.stderr, flush=True)
    numbers = f"{found.inside:,} | {found.outside.total():,} | {found.regions}"
    return f"| {name} | {text} | {numbers} | {why.replace('|', '/')} |"


def put(page: Path, head: Sequence[str], rows: Sequence[str]) -> None:
    """Replace what is between the two marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    before, mark, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"{page} has no lines {MARKS[0]} and {MARKS[1]}; add them where the table is to be")
    page.write_text("\n".join([before + mark, *head, *rows, end + after]))


def covered(workload: str, device: str = "h100", kernels: bool = False) -> Coverage:
    """What regions would hold of a workload's step on a device.

    Args:
        workload: as `workloads.make` takes it.
        device: the name of a profile.
        kernels: whether to choose templates.
    """
    import tfmem
    from benchmarks.fusion.workloads import make
    from graph_passes.pipeline import PassPhase, run_passes
    from tfmem.capture.branches import with_selects
    from tfmem.capture.captured import every_node
    from tfmem.capture.captured_source import CapturedSource
    from tfmem.capture.concrete_function import capture_concrete
    from tfmem.capture.grappler import run_grappler
    from tfmem.capture.known_sizes import with_known_sizes
    from tfmem.capture.unique_rows import with_all_rows
    from tfmem.kernels.fusion_needs import after_grappler, fusion_needs, stitching

    tfmem.load_ops()
    given = make(workload)
    captured = capture_concrete(given.step.get_concrete_function(*given.inputs))
    captured = with_selects(run_grappler(captured, device="GPU", nested=True))
    captured = with_all_rows(with_known_sizes(captured))
    needs = replace(fusion_needs(captured.feeds, *_settings(device)), programs=None)
    source = CapturedSource(captured)
    began = time.process_time()
    done = stitching(run_passes(PassPhase.AFTER_GRAPPLER, ("fusion",), source, after_grappler(needs)))
    for caller, body in source.bodies().items():
        within = run_passes(PassPhase.AFTER_GRAPPLER, ("fusion",), body, after_grappler(replace(needs, fed=())))
        done = done.joined(stitching(within).within(caller))
    seconds = time.process_time() - began
    ops = {node.name: node.op for node in every_node(source.captured.graph_def) if node.op not in _NO_WORK}
    reasons = {name: str(why) for name, why in done.reasons.items()}
    reasons |= {name: str(each.reason) for each in done.kept for name in each.members}
    members = [name for region in done.regions for name in region.schedule.members]
    outside = Counter[tuple[str, str]]()
    for name, why in reasons.items():
        op = ops.get(name) or ops.get(name.rpartition("/")[2])
        if op is not None:
            outside[op, _short(why, name)] += 1
    steps = [step for region in done.regions for step in region.schedule.kernels]
    different = {each.program for region in done.regions for each in region.lowered.region.steps if _is_kernel(each)}
    return Coverage(
        inside=len(members),
        regions=len(done.regions),
        kernels=len(steps),
        calls=sum(region.record.count("call") for region in done.regions),
        different=len(different),
        outside=outside,
        seconds=seconds,
        choosing=_choosing(done) if kernels else None,
    )


_NO_WORK = frozenset({"Const", "Placeholder", "_Arg", "_Retval", "NoOp"})


def _settings(device: str) -> tuple[Any, Any]:
    """A GPU that is not there, and options of planning by model."""
    from graph_passes.analysis.cost import device_costs as profiles
    from graph_passes.passes.fuse.options import FusionOptions
    from tfmem.devices import Target
    from tfmem.options import Options

    target = Target("/device:GPU:0", device, 80 << 30, profiles.load(device), 0, "tf32")
    return target, Options(fusion=FusionOptions(tune="off"), cache_directory="")


def _is_kernel(step: object) -> bool:
    from custom_ops.fusion.region import Kernel

    return isinstance(step, Kernel)


def _short(why: str, name: str) -> str:
    """A reason without the names of tensors, so that equal reasons are counted together."""
    words = why.replace(name, "it").split()
    return " ".join("..." if "/" in word or ":" in word[:-1] else word for word in words)[:110]


def _choosing(done: Any) -> float:
    """Seconds of the processor to choose a template for each kernel by model."""
    from custom_ops.fusion.programs import by_model, kernels

    choose = by_model(132)
    began = time.process_time()
    for region in done.regions:
        kernels(region.lowered.region, choose)
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
