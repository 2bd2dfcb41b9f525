"""Every architecture of keras.applications on the CPU, under shares of the memory that it takes without tfmem.

    python -m benchmarks.applications                            # all of it: hours on two cores
    python -m benchmarks.applications --plan-only                # trace, plan, edit, verify; nothing runs
    python -m benchmarks.applications --only ResNet50V2
    python -m benchmarks.applications --table benchmarks/results/applications_cpu.json

Each row is a separate process. Plain steps come first, twice from the same weights: that tells their peak, and
whether TensorFlow repeats itself, which equal losses ask for. It may not where a gradient is a sum of three or more, as
Keras's batch normalisation makes one: `AddN` adds to the first input whose memory no other op holds by then
(docs/benchmarks_offload.md says how that was tested). With TF_NUM_INTEROP_THREADS=1 plain steps repeat, but as the
order that TensorFlow then happens to run them in, and a planned step has another. Where a budget is refused, the number
that the error gives is the next row's budget; `least` asks for a single byte. An architecture whose ten plain steps
take over a minute is planned, and not run. Results are kept after each row, and rows that are there are not run
again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process

WORKER = "benchmarks.applications.worker"
OUTPUT = "benchmarks/results/applications_cpu.json"
SHARES = (80, 65, 50)  # percent of the plain peak
A_MINUTE = 60.0
MIB = 1 << 20

# those that take a minute or gigabytes at 96 x 96 and 16 images
LARGE = ("ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge", "EfficientNetB5", "EfficientNetB6", "EfficientNetB7")
LARGE += ("EfficientNetV2L", "EfficientNetV2M", "NASNetLarge")
SMALL = ("DenseNet121", "EfficientNetB0", "EfficientNetB1", "EfficientNetV2B0", "EfficientNetV2B1", "MobileNet")
SMALL += ("MobileNetV2", "MobileNetV3Large", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16")
MEDIUM = ("ConvNeXtSmall", "ConvNeXtTiny", "DenseNet169", "DenseNet201", "EfficientNetB2", "EfficientNetB3")
MEDIUM += ("EfficientNetB4", "EfficientNetV2B2", "EfficientNetV2B3", "EfficientNetV2S", "InceptionResNetV2")
MEDIUM += ("InceptionV3", "ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2", "VGG19", "Xception")


@dataclass(frozen=True)
class Case:
    """One architecture with its inputs."""

    name: str
    image: int = 96
    batch: int = 16
    run: bool = True


CASES = tuple(Case(name) for name in (*SMALL, *MEDIUM)) + tuple(Case(name, batch=4, run=False) for name in LARGE)


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the table. Returns 1 if a row failed."""
    parser = command_line("applications", __doc__, OUTPUT)
    parser.add_argument("--plan-only", action="store_true", help="run no step")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one row (600)")
    parser.set_defaults(total_seconds=1e6)
    options, cases = asked(parser, arguments, CASES, table)
    if not cases:
        return 0
    results = begun(options)
    rows, failed = results["cases"], 0
    deadline = time.monotonic() + options.total_seconds
    for case in cases:
        for name, budget in wanted(case, rows, options.plan_only):
            if (name in rows and rows[name]["status"] != "error" and not options.again) or time.monotonic() > deadline:
                continue
            task = asdict(case) | {"budget": budget, "kind": name.split("/")[1]}
            rows[name] = in_process(WORKER, task, options.timeout)
            save(results, options.output)
            print(line(name, rows[name]), flush=True)
            failed += rows[name]["status"] == "error"
    if options.again:
        print("--again runs only what was named; rows of refusals may be of an earlier run")
    print("\n".join(table(rows)))
    return 1 if failed else 0


def wanted(case: Case, rows: Mapping[str, Any], plan_only: bool) -> Iterator[tuple[str, float]]:
    """Names of rows and their budgets, each known once the rows before it are."""
    yield f"{case.name}/planned", 0
    if plan_only or not case.run:
        return
    yield f"{case.name}/plain", 0
    plain = rows.get(f"{case.name}/plain", {})
    if plain.get("status") != "ok" or sum(plain["seconds"]) > A_MINUTE:
        return
    for name, budget in [(f"{share}%", plain["peak"] * share // 100) for share in SHARES] + [("least", 1)]:
        yield f"{case.name}/{name}", budget
        refused = rows.get(f"{case.name}/{name}", {})
        if refused.get("status") == "refused":
            yield f"{case.name}/{name}/refused", refused["smallest"]


def line(name: str, row: Mapping[str, Any]) -> str:
    """One row while it is being measured."""
    words = [row["status"], row.get("message", "")[-300:], f"({row['process_seconds']:.0f} s)"]
    if "peak" in row:
        words.insert(1, f"peak {row['peak'] / MIB:.1f} MiB under {row['budget'] / MIB:.1f}")
    return f"{name}: " + " ".join(word for word in words if word)


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results for people, in Markdown; sizes in MiB, times in seconds."""
    lines = [
        "| network | of plain | budget | planned | measured | first step | steps 2-6 | plain | losses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        network, kind = name.split("/", 1)
        plain = rows.get(f"{network}/plain", {})
        if kind == "planned":
            lines += _of_plans(network, row)
        elif kind != "plain" and row["status"] != "ok":
            smallest = f"at least {row['smallest'] / MIB:.1f}" if "smallest" in row else _message(row)
            lines.append(f"| {network} | {kind} | {_mib(row)} | {row['status']}: {smallest} | | | | | |")
        elif kind != "plain":
            times = f"{row['seconds'][0]:.1f} | {_later(row):.2f} | {plain['seconds'][0]:.1f}, {_later(plain):.2f}"
            over = " OVER" if row["peak"] > row["budget"] else ""
            planned, measured = row["planned"] / MIB, row["peak"] / MIB
            lines.append(
                f"| {network} | {kind} | {_mib(row)} | {planned:.1f} | {measured:.1f}{over} | {times} | "
                f"{_losses(row, plain)} |"
            )
        elif row["status"] == "ok":
            repeats = "repeat" if row["losses"] == row["again"] else "do not repeat"
            lines.append(
                f"| {network} | plain | | | {row['peak'] / MIB:.1f} | {row['seconds'][0]:.1f} | {_later(row):.2f} | | "
                f"{repeats} |"
            )
        else:
            lines.append(f"| {network} | plain | | | {row['status']} | | | | |")
    return lines


def _of_plans(network: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Rows of plans that were made from estimates and put into the graph, and not run."""
    if row["status"] != "ok":
        yield f"| {network} | plans | | {row['status']}: {row.get('message', '')[-80:]} | | | | | |"
    for share, found in row.get("plans", {}).items():
        planned = f"{found['planned'] / MIB:.1f}, {found['moves']} moves" if "planned" in found else "refused"
        smallest = f": at least {found['smallest'] / MIB:.1f}" if "smallest" in found else ""
        yield f"| {network} | {share}% of the estimate | {found['budget'] / MIB:.1f} | {planned}{smallest} | | | | | |"


def _message(row: Mapping[str, Any]) -> str:
    return " ".join(row.get("message", "").split())[-80:]


def _mib(row: Mapping[str, Any]) -> str:
    return f"{row['budget'] / MIB:.1f}"


def _later(row: Mapping[str, Any]) -> float:
    return sum(row["seconds"][1:6]) / len(row["seconds"][1:6])


def _losses(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    if plain["losses"] != plain["again"]:
        return "plain ones do not repeat"
    return "equal" if row["losses"] == plain["losses"] else "DIFFER"


if __name__ == "__main__":
    sys.exit(main())
