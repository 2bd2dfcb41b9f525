"""What tfmem promises of keras.applications under a budget, beside what is measured: peaks and times on a CPU.

    python -m benchmarks.offload.verdicts                                # all of it: hours on two cores
    python -m benchmarks.offload.verdicts --only MobileNetV2 --shares 65 50
    python -m benchmarks.offload.verdicts --tiny --only MobileNetV3Small
    python -m benchmarks.offload.verdicts --table benchmarks/results/offload_verdicts_cpu.json

Each row is a separate process. The first trains the unmodified network twice from the same weights, which tells its
peak, and whether TensorFlow repeats itself. The others train it under shares of that peak. A refusal is right where the
budget is less than the tensors of some op (`least`). Times are rough on a machine that does other work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.applications.__main__ import CASES
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

WORKER = "benchmarks.offload.verdicts_worker"
OUTPUT = "benchmarks/results/offload_verdicts_cpu.json"
SHARES = (65, 50, 40)  # percent of the plain peak
TINY = {"image": 48, "batch": 2}
MIB = 1 << 20
CLOSE = {"peak": 5, "time": 10}  # percent that a prediction may differ


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the table. Returns 1 if a network failed."""
    parser = command_line("offload.verdicts", __doc__, OUTPUT)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="budgets, percent of the plain peak")
    parser.add_argument("--batch", type=int, default=8, help="images of a batch (8)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one network (900)")
    parser.add_argument("--tiny", action="store_true", help="48 x 48 pixels, two images")
    parser.set_defaults(total_seconds=1e6)
    options, cases = asked(parser, arguments, [case for case in CASES if case.run], table)
    if not cases:
        return 0
    results, failed = begun(options), 0
    for case in waiting(cases, results, options):
        size = TINY if options.tiny else {"image": case.image, "batch": options.batch}
        row = measured({**asdict(case), **size}, options.shares, options.timeout)
        results["cases"][case.name] = row
        save(results, options.output)
        print("\n".join(lines(case.name, row)), flush=True)
        failed += any(found["status"] not in ("ok", "refused") for found in (row, *row["shares_of_peak"].values()))
    print("\n".join(table(results["cases"])))
    return 1 if failed else 0


def measured(task: Mapping[str, Any], shares: Sequence[int], timeout: float) -> dict[str, Any]:
    """The row of one network: as it is, and under each share of the peak that it has then."""
    plain = in_process(WORKER, {**task, "budget": 0}, timeout)
    found = {}
    for share in shares if plain["status"] == "ok" else ():
        found[str(share)] = in_process(WORKER, {**task, "budget": plain["peak"] * share // 100}, timeout)
    return {**plain, "shares_of_peak": found}


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results for people, in Markdown; sizes in MiB, times in milliseconds."""
    found = [
        "| network | budget | peak predicted / measured | step predicted / measured | of plain's rate | losses |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        found += lines(name, row)
    return [*found, "", *summary(rows)]


def lines(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    """The rows of one network."""
    if row["status"] != "ok":
        yield f"| {name} | | {row['status']}: {' '.join(row.get('message', '').split())[-60:]} | | | |"
        return
    estimate = f"{row['estimate'] / MIB:.1f} / {row['peak'] / MIB:.1f} ({_off(row['estimate'], row['peak'])})"
    repeats = "repeat" if row["losses"] == row["again"] else f"repeat to {apart(row['losses'], row['again'])}"
    yield f"| {name} | none | {estimate}, before it ran | {1e3 * row['seconds']:.0f} | | {repeats} |"
    for share, found in row["shares_of_peak"].items():
        if found["status"] == "refused":
            right = "" if found["least"] > found["budget"] else ", WRONGLY"
            yield f"| | {share}% | refused{right}: an op needs {found['least'] / MIB:.1f} | | | |"
        elif found["status"] != "ok":
            yield f"| | {share}% | {found['status']}: {' '.join(found['message'].split())[-60:]} | | | |"
        else:
            over = " OVER" if found["peak"] > found["budget"] else ""
            peak = f"{found['peak_predicted'] / MIB:.1f} / {found['peak'] / MIB:.1f}"
            time = f"{1e3 * found['seconds_predicted']:.0f} / {1e3 * found['seconds']:.0f}"
            equal = "equal" if found["losses"] == row["losses"] else f"to {apart(found['losses'], row['losses'])}"
            yield (
                f"| | {share}% | {peak} ({_off(found['peak_predicted'], found['peak'])}){over} | {time} "
                f"({_off(found['seconds_predicted'], found['seconds'])}) | "
                f"{row['seconds'] / found['seconds']:.2f} | {equal} |"
            )


def summary(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How many predictions are as close as they have to be."""
    done = [row for row in rows.values() if row["status"] == "ok"]
    budgets = [found for row in done for found in row["shares_of_peak"].values()]
    ran = [found for found in budgets if found["status"] == "ok"]
    refused = [found for found in budgets if found["status"] == "refused"]
    if not ran:
        return
    peaks = sum(abs(found["peak_predicted"] / found["peak"] - 1) <= CLOSE["peak"] / 100 for found in ran)
    times = sum(abs(found["seconds_predicted"] / found["seconds"] - 1) <= CLOSE["time"] / 100 for found in ran)
    over = sum(found["peak"] > found["budget"] for found in ran)
    wrong = sum(found["least"] <= found["budget"] for found in refused)
    yield f"- {len(done)} networks, {len(ran)} budgets that ran, {over} of them over budget."
    yield f"- {len(refused)} budgets refused, {wrong} of them although the tensors of each op fit."
    yield f"- Peaks within {CLOSE['peak']}%: {peaks} of {len(ran)}; times within {CLOSE['time']}%: {times}."


def apart(one: list[float], other: list[float]) -> str:
    """The largest relative difference of two lists of losses."""
    return f"{max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(one, other, strict=True)):.0e}"


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f}%"


if __name__ == "__main__":
    sys.exit(main())
