"""What each helper of the offload planner buys, on steps that were observed on a GPU.

    python -m benchmarks.offload.ablation --observe vgg19/1.5/hybrid resnet152/2.0/tfmem --steps-to build/steps
    python -m benchmarks.offload.ablation --steps-to build/steps --output benchmarks/results/offload_ablation.json
    python -m benchmarks.offload.ablation --traced unet --output benchmarks/results/offload_ablation.json
    python -m benchmarks.offload.ablation --output benchmarks/results/offload_ablation.json --document FILE

The first command needs a GPU: it runs cases of `benchmarks.offload` and keeps what their plans were made from. The
second plans each step again, without one helper after the other, for some budgets, on any machine. The third does so
for a step of which nothing ran, by a device's profile, in about half of its memory. A row is the step time of the plan
that would be run first, and whether all its allocations find room, both by the replay of TensorFlow's allocator."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.offload import traced
from benchmarks.offload.cases import FULL, NETWORKS, all_cases
from benchmarks.records import ROOT, begun, commit, load, save
from benchmarks.runs import command_line
from graph_passes import pipeline
from graph_passes.analysis.cost import device_costs as devices
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload import plan as offload_plan
from graph_passes.passes.offload import repair
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, OffloadPlan, plan_offload
from tfmem.steps import trials

MARK = "ablation"
SHARES = (90, 100, 115)  # percent of the budget that the step was observed under

Patch = tuple[Any, str, Any]


def _nothing(*_: Any) -> Iterator[repair.Repairs]:
    return iter(())


def _as_planned(timeline: Timeline, plan: OffloadPlan, room: Room) -> OffloadPlan:
    return plan


def _unrepaired(timeline: Timeline, build: Callable[..., Any], *_: Any) -> Any:
    return build(()), ()


# What is replaced to plan without a helper. The planner has no switches, since users need none.
_PADDINGS: Patch = (repair.Repairer, "cleared", _nothing)
_EVICTIONS: Patch = (repair.Repairer, "with_evictions", _nothing)
_THINNING: Patch = (trials, "thinned", _as_planned)
_REPAIRS: Patch = (sys.modules["graph_passes.passes.offload.plan"], "repaired", _unrepaired)
VARIANTS: Mapping[str, tuple[Patch, ...]] = {
    "all helpers": (),
    "no padding allocations": (_PADDINGS,),
    "no more tensors moved for contiguous memory": (_EVICTIONS,),
    "no repairs at all": (_REPAIRS,),
    "no thinning": (_THINNING,),
    "no repairs, no thinning": (_REPAIRS, _THINNING),
}


@dataclass(frozen=True)
class ObservedStep:
    """What plans of a step under a budget are made from.

    Attributes:
        timeline: the step, by measured times and workspaces.
        arguments: of `plan_offload`, but for the budget.
        budget: bytes.
        room: what of the GPU's memory is free before the step.
        measured_ms: the median step of the run that was observed, as it ended up; 0 if nothing ran.
    """

    timeline: Timeline
    arguments: Mapping[str, Any]
    budget: int
    room: Room
    measured_ms: float


class _RoomyHost:
    """Stands for the memory: any host has room, so that rows say nothing of the machine that plans."""

    def require_host_room(self, timeline: Timeline, plan: OffloadPlan) -> None:
        """Never refuses."""


def main(arguments: list[str] | None = None) -> int:
    """Observe, plan or write the table, as asked."""
    parser = command_line("offload.ablation", __doc__, "offload_ablation.json")
    parser.add_argument("--observe", nargs="+", default=[], metavar="CASE", help="cases to run, on a GPU")
    parser.add_argument("--traced", nargs="+", default=[], choices=NETWORKS, help="networks to plan for without a run")
    parser.add_argument("--device", choices=devices.profiles(), default="h200", help="profile for `--traced` (h200)")
    parser.add_argument("--steps-to", type=Path, metavar="FOLDER", help="where observed steps are kept")
    parser.add_argument(
        "--link",
        nargs=2,
        type=float,
        metavar=("OUT", "IN"),
        help="GB/s, in place of those the steps were observed with",
    )
    parser.add_argument("--document", type=Path, help="a page whose part between the marks becomes the table")
    options = parser.parse_args(arguments)
    if options.observe:
        options.steps_to.mkdir(parents=True, exist_ok=True)
        for name in options.observe:
            seen = observed(name)
            (options.steps_to / f"{name.replace('/', '_')}.pickle").write_bytes(pickle.dumps((name, seen)))
            print(f"{name}: {seen.measured_ms:.1f} ms a step", flush=True)
        return 0
    if options.document:
        write_table(options.document, load(options.output) or {"cases": {}})
        return 0
    results = begun(options)
    kept = sorted(options.steps_to.glob("*.pickle")) if options.steps_to else ()
    steps = [pickle.loads(path.read_bytes()) for path in kept]  # written by the command above
    steps += [(f"{net}/2.0/{options.device}, traced", unobserved(net, options.device)) for net in options.traced]
    for name, found in steps:
        seen = found
        if options.link:
            out, back = options.link
            seen = replace(found, arguments={**found.arguments, "link": Link(1e9 * out, 1e9 * back)})
        link = seen.arguments["link"]
        case = {
            "budget": seen.budget,
            "commit": commit(),
            "measured_ms": round(seen.measured_ms, 1),
            "ops_ms": round(1e3 * sum(step.seconds for step in seen.timeline.steps), 1),
            "link": [link.offload, link.prefetch],
            "rows": {},
        }
        results["cases"][name] = case
        for variant, patches in VARIANTS.items():
            case["rows"][variant] = {share: planned(under(seen, share), patches) for share in SHARES}
            print(name, variant, case["rows"][variant], flush=True)
            save(results, options.output)
    return 0


def observed(name: str) -> ObservedStep:
    """Runs a case of `benchmarks.offload`, on a GPU, and keeps what its last plans were made from."""
    import benchmarks.offload.worker as worker

    case = next(case for case in all_cases() if case.name == name)
    calls: list[tuple[Any, ...]] = []
    found: list[trials.Plans] = []

    def recording(*given: Any) -> OffloadPlan:
        calls.append(given)
        return plan_offload(*given)

    def untried(plans: trials.Plans, *given: Any) -> Iterator[OffloadPlan]:
        found.append(plans)
        return original(plans, *given)

    original = trials.Plans.untried
    known = load(ROOT / "benchmarks" / "results" / "offload_h200.json") or {"cases": {}}
    task = asdict(case) | {
        "batch": FULL.batches[case.network],
        "image_size": FULL.image_size,
        "classes": FULL.classes,
        "width": FULL.width,
        "cap": case.cap(FULL, known["cases"]),
        "steps": 8,
        "warm_up": 8,
        "policy": case.policy or "autovm",
    }
    with (
        mock.patch.object(offload_plan, "plan_offload", recording),
        mock.patch.object(trials.Plans, "untried", untried),
    ):
        result = worker.measure(task)
    plans = found[-1]
    timeline, link, _, offload, how = next(call for call in reversed(calls) if call[0] is plans.timeline)
    if plans.room is None:
        raise RuntimeError(f"{name} ran without a GPU: there is no memory to replay the allocator in")
    arguments = {"link": link, "options": offload, "how": _without_room(how)}
    return ObservedStep(timeline, arguments, plans.budget, plans.room, 1e3 * result["median_seconds"])


def unobserved(net: str, device: str) -> ObservedStep:
    """The step of a network in half of its memory, by a device's profile, convolutions without workspace."""
    step = traced.traced(net).step()
    timeline, profile = step.timeline(traced.costs(device)), devices.load(device)
    link, offload, budget = Link(profile.offload, profile.prefetch), OffloadOptions(), timeline.peak // 2
    calls: list[tuple[Any, ...]] = []

    def recording(*given: Any) -> OffloadPlan:
        calls.append(given)
        return plan_offload(*given)

    with mock.patch.object(offload_plan, "plan_offload", recording):
        pipeline.plan_step(step, timeline, link, budget, offload, timed=True)
    arguments = {"link": link, "options": offload, "how": _without_room(calls[-1][4])}
    return ObservedStep(timeline, arguments, budget, Room(((256, budget),), limit=budget), 0.0)


def _without_room(how: How) -> How:
    """The arguments of a step, without those of one plan."""
    return How(layers=how.layers, convolution_inputs=how.convolution_inputs, relax=how.relax, timed=how.timed)


def under(seen: ObservedStep, share: int) -> ObservedStep:
    """`seen` with `share` percent of the budget, and as much more or less memory."""
    budget = seen.budget * share // 100
    return replace(seen, budget=budget, room=replace(seen.room.grown(budget - seen.budget), limit=budget))


def planned(seen: ObservedStep, patches: Sequence[Patch]) -> dict[str, Any]:
    """The plan that would be run first, without what is patched away."""

    def make(budget: int, **how: Any) -> OffloadPlan:
        given = seen.arguments | {"how": replace(seen.arguments["how"], **how)}
        return plan_offload(seen.timeline, budget=budget, **given)

    began = time.perf_counter()
    with ExitStack() as stack:
        for where, name, instead in patches:
            stack.enter_context(mock.patch.object(where, name, instead))
        plans = trials.Plans(_RoomyHost(), seen.timeline, seen.budget, make, seen.room)  # type: ignore[arg-type]
        best = next(plans.falling(seen.room), None)
    seconds = round(time.perf_counter() - began, 1)
    if best is None:
        return {"found": False, "planning_seconds": seconds}
    moved = sum(seen.timeline.buffers[move.buffer].nbytes for move in best.moves if not move.recomputed)
    return {
        "found": True,
        "predicted_ms": round(1e3 * best.after.seconds, 1),
        "moved_bytes": moved,
        "paddings": len(best.paddings),
        "planned_for_percent": round(100 * best.budget / seen.budget),
        "planning_seconds": seconds,
    }


def write_table(document: Path, results: Mapping[str, Any]) -> None:
    """Replaces the part between the marks."""
    begin, end = f"<!-- {MARK}: begin -->", f"<!-- {MARK}: end -->"
    before, _, rest = document.read_text().partition(begin)
    document.write_text("\n".join([before + begin, *table(results), end]) + rest.partition(end)[2])


def table(results: Mapping[str, Any]) -> list[str]:
    """Markdown lines."""
    lines = []
    for name, case in results["cases"].items():
        budgets = [f"{case['budget'] * share / 100 / (1 << 30):.2f} GiB" for share in SHARES]
        out, back = (rate / 1e9 for rate in case["link"])
        lines += [
            f"`{name}`: its ops take {case['ops_ms']} ms; copies run at {out:.1f} GB/s out and {back:.1f} GB/s back.",
            "",
            "| planned with | " + " | ".join(f"{budget}, ms (GiB out)" for budget in budgets) + " | planning, s |",
            "| --- " * (2 + len(SHARES)) + "|",
        ]
        for variant, rows in case["rows"].items():
            cells = [_cell(row) for row in rows.values()]
            seconds = sum(row["planning_seconds"] for row in rows.values())
            lines.append("| " + " | ".join([variant, *cells, f"{seconds:.0f}"]) + " |")
        lines.append("")
    return lines[:-1]


def _cell(row: Mapping[str, Any]) -> str:
    if not row["found"]:
        return "no plan finds room"
    return f"{row['predicted_ms']:.0f} ({row['moved_bytes'] / (1 << 30):.2f})"


if __name__ == "__main__":
    sys.exit(main())
