"""What merging products of one operand (queries, keys and values) brings: workloads beside the same with weights
that are one variable, which is more than any merging can reach, and with weights that each step puts side by side; and
one whose products are large with the pass that merges them and without.

    python -m benchmarks.fusion.merging --output benchmarks/results/fusion_merging_h200.json

All run as tfmem has them, in turns, in one process for each workload."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

WORKER = "benchmarks.fusion.merging"
APART = ", apart"  # ending of the name of a form that runs without the pass
FORMS = {
    "nmt": ("nmt", "merged/nmt", "merged/nmt_copied"),
    "rokid": ("rokid", "merged/rokid", "merged/rokid_copied"),
    "bert_base": ("models/bert_base", f"models/bert_base{APART}"),
}


@dataclass(frozen=True)
class Case:
    """A workload in its forms."""

    name: str


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print it."""
    parser = command_line("fusion.merging", __doc__, "fusion_merging.json")
    parser.add_argument("--settle", type=float, default=60, help="seconds to wait at most until a form is decided (60)")
    parser.add_argument("--steps", type=int, default=200, help="timed steps (200)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one workload (400)")
    options, cases = asked(parser, arguments, [Case(name) for name in FORMS])
    results = begun(options)
    for case in waiting(cases, results, options):
        task = {"forms": FORMS[case.name], "settle": options.settle, "steps": options.steps}
        results["cases"][case.name] = outcome = in_process(WORKER, task, options.timeout)
        save(results, options.output)
        for line in lines(case.name, outcome):
            print(line, flush=True)
    return int(any(outcome["status"] != "ok" for outcome in results["cases"].values()))


def lines(name: str, outcome: dict[str, Any]) -> list[str]:
    """Lines of one workload, one for each form."""
    if outcome["status"] != "ok":
        return [f"{name}: {outcome['status']}: {outcome.get('message', '')}"]
    return [
        f"{form:24s} {found['ms']:9.4f} ms {found['quartiles']} {found.get('kernels', '-')} kernels, "
        f"{found['stitched_calls']} calls, {found['fusion']}"
        for form, found in outcome["forms"].items()
    ]


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """All forms of a workload."""
    from benchmarks.fusion import worker
    from benchmarks.fusion.systems import System
    from benchmarks.fusion.workloads import make
    from benchmarks.offload.worker import device_name, versions

    task = {"remapper": False, "tf32": True, "deterministic": False, "warm_up": 20, "block": 20, "patience": 0} | task
    worker.prepare(task)
    systems = {}
    for form in task["forms"]:
        with without_the_pass() if form.endswith(APART) else nullcontext():
            systems[form] = System.begun("tfmem", partial(make, form.removesuffix(APART)))
            worker.warm_up(systems[form], task)
    worker.timed(list(systems.values()), task)
    forms = {
        form: worker.summary(system.seconds) | worker.profiled(system) | worker.regions_of(system)
        for form, system in systems.items()
    }
    return {"status": "ok", "device": device_name(), "versions": versions(), "forms": forms}


@contextmanager
def without_the_pass() -> Iterator[None]:
    """No product is merged in a step that is planned meanwhile."""
    from tfmem.steps import after_grappler

    given = after_grappler.fusion_needs
    after_grappler.fusion_needs = lambda *args, **more: replace(given(*args, **more), beside=None)
    try:
        yield
    finally:
        after_grappler.fusion_needs = given


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        from benchmarks.fusion.worker import main as work

        work(measured)
    else:
        sys.exit(main())
