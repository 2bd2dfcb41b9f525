"""Loops that stay loops on a CPU: TensorFlow's executor beside tfmem with default options, in inference and training.

    python -m benchmarks.fusion.loops --output benchmarks/results/fusion_loops_cpu.json
    python -m benchmarks.fusion.loops --table benchmarks/results/fusion_loops_cpu.json

Each case has a process. It has three copies of a net: plain, with passes=("recurrent", "offload"), which stitches
nothing, and with the default options, which stitch the step where they time that to be faster. *Until
decided*: so many calls of the third run before that, on end. *Extra* is the time that these take more than as many
calls of the second, *the longest call* the longest of them but for the first. Then medians of all, in turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.offload.tables import table as markdown
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

MOST = 60.0  # seconds until it has to be decided
SIZES = ("small", "large")
MODES = ("infer", "train")
COPIES = ("TensorFlow", "unstitched", "default")


@dataclass(frozen=True)
class Case:
    """A net of some size, in inference or in training."""

    net: str
    size: str
    mode: str

    @property
    def name(self) -> str:
        """See `benchmarks.runs`."""
        return f"{self.net}/{self.size}/{self.mode}"


CASES = [Case(net, size, mode) for net in ("bahdanau", "luong", "sinkhorn") for size in SIZES for mode in MODES]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or print the table of what was written."""
    parser = command_line("fusion.loops", __doc__, "fusion_loops.json")
    options, cases = asked(parser, arguments, CASES, lambda cases: [table(cases)])
    results = begun(options) if cases else {"cases": {}}
    for case in waiting(cases, results, options):
        results["cases"][case.name] = in_process("benchmarks.fusion.loops_worker", vars(case), 2 * MOST)
        save(results, options.output)
    if cases:
        print(table(results["cases"]))
    return 0


def table(cases: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    rows = []
    for name, case in cases.items():
        if case["status"] != "ok":
            rows.append((name, *["-"] * 8, case.get("message", case["status"]).splitlines()[-1]))
            continue
        ms = {copy: 1e3 * case["seconds"][copy] for copy in COPIES}
        rows.append(
            (
                name,
                *(f"{ms[copy]:.2f}" for copy in COPIES),
                f"{ms['TensorFlow'] / ms['default']:.2f}x",
                f"{ms['unstitched'] / ms['default']:.2f}x",
                str(case["calls"]),
                f"{case['extra']:.2f}",
                f"{case['longest']:.2f}",
                case["fusion"].partition(":")[0],
            )
        )
    header = (
        *("net", "TensorFlow, ms", "unstitched", "default options", "over TensorFlow", "over unstitched"),
        *("calls until decided", "extra, s", "the longest call, s", "what runs"),
    )
    return markdown("Loops that stay loops, on a CPU", header, rows)


if __name__ == "__main__":
    sys.exit(main())
