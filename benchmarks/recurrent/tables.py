"""Writes the recurrent benchmarks' results into docs/benchmarks_recurrent.md, between two markers.

python -m benchmarks.recurrent.tables benchmarks/results/recurrent_h200.json"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from math import exp, inf, log
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.offload.tables import table, write
from benchmarks.records import ROOT, load
from benchmarks.recurrent import options as recurrent_options
from benchmarks.recurrent.cases import LARGE, LONG, TOP, WITHOUT_TF32, Floor, fastest, kernel_in_words
from benchmarks.runs import command_line, existing

MARKERS = ("<!-- recurrent: begin -->", "<!-- recurrent: end -->")

Cases = Mapping[str, Mapping[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Read results, replace what is between the markers."""
    parser = command_line("recurrent.tables", __doc__)
    parser.add_argument("results", type=Path, help="what benchmarks.recurrent wrote")
    parser.add_argument("--search", type=Path, help="what benchmarks.recurrent.search wrote")
    parser.add_argument("--keras", type=Path, help="what benchmarks.recurrent.keras wrote")
    parser.add_argument("--cpu", type=Path, help="the same, on a CPU")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks_recurrent.md")
    options = parser.parse_args(arguments)
    results = existing(parser, options.results)
    written = tables(results, load(options.search), load(options.keras), load(options.cpu))
    write(options.document, written, MARKERS)
    return 0


def tables(
    results: Mapping[str, Any],
    search: Mapping[str, Any] | None = None,
    keras: Mapping[str, Any] | None = None,
    cpu: Mapping[str, Any] | None = None,
) -> str:
    """Every table that there are results for."""
    every: Cases = results["cases"]
    large = {name: case for name, case in every.items() if case["units"] in LARGE}
    long = {name: case for name, case in every.items() if case["steps"] == LONG}
    cases = {name: case for name, case in every.items() if name not in large | long}
    parts = [machine(results)]
    for title, prefix in (
        ("LSTM against cuDNN", "lstm/"),
        ("Canonical GRU (`reset_after=False`) against loops", "canonical_gru/"),
        ("GRU (`reset_after=True`) against cuDNN", "gru/"),
        ("LSTM, training step", "train/lstm/"),
        ("GRU, training step", "train/gru/"),
        ("GRNN's models: 3 layers of 128 over 100 steps, 2 layers of 256 over 20", "stack"),
    ):
        parts += compared(cases, prefix, title)
    parts += compared(large, "lstm/", "LSTM whose weights no chip holds, against cuDNN")
    parts += compared(long, "lstm/", f"LSTM of {LONG:,} steps, against cuDNN")
    parts += precisions(cases | long) + split(cases)
    parts += accuracy(search) if search else []
    parts += recurrent_options.written(results, search)
    parts += end_to_end(keras["cases"]) if keras else []
    parts += on_a_cpu(cpu) if cpu else []
    return "\n\n".join(parts)


def machine(results: Mapping[str, Any]) -> str:
    """What the numbers depend on, in sentences."""
    about = results["machine"]
    gpu = about["gpus"][0] if about["gpus"] else "no GPU"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = (
        f"Machine: {gpu}; {about['cores']} x {about['cpu']}; Linux {about['kernel']}; Python {about['python']}.",
        f"Versions: {versions}.",
        "Milliseconds of one pass, medians, from an idle GPU; fp32; input size = hidden size, 100 steps, unless said.",
        "tfmem: fp32 accuracy, then with TF32 allowed; the product with the inputs included.",
        "Ours and peers: the faster of call by call and a CUDA graph's replay; the last comparison is call by call.",
        "Speed-up: against the peer left of it; of tfmem with TF32 where there is one, but against fp32 peers.",
        "Floor: all FMAs at the fp32 peak or all bytes once, whichever is longer, and barriers: 0.22 us, or 1.0 us.",
    )
    notes = (f"From `{name}`: {text}." for name, text in results.get("sources", {}).items())
    return "\n".join(f"- {line}" for line in (*lines, *notes))


def compared(cases: Cases, prefix: str, title: str) -> list[str]:
    """Ours and the fastest peers of each case: without TF32, with it, and with it call by call; and the means."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, list[float]] = {
        "Fp32": [], "TF32 allowed": [], "TF32 allowed, both call by call": [], "Fp32, both call by call": [],
    }  # fmt: skip
    for name, case in cases.items():
        if not name.startswith(prefix):
            continue
        systems = case["systems"]
        mine, rounded = fastest(systems, tfmem=True), fastest(systems, tfmem=True, tf32=True)
        pairs = (
            (mine, fastest(systems, tfmem=False, tf32=False)),
            (rounded or mine, fastest(systems, tfmem=False, tf32=True)),
            (
                fastest(systems, tfmem=True, kind="plain", tf32=rounded is not None),
                fastest(systems, tfmem=False, kind="plain"),
            ),
            (fastest(systems, tfmem=True, kind="plain"), fastest(systems, tfmem=False, kind="plain", tf32=False)),
        )
        peers = []
        for found, (ours, other) in zip(ratios.values(), pairs, strict=True):
            if ours and other:
                found.append(other[1] / ours[1])
            peers += [f"{other[1]:.3f} ({other[0]})" if other else "-", f"{found[-1]:.2f}x" if ours and other else "-"]
        floor = Floor(**case["floor"])
        rows.append(
            (
                str(case["units"]),
                str(case["batch"]),
                f"{mine[1]:.4f}" if mine else failure(case),
                *peers[:2],
                f"{rounded[1]:.4f}" if rounded else "-",
                *peers[2:6],
                f"{floor.total:.4f}",
                f"{floor.arithmetic:.4f} / {floor.memory:.4f} / {floor.barriers:.4f}",
                deviation(systems[mine[0]]) if mine else "-",
            )
        )
    if not rows:
        return []
    header = (
        "hidden", "batch", "tfmem fp32, ms", "fp32 peer, ms", "speed-up", "tfmem TF32, ms", "TF32 peer, ms", "speed-up",
        "peer call by call, ms", "speed-up, both call by call", "floor, ms", "FMAs / bytes / barriers", "error",
    )  # fmt: skip
    means = [
        f"{words}: geometric mean {mean(found):.2f}x, least {min(found):.2f}x."
        for words, found in ratios.items()
        if found
    ]
    return [table(f"### {title}", header, rows) + "\n\n" + " ".join(means)]


def deviation(outcome: Mapping[str, Any]) -> str:
    """The relative error against float64, if it was looked at in that run."""
    return "-" if outcome.get("error") is None else f"{outcome['error']:.1g}"


def failure(case: Mapping[str, Any]) -> str:
    """What became of ours."""
    return next(
        (outcome["status"] for name, outcome in case["systems"].items() if name.startswith("tfmem highest")), "-"
    )


def precisions(cases: Cases) -> list[str]:
    """Ours in each storage type, beside cuDNN's 16-bit ones."""
    names = ("tfmem highest", "tfmem tf32", "tfmem bfloat16", "tfmem float16", "cudnn bfloat16", "cudnn float16")
    rows = []
    for case in cases.values():
        if case["training"] or case["layer"] != "lstm" or case["layers"] > 1:
            continue
        cells = [best(case["systems"], name) for name in names]
        rows.append((str(case["units"]), str(case["batch"]), f"{case['steps']:,}", *cells))
    header = ("hidden", "batch", "steps", *names)
    return (
        [table("### Storage types, LSTM: milliseconds (relative error against float64)", header, rows)] if rows else []
    )


def best(systems: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The faster of a system's times, or what became of it; "-" where it was not run."""
    outcomes = [systems[key] for key in (f"{name}, plain", f"{name}, graph") if key in systems]
    times = [outcome for outcome in outcomes if outcome["status"] == "ok"]
    if times:
        least = min(times, key=lambda outcome: outcome["ms"])
        return f"{least['ms']:.4f} ({least['error']:.1g})"
    return outcomes[0]["status"] if outcomes else "-"


def split(cases: Cases) -> list[str]:
    """Where a step's time goes, by the model, beside what the whole step took."""
    rows = []
    for name, case in cases.items():
        kernels = case.get("kernels", {}).get("highest")
        if not kernels or case["training"] or case["layers"] > 1:
            continue
        kernel = kernels["kernels"][0]
        parts, chosen = kernel["parts"], kernel["configuration"]
        rows.append(
            (
                f"`{name}`",
                kernel_in_words(chosen),
                f"{kernel['nanoseconds'] / case['steps'] / 1e3:.2f}",
                f"{parts['synchronisation'] / 1e3:.2f}",
                f"{parts['load'] / 1e3:.2f}",
                f"{(parts['products'] + parts['reduction']) / 1e3:.2f}",
            )
        )
    header = ("case", "kernel", "measured", "hand-off", "exchange", "arithmetic")
    return [table("### One step, us: measured, and its parts by the model", header, rows)] if rows else []


def accuracy(results: Mapping[str, Any]) -> list[str]:
    """The model's first and first five against the fastest of all that were timed."""
    rows, firsts, fives = [], [], []
    for name, case in results["cases"].items():
        trials = case.get("kernels", {}).get("highest", {}).get("kernels", [{}])[0].get("trials", [])
        times = [measured for _, measured in sorted(map(rank_and_time, trials), key=itemgetter(0))]
        if len(times) <= TOP or min(times) == inf:
            continue
        firsts.append(times[0] / min(times))
        fives.append(min(times[:TOP]) / min(times))
        middle = sorted(times)[len(times) // 2]
        rows.append(
            (
                f"`{name}`",
                f"{len(times)} of {case['space']}" if "space" in case else str(len(times)),
                f"{min(times) / 1e6:.4f}",
                f"{middle / min(times):.2f}x",
                f"{firsts[-1] - 1:.1%}",
                f"{fives[-1] - 1:.1%}",
            )
        )
    if not rows:
        return []
    header = ("case", "configurations", "fastest, ms", "median", "top-1 is slower by", "top-5 is slower by")
    summary = (
        f"\n\nOn average: top-1 {mean(firsts) - 1:.1%}, top-{TOP} {mean(fives) - 1:.1%}; at most {max(firsts) - 1:.1%} "
        f"and {max(fives) - 1:.1%}."
    )
    notes = "".join(f" {text[0].upper()}{text[1:]}." for text in results.get("sources", {}).values())
    return [table("### The model against all configurations that were timed", header, rows) + summary + notes]


def rank_and_time(trial: str) -> tuple[float, float]:
    """The place that the model gave a trial, and the nanoseconds that were measured; see `search.short`."""
    rank, _, measured = trial.split()[:3]
    return float(rank), float(measured)


def end_to_end(cases: Cases) -> list[str]:
    """The Keras layer before and after `tfmem.optimize`, a pass and a training step, with TF32 and without."""
    parts = []
    for title, training in (
        ("The same Keras layer before and after, end to end", False),
        ("A Keras training step before and after, end to end: forward, backward, SGD", True),
    ):
        for ending, exact in ((" (TF32 allowed, TensorFlow's default)", False), (", without TF32", True)):
            chosen = {
                name: case
                for name, case in cases.items()
                if name.startswith("train/") == training and name.endswith(WITHOUT_TF32) == exact
            }
            parts += before_and_after(chosen, f"### {title}{ending}")
    return parts


def before_and_after(cases: Cases, title: str) -> list[str]:
    """One table, and the means: of all, and of each family if there are several."""
    rows, families = [], dict[str, list[float]]()
    for name, case in cases.items():
        if case["status"] != "ok":
            rows.append((f"`{name}`", "-", "-", case["status"], "-"))
            continue
        ratio = case["before"] / case["after"]
        families.setdefault(family(name), []).append(ratio)
        rows.append(
            (f"`{name}`", f"{case['before']:.3f}", f"{case['after']:.3f}", f"{ratio:.2f}x", f"{case['error']:.1g}")
        )
    if not rows:
        return []
    means = {"": [ratio for ratios in families.values() for ratio in ratios]}
    means |= {f" of `{name}`": ratios for name, ratios in families.items() if len(families) > 1}
    sentences = [
        f"Geometric mean{name} {mean(ratios):.2f}x, least {min(ratios):.2f}x."
        for name, ratios in means.items()
        if ratios
    ]
    header = ("case", "Keras, ms", "optimised, ms", "speed-up", "difference")
    return [table(title, header, rows) + "\n\n" * bool(sentences) + " ".join(sentences)]


def family(name: str) -> str:
    """`train/lstm` of `train/lstm/256/10`."""
    return "/".join(word for word in name.removesuffix(WITHOUT_TF32).split("/") if not word.isdigit())


def on_a_cpu(results: Mapping[str, Any]) -> list[str]:
    """The Keras layer before and after on a CPU."""
    about = results["machine"]
    return before_and_after(
        results["cases"], f"### A Keras layer before and after on {about['cores']} cores ({about['cpu']}), float32"
    )


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))


if __name__ == "__main__":
    sys.exit(main())
