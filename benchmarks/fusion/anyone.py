"""Networks that no other benchmark has: how long tfmem takes to decide, what steps take meanwhile, and afterwards.

    python -m benchmarks.fusion.anyone --only gpt mixer --output benchmarks/results/fusion_anyone_h100.json
    python -m benchmarks.fusion.anyone --table benchmarks/results/fusion_anyone_h100.json

Each network has a separate process and an empty cache. Times are those of a process whose libraries are loaded: what
TensorFlow, XLA and tfmem load once is not in them. A step ends when its loss is on the host."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

WORKER = "benchmarks.fusion.any_net"
# with what each is written after
NETS = {
    "gpt": "Keras's example 'GPT text generation from scratch', pre-norm as GPT-2; 6 blocks",
    "mixer": "Keras's example 'Image classification with modern MLP models': MLP-Mixer; 6 blocks",
    "wide_deep": "Cheng et al., 'Wide & Deep Learning for Recommender Systems'; 26 embeddings",
    "tabular": "Keras's example 'Classification with Gated Residual and Variable Selection Networks', in Dense layers",
    "vit": "Keras's example 'Image classification with Vision Transformer'; 8 blocks",
    "efficientnet": "keras.applications.EfficientNetB0",
    "lstm": "Keras's guide 'Working with RNNs': a language model of two LSTM layers",
    "tab_transformer": "Keras's example 'Structured data learning with TabTransformer'; 3 blocks",
    "dlrm": "Naumov et al., 'Deep Learning Recommendation Model'; 8 embeddings",
    "two_tower": "Keras Recommenders' example 'Retrieval with two towers'",
    "nerf": "Keras's example '3D volumetric rendering with NeRF': its MLP",
    "autoencoder": "Keras's example 'Variational AutoEncoder', in Dense layers",
    "gpt_inference": "the model of `gpt`, in inference",
    "vit_inference": "the model of `vit`, in inference",
}
# of `workloads/public*.py`, which `benchmarks.fusion.coverage` tells about as well
PUBLIC = (
    *("bert", "gemma", "t5", "graph_convolution", "proximal_policy", "wgan_gp", "diffusion", "u_net"),
    *("xception", "resnet50", "mobilenet_v3"),
)


@dataclass(frozen=True)
class Case:
    """A network.

    Attributes:
        name: of its row in the results.
    """

    name: str

    @property
    def workload(self) -> str:
        """What `workloads.make` takes."""
        return f"{'public' if self.name in PUBLIC else 'anyone'}/{self.name}"


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the table. Returns 1 if a network failed."""
    parser = command_line("fusion.anyone", __doc__, "fusion_anyone.json")
    parser.add_argument("--settle", type=float, default=40, help="seconds to wait at most until tfmem has decided (40)")
    parser.add_argument("--afterwards", type=float, default=40, help="the same, until kernels are tuned (40)")
    parser.add_argument("--no-xla", action="store_true", help="do not measure XLA")
    parser.add_argument("--warm", action="store_true", help="a second process, which finds the cache of the first")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network (300)")
    parser.set_defaults(total_seconds=330)
    options, cases = asked(parser, arguments, [Case(name) for name in (*NETS, *PUBLIC)], lines)
    if not cases:
        return 0
    results, failed = begun(options), 0
    for case in waiting(cases, results, options):
        task = {
            "workload": case.workload,
            "settle": options.settle,
            "afterwards": options.afterwards,
            "xla": not options.no_xla,
            "remapper": True,
            "tf32": True,
            "deterministic": False,
        }
        with tempfile.TemporaryDirectory() as cache:
            found = {case.name: in_process(WORKER, task, options.timeout, TFMEM_CACHE_DIR=cache)}
            if options.warm:
                again = in_process(WORKER, {**task, "xla": False}, options.timeout, TFMEM_CACHE_DIR=cache)
                found[f"{case.name}, warm"] = again
        results["cases"] |= found
        save(results, options.output)
        print("\n".join(lines(found)[1:]), flush=True)
        failed += any(outcome["status"] != "ok" for outcome in found.values())
    print("\n".join(lines(results["cases"])))
    print(
        f"{', '.join(results['machine']['gpus']) or results['machine']['cpu']}, commit {results['machine']['commit']}"
    )
    return 1 if failed else 0


TITLES = (
    *(
        "net",
        "decided, s",
        "tuned after, s",
        "XLA's first, s",
        "slowest call, ms",
        "mean step until decided, ms",
        "plain, ms",
    ),
    *("XLA, ms", "tfmem, ms", "over plain", "over XLA", "regions", "ops inside", "ops outside", "runs", "commit"),
    "longest phases, s",
)


def lines(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table, as lines of text."""
    rows = [TITLES, *(_row(name, case) for name, case in cases.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(name: str, case: Mapping[str, Any]) -> tuple[str, ...]:
    if case["status"] != "ok":
        return (name, case.get("message", case["status"])[:60], *["-"] * (len(TITLES) - 2))
    systems = case["systems"]
    plain, xla, ours = (systems.get(each, {}) for each in ("graph", "jit_compile", "tfmem"))

    def over(other: Mapping[str, Any]) -> str:
        return f"{other['ms'] / ours['ms']:.2f}" if "ms" in other else "-"

    return (
        name,
        "-" if case["decided"] is None else f"{case['decided']:.1f}",
        "-" if case.get("tuned") is None else f"{case['tuned']:.1f}",
        f"{xla['first']:.1f}" if "first" in xla else xla.get("status", "-"),
        f"{case['slowest_ms']:.0f}",
        "-" if case["mean_ms"] is None else f"{case['mean_ms']:.2f}",
        *(f"{each['ms']:.3f}" if "ms" in each else "-" for each in (plain, xla, ours)),
        over(plain),
        over(xla),
        *(str(case[key]) for key in ("regions", "inside", "outside")),
        "XLA" if case.get("xla_runs") else "stitched" if case["stitched"] else "plain",
        case["commit"],
        ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in longest(case.get("phases", {}))) or "-",
    )


def longest(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    """The three phases in which a step spent most seconds until its decision."""
    return sorted(phases.items(), key=lambda phase: -phase[1])[:3]


if __name__ == "__main__":
    sys.exit(main())
