"""Writes a sample of the offload and recurrent benchmarks, run at a later commit, into docs/benchmarks.md.

    python -m benchmarks.sample

The tables of docs/benchmarks_offload.md and docs/benchmarks_recurrent.md are of older commits. Here some of their cases
stand beside them: ratios to a peer of the same run, so that cards and hosts may differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.offload.tables import table, write
from benchmarks.records import ROOT
from benchmarks.recurrent.cases import fastest
from benchmarks.runs import command_line, existing

MARKERS = ("<!-- sample: begin -->", "<!-- sample: end -->")
RESULTS = ROOT / "benchmarks" / "results"
OFFLOAD = "vgg19/oracle"  # the peer of offload: the step without a cap
Results = Mapping[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Read results, replace what is between the markers."""
    parser = command_line("sample", __doc__)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args(arguments)
    names = ("offload", "recurrent", "recurrent_keras")
    samples = [existing(parser, RESULTS / f"{name}_sample_h100.json") for name in names]
    before = [existing(parser, RESULTS / f"{name}_h200.json") for name in names]
    write(options.document, tables(samples, before), MARKERS)
    return 0


def tables(samples: list[Results], before: list[Results]) -> str:
    """One table: offload, recurrent kernels, Keras layers, each in the order of the sample's cases."""
    header = ("benchmark", "case", "peer", "peer, ms", "tfmem, ms", "ratio", "ratio in the older tables", "commit")
    rows = []
    for name, sample, old, reader in zip(
        ("offload", "recurrent", "recurrent.keras"), samples, before, (offloaded, kernel, layer), strict=True
    ):
        for case in sample["cases"]:
            if found := reader(sample, case):
                peer, peer_ms, ours = found
                then = reader(old, case, peer)
                rows.append(
                    (
                        *(f"`{name}`", case, peer, f"{peer_ms:.3f}", f"{ours:.3f}" if ours else "infeasible"),
                        *(f"{peer_ms / ours:.2f}" if ours else "-", f"{then[1] / then[2]:.2f}" if then else "-"),
                        sample["cases"][case].get("commit", sample["machine"]["commit"]),
                    )
                )
    gpu = samples[0]["machine"]["gpus"][0].partition(",")[0]
    of = before[0]["machine"]["gpus"][0].partition(",")[0]
    return f"Sample: {gpu}. Older tables: {of}.\n{table('', header, rows)}"


def offloaded(results: Results, case: str, peer: str = "") -> tuple[str, float, float | None] | None:
    """The uncapped step, and tfmem's under a cap; None for what is not tfmem's or did not run."""
    outcome, oracle = results["cases"].get(case, {}), results["cases"][OFFLOAD]
    if not case.endswith(("/tfmem", "/hybrid")) or outcome.get("status") not in ("ok", "infeasible"):
        return None
    ours = outcome.get("median_seconds")
    return "uncapped TensorFlow", 1e3 * oracle["median_seconds"], 1e3 * ours if ours else None


def kernel(results: Results, case: str, peer: str = "") -> tuple[str, float, float] | None:
    """A peer, the fastest in float32 if none is named, and ours; both without TF32."""
    systems = results["cases"].get(case, {}).get("systems", {})
    of_peer = {name: found for name, found in systems.items() if peer in name}
    found, ours = fastest(of_peer, tfmem=False, tf32=False), fastest(systems, tfmem=True)
    return (found[0], found[1], ours[1]) if found and ours else None


def layer(results: Results, case: str, peer: str = "") -> tuple[str, float, float] | None:
    """The Keras layer and its replacement."""
    outcome = results["cases"].get(case, {})
    return ("Keras", outcome["before"], outcome["after"]) if outcome.get("status") == "ok" else None


if __name__ == "__main__":
    sys.exit(main())
