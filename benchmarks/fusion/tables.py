"""Writes the fusion benchmark's results into docs/benchmarks_fusion.md, between two markers.

python -m benchmarks.fusion.tables benchmarks/results/fusion_cpu.json"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fusion.cases import LARGE, MODELS, OTHERS, SYSTEMS, TEN
from benchmarks.fusion.compare import (
    best_xla,
    best_xla_over_graph,
    busy_over_xla,
    fewer,
    fusion_alone,
    given_runs,
    mean,
    of_copy,
    over_graph,
    over_xla,
    value,
    wrong,
)
from benchmarks.fusion.published import APPLICATIONS, FIGURE_7, KERNELS, PAPER, TABLE_3
from benchmarks.offload.tables import table as markdown
from benchmarks.offload.tables import write
from benchmarks.records import ROOT
from benchmarks.runs import command_line, existing

MARKERS = ("<!-- fusion: begin -->", "<!-- fusion: end -->")
ORDER = {name: place for place, name in enumerate((*TEN, *OTHERS, *MODELS, *LARGE))}

Outcome = Mapping[str, Any]
Cases = Mapping[str, Outcome]


def main(arguments: list[str] | None = None) -> int:
    """Read results, replace what is between the markers."""
    parser = command_line("fusion.tables", __doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what benchmarks.fusion wrote")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks_fusion.md")
    options = parser.parse_args(arguments)
    write(options.document, tables(*(existing(parser, path) for path in options.results)), MARKERS)
    return 0


def tables(*results: Mapping[str, Any]) -> str:
    """Every table of all results."""
    parts = (part for each in results for part in (machine(each), "\n".join(table(each["cases"]))))
    return "\n\n".join(parts)


def machine(results: Mapping[str, Any]) -> str:
    """A heading, and what the numbers depend on."""
    about, cases = results["machine"], list(results["cases"].values())
    gpus, cpu = Counter(about["gpus"]), f"{about['cores']} x {about['cpu']}"
    gpu = "; ".join(f"{count} x {name}" if count > 1 else name for name, count in gpus.items())
    versions = {f"{name} {number}" for case in cases for name, number in case.get("versions", {}).items()}
    rounds, dropped = (sum(case.get(key, 0) for case in cases) for key in ("rounds", "dropped"))
    commits = sorted({case["commit"] for case in cases if "commit" in case})
    busy = [case["others"] for case in cases if "others" in case]
    flags = {f"{name}={text}" for case in cases for name, text in case.get("flags", {}).items()}
    flags |= {f"{name}={text}" for name, text in about["environment"].items()}
    steps, warm_up, block, parity = (words_of(cases, key) for key in ("steps", "warm_up", "block", "parity"))
    lines = [
        f"Machine: {gpu or 'no GPU'}; {cpu}; Linux {about['kernel']}; Python {about['python']}.",
        f"Versions: {', '.join(sorted(versions)) or '-'}. Flags: {' '.join(sorted(flags)) or 'none'}.",
        f"{steps} timed steps after {warm_up}, in blocks of {block}; losses after {parity} steps.",
    ]
    if commits:
        lines.append(f"Commits: {', '.join(commits)}; of older rows the text above names them.")
    if busy:
        lines.append(
            f"{rounds} rounds, {dropped} dropped because other processes were busy; in those kept, these used "
            f"{sum(busy) / len(busy):.0%} of the processors on average, {max(busy):.0%} at most."
        )
    return f"## {gpu.partition(',')[0] or cpu}\n\n" + "\n".join(f"- {line}" for line in lines)


def words_of(cases: list[Outcome], key: str) -> str:
    """The values that a setting had."""
    return " or ".join(str(found) for found in sorted({case[key] for case in cases if key in case})) or "-"


def table(cases: Cases) -> list[str]:
    """Every table that there are results for, one after the other, each set of settings by itself."""
    parts = []
    for settings, chosen in by_settings(cases).items():
        small = {name: outcome for name, outcome in chosen.items() if name not in LARGE}
        large = {name: outcome for name, outcome in chosen.items() if name in LARGE}
        for title, make, of in (
            (f"Median step, ms ({in_words(chosen)})", times, small),
            ("First calls, s", first_calls, small),
            ("Kernels of a step", kernels, small),
            ("Regions of tfmem", regions, small),
            ("Table 3: how many times fewer kernels, how many times as fast as TensorFlow", speedups, small),
            ("Figure 7: the time in which the GPU is busy, over that of XLA's faster mode", busy, small),
            ("Large tensors, against a copy of one of them in the same run", bandwidths, large),
        ):
            if text := make(of):
                parts.append(f"### {title}{settings}\n\n{text.lstrip()}")
    return "\n\n".join(parts).splitlines()


def in_words(cases: Cases) -> str:
    """Whether the remapper and TF32 are on, which are the same for all cases of a table."""
    (one, *_) = cases.values()
    remapper, tf32 = ("on" if one.get(key) else "off" for key in ("remapper", "tf32"))
    return f"remapper {remapper}, TF32 {tf32}"


def by_settings(cases: Cases) -> dict[str, dict[str, Outcome]]:
    """Cases by workload, by the settings that their names end in."""
    found: dict[str, dict[str, Outcome]] = {}
    for name, outcome in cases.items():
        workload, comma, settings = name.partition(", ")
        found.setdefault(comma + settings, {})[workload] = outcome
    return {
        settings: dict(sorted(chosen.items(), key=lambda item: ORDER.get(item[0], len(ORDER))))
        for settings, chosen in sorted(found.items())
    }


def systems_of(cases: Cases) -> tuple[str, ...]:
    """The systems with a column: fusion alone differs from tfmem in few rows, and was not always measured."""
    alone = any("fusion" in outcome.get("systems", {}) for outcome in cases.values())
    return tuple(name for name in SYSTEMS if name != "fusion" or alone)


def times(cases: Cases) -> str:
    """Milliseconds of a step."""
    systems = systems_of(cases)
    header = (
        "workload",
        *systems,
        "tfmem over graph",
        "tfmem over the better XLA",
        "fusion alone over graph",
        "over the better XLA",
        "tfmem's loss (after 1, 10, all steps) or output off by",
        "TensorFlow's, inputs moved",
    )
    rows = [
        (
            name,
            *(milliseconds(outcome, system) for system in systems),
            ratio(over_graph(outcome, "tfmem")),
            ratio(over_xla(outcome)),
            ratio(over_graph(outcome, fusion_alone(name))),
            ratio(over_xla(outcome, fusion_alone(name))),
            distances(value(outcome, "tfmem", "differences") or [value(outcome, "tfmem", "difference")])
            + (" (WRONG)" if wrong(outcome) else ""),
            distances(outcome.get("strays_after") or [outcome.get("strays")]),
        )
        for name, outcome in cases.items()
    ]
    text = markdown("", header, rows) if rows else ""
    return text + means({name: outcome for name, outcome in cases.items() if name in TEN})


def means(ten: Cases) -> str:
    """Geometric means: of all passes, and of the fusion pass alone, which needs separate rows for recurrent nets."""
    gains = {
        "XLA's better mode over graph": [best_xla_over_graph(outcome) for outcome in ten.values()],
        "tfmem over graph": [over_graph(outcome, "tfmem") for outcome in ten.values()],
        "tfmem over XLA's better mode": [over_xla(outcome) for outcome in ten.values()],
        "fusion alone over graph": [over_graph(found, fusion_alone(name)) for name, found in ten.items()],
        "fusion alone over XLA's better mode": [over_xla(found, fusion_alone(name)) for name, found in ten.items()],
    }
    words = []
    for name, found in gains.items():
        if measured := [each for each in found if each]:
            of = "" if len(measured) == len(ten) else f" (of {len(measured)})"
            words.append(f"{name} {mean(measured):.2f}x{of}")
    text = f"\n\nGeometric means of the ten: {', '.join(words)}." if words else ""
    given = [name for name, outcome in ten.items() if given_runs(outcome, "tfmem")]
    return text + (f" Runs as given, since stitching it was no faster: {', '.join(given)}." if given else "")


def first_calls(cases: Cases) -> str:
    """Seconds of the first call, tracing and compilation included; and XLA's clusters."""
    systems = systems_of(cases)
    rows = [
        (
            name,
            *(number(outcome, system, "first_seconds", ".1f") for system in systems),
            number(outcome, "auto-jit", "clusters", "d"),
        )
        for name, outcome in cases.items()
    ]
    return markdown("", ("workload", *systems, "clusters of auto-jit"), rows) if rows else ""


def kernels(cases: Cases) -> str:
    """Ops that run a kernel, kernels by the profiler where there is a GPU, and what was counted before."""
    of_profiler = any(value(outcome, system, "kernels") for outcome in cases.values() for system in SYSTEMS)
    profiled = systems_of(cases) if of_profiler else ()
    header = ("workload", "graph: products + memory ops", *(f"launched, {name}" for name in profiled))
    header += ("XLA for an H200: products + others", "products + lower bound")
    header += tuple(f"busy, {name}, ms" for name in profiled)
    rows = []
    for name, outcome in cases.items():
        known, ops = KERNELS.get(name), outcome.get("ops")
        rows.append(
            (
                name,
                f"{ops['products']} + {ops['memory']}" if ops else "-",
                *(number(outcome, system, "kernels", ".0f") for system in profiled),
                f"{known.xla_products} + {known.xla_memory}" if known else "-",
                f"{known.products} + {known.bound}" if known else "-",
                *(number(outcome, system, "busy_ms", ".3f") for system in profiled),
            )
        )
    return markdown("", header, rows) if rows else ""


def regions(cases: Cases) -> str:
    """What tfmem's regions hold, and what became of them."""
    keys = ("regions", "stitched_ops", "stitched_kernels", "stitched_calls")
    rows = [
        (name, *(number(outcome, "tfmem", key, "d") for key in keys), value(outcome, "tfmem", "fusion") or "-")
        for name, outcome in cases.items()
        if value(outcome, "tfmem", "regions") is not None
    ]
    return markdown("", ("workload", "regions", "ops in them", "kernels", "calls", "the step"), rows) if rows else ""


def speedups(cases: Cases) -> str:
    """The paper's Table 3 beside what was measured."""
    header = ("workload", "in the paper", "kernels: XLA", "tfmem", "paper: XLA", "paper: FusionStitching")
    header += ("speed: XLA", "tfmem", "paper: XLA", "paper: FusionStitching")
    rows = []
    for name, outcome in cases.items():
        if name in TABLE_3:
            paper = TABLE_3[name]
            xla = best_xla(outcome)
            rows.append(
                (
                    *(fewer(outcome, xla), fewer(outcome, "tfmem"), paper.xla_kernels, paper.kernels),
                    *(over_graph(outcome, xla), over_graph(outcome, "tfmem"), paper.xla, paper.stitched),
                )
            )
    if not rows:
        return ""
    names = [(name, TABLE_3[name].name) for name in cases if name in TABLE_3]
    lines = [(*name, *map(ratio, row)) for name, row in zip(names, rows, strict=True)]
    lines.append(("geometric mean", "", *(ratio(mean(column)) for column in zip(*rows, strict=True))))
    return markdown("", header, lines) + f"\n\nXLA: the faster of its modes. Paper: {PAPER}."


def busy(cases: Cases) -> str:
    """The paper's Figure 7: accumulated kernel time; here the time in which any kernel runs."""
    header = ("workload", "XLA, ms", "tfmem, ms", "tfmem over XLA", "fusion alone over XLA")
    ratios = {
        name: (both, busy_over_xla(outcome, fusion_alone(name)))
        for name, outcome in cases.items()
        if (both := busy_over_xla(outcome, "tfmem"))
    }
    if not ratios:
        return ""
    rows = []
    for name, pair in ratios.items():
        of = [value(cases[name], system, "busy_ms") for system in (best_xla(cases[name]), "tfmem")]
        rows.append((name, *(f"{each:.3f}" for each in of), *map(two_digits, pair)))
    four = [pair for name, pair in ratios.items() if name in APPLICATIONS]
    if len(four) == len(APPLICATIONS):
        averages = [sum(column) / len(four) for column in zip(*four, strict=True) if None not in column]
        rows.append(("mean of the four that stand in for the paper's applications", "", "", *map(two_digits, averages)))
    return markdown("", header, rows) + f"\n\nThe paper's mean of its four applications: {FIGURE_7}."


def two_digits(found: float | None) -> str:
    """A ratio, in a cell."""
    return f"{found:.2f}" if found else "-"


def bandwidths(cases: Cases) -> str:
    """Bytes that have to be moved in the time of a step, as a share of what a copy moves in its time."""
    systems = systems_of(cases)
    header = ("workload", "large inputs", *(f"{name}, ms" for name in systems), "copy, GB/s")
    header += tuple(f"{name}, of copy" for name in systems)
    rows = [
        (
            name.partition("/")[2],
            " ".join("x".join(map(str, shape)) for shape in outcome.get("shapes", ())),
            *(milliseconds(outcome, system) for system in systems),
            f"{found:.0f}" if (found := gigabytes(outcome)) else "-",
            *(f"{share:.0%}" if (share := of_copy(outcome, system)) else "-" for system in systems),
        )
        for name, outcome in cases.items()
    ]
    return markdown("", header, rows) if rows else ""


def gigabytes(outcome: Outcome) -> float | None:
    """Gigabytes that a copy reads and writes in a second."""
    time, moved = value(outcome, "copy", "ms"), value(outcome, "copy", "moved")
    return moved / time / 1e6 if time and moved else None


def line(name: str, outcome: Outcome) -> str:
    """One workload while it is being measured."""
    words = [f"{name}: {outcome['status']}", *(f"{system} {milliseconds(outcome, system)}" for system in SYSTEMS)]
    words += [outcome["message"][-300:]] if "message" in outcome else []
    words += ["tfmem is WRONG"] if wrong(outcome) else []
    return ", ".join(words) + f" ({outcome['process_seconds']:.0f} s)"


def distances(found: Sequence[float | None]) -> str:
    """Distances of losses or outputs, each with one digit."""
    return ", ".join("-" if each is None else f"{each:.1g}" for each in found)


def milliseconds(outcome: Outcome, system: str) -> str:
    """The median step, or what came of it."""
    found = outcome.get("systems", {}).get(system, {})
    given = " (as given)" if given_runs(outcome, system) else ""
    return f"{found['ms']:.3f}{given}" if "ms" in found else found.get("status", "-")


def number(outcome: Outcome, system: str, key: str, form: str) -> str:
    """A value of a system, "-" where there is none."""
    found = value(outcome, system, key)
    return "-" if found is None else format(found, form)


def ratio(found: float | None) -> str:
    """The ratio as a cell of the table."""
    return f"{found:.2f}x" if found else "-"


if __name__ == "__main__":
    sys.exit(main())
