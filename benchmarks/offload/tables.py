"""Writes the offload benchmark's results into docs/benchmarks_offload.md, between two markers.

python -m benchmarks.offload.tables benchmarks/results/offload_h200.json"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.offload.cases import NORMALISED
from benchmarks.records import ROOT
from benchmarks.runs import command_line, existing

BEGIN, END = "<!-- offload: begin -->", "<!-- offload: end -->"
GIB = 1 << 30

POLICIES = (("tfmem", "autovm"), ("hybrid", "hybrid"))  # the last part of a case's name, and what it runs

Cases = Mapping[str, Mapping[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Read results, replace what is between the markers."""
    parser = command_line("offload.tables", __doc__)
    parser.add_argument("results", type=Path, help="what benchmarks.offload wrote")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks_offload.md")
    options = parser.parse_args(arguments)
    write(options.document, tables(existing(parser, options.results)))
    return 0


def write(document: Path, tables: str, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Put `tables` between the markers of a file, which is made if it is not there."""
    text = document.read_text() if document.exists() else "# Benchmarks\n"
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(replaced(text, tables, markers))


def replaced(document: str, tables: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """`document` with what is between the markers replaced; they are appended if it has none.

    Raises:
        ValueError: the document has one marker without the other.
    """
    first, last = markers
    block = f"{first}\n{tables}\n{last}"
    if first not in document and last not in document:
        return f"{document.rstrip()}\n\n{block}\n"
    head, begin, rest = document.partition(first)
    _, end, tail = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"the document needs both markers, {first} and then {last}")
    return f"{head}{block}{tail}"


def tables(results: Mapping[str, Any]) -> str:
    """Every table that the results have cases for."""
    cases = results["cases"]
    parts = [machine(results), *link(cases)]
    for network, title in (
        ("vgg19", "VGG-19"),
        ("resnet152", "ResNet-152"),
        ("alexnet", "AlexNet"),
    ):
        parts += by_memory(cases, network, title)
    parts += headline(cases) + parity(cases)
    return "\n\n".join(parts)


def machine(results: Mapping[str, Any]) -> str:
    """What the numbers depend on, in sentences."""
    about = results["machine"]
    ran = next((case for case in results["cases"].values() if "versions" in case), {})
    gpu = about["gpus"][0] if about["gpus"] else "no GPU"
    versions = ", ".join(f"{name} {number}" for name, number in ran.get("versions", {}).items())
    flags = " ".join(f"{name}={value}" for name, value in about["environment"].items()) or "none"
    float32 = "on" if ran.get("tensor_float_32") else "off"
    cpu = f"{about['cores']} x {about['cpu']}; Linux {about['kernel']}"
    steps = f"{ran.get('steps', '-')} timed after {ran.get('warm_up', '-')} of warm-up"
    lines = (
        f"Machine: {gpu} ({about['gpu_fields']}); {cpu}.",
        f"Versions: Python {about['python']}, {versions}.",
        f"Flags: XLA off (jit_compile=False) on both sides; TF32 {float32}; environment: {flags}.",
        f"Steps: {steps}; the median, each ending with its loss on the host.",
        "Every case in a separate process.",
    )
    return "\n".join(f"- {line}" for line in lines)


def link(cases: Cases) -> list[str]:
    """The link's bandwidth, GiB/s."""
    measured = cases.get("link", {}).get("bandwidth")
    if not measured:
        return []
    rows = [
        ("one direction at a time", measured["to_host"], measured["to_device"]),
        ("both at once", measured["both_to_host"], measured["both_to_device"]),
    ]
    cells = [(name, f"{out / GIB:.1f}", f"{into / GIB:.1f}") for name, out, into in rows]
    return [table("### Link to the host, GiB/s", ("", "out of the GPU", "into the GPU"), cells)]


def by_memory(cases: Cases, network: str, title: str) -> list[str]:
    """One network at each normalised memory: the thesis's Table 6.2, with times."""
    oracle = cases.get(f"{network}/oracle", {})
    if oracle.get("status") != "ok":
        return []
    rows = []
    for normalised in NORMALISED:
        plain = cases.get(f"{network}/{normalised}/plain", {})
        found = [(policy, cases.get(f"{network}/{normalised}/{name}", {})) for name, policy in POLICIES]
        for policy, tfmem in [each for each in found if each[1]] or ([("-", {})] if plain else []):
            cap = (tfmem or plain)["cap"]
            rows.append((f"{normalised:g}", gib(cap), policy, *compared(cases, plain, tfmem, oracle)))
    if not rows:
        return []
    batch, peak = oracle["batch"], gib(oracle["peak"])
    heading = f"### {title}, batch {batch}\n\nUncapped: {milliseconds(oracle)} ms a step, {peak} GiB."
    return [table(heading, ("N_m", "cap, GiB", "policy", *COMPARED), rows)]


COMPARED = (
    "plain TF, ms",
    "tfmem, ms",
    "speed-up",
    "of oracle's speed",
    "moved out / in, GiB",
    "stall, ms",
    "floor, ms",
    "peak, GiB (planned)",
)


def compared(
    cases: Cases, plain: Mapping[str, Any], tfmem: Mapping[str, Any], oracle: Mapping[str, Any]
) -> tuple[str, ...]:
    """The cells of `COMPARED`.

    The floor is what no schedule can beat: the oracle's step, or the bytes over the link.
    """
    both = plain.get("status") == tfmem.get("status") == "ok"
    faster = f"{plain['median_seconds'] / tfmem['median_seconds']:.2f}x" if both else "-"
    if tfmem.get("status") != "ok":
        return (milliseconds(plain), milliseconds(tfmem), faster, *["-"] * 5)
    report = tfmem["report"]
    return (
        milliseconds(plain),
        milliseconds(tfmem),
        faster,
        f"{oracle['median_seconds'] / tfmem['median_seconds']:.0%}",
        f"{gib(tfmem['bytes_out'])} / {gib(tfmem['bytes_in'])}",
        f"{tfmem['stall_ns'] / 1e6:.1f}",
        f"{1e3 * floor(cases, tfmem, oracle):.0f}",
        f"{gib(tfmem['peak'])} ({gib(report['peak_predicted'])})",
    )


def floor(cases: Cases, tfmem: Mapping[str, Any], oracle: Mapping[str, Any]) -> float:
    """Seconds of a step with perfect overlap: the longer of compute and copies."""
    bandwidth = cases.get("link", {}).get("bandwidth")
    copies = []
    if bandwidth:
        copies = [
            tfmem["bytes_out"] / bandwidth["to_host"],
            tfmem["bytes_in"] / bandwidth["to_device"],
        ]
    return max(oracle["median_seconds"], *copies, 0.0)


def headline(cases: Cases) -> list[str]:
    """VGG-19 under one cap, written in three ways."""
    rows = []
    for form, words in (
        ("graph", "`tf.compat.v1` graph (Listing 6.1)"),
        ("function", "`tf.function`"),
        ("keras", "Keras `train_on_batch`"),
    ):
        plain = cases.get(f"vgg19/19.5GiB/{form}/plain", {})
        own = cases.get(f"vgg19/{form}/oracle", {})
        oracle = own if own.get("status") == "ok" else cases.get("vgg19/oracle", {})
        for name, policy in POLICIES:
            tfmem = cases.get(f"vgg19/19.5GiB/{form}/{name}", {})
            if tfmem and oracle.get("status") == "ok":
                rows.append((words, policy, *compared(cases, plain, tfmem, oracle)))
    if not rows:
        return []
    header = ("step written as", "policy", *COMPARED)
    return [table("### VGG-19, batch 256, in 19.5 GiB", header, rows)]


def parity(cases: Cases) -> list[str]:
    """How far losses of each tfmem case are from the uncapped run's, over the same steps."""
    rows = []
    for name, case in cases.items():
        if case.get("system") != "tfmem" or case.get("status") != "ok":
            continue
        if case["deterministic"]:
            other = cases.get(f"{name.rpartition('/')[0]}/plain", {})
        elif case["form"] != "function":  # draws its own weights
            other = cases.get(f"{case['network']}/{case['form']}/oracle", {})
        else:
            other = cases.get(f"{case['network']}/oracle", {})
        if other.get("status") != "ok":
            continue
        pairs = list(zip(case["losses"], other["losses"], strict=False))
        difference = max(abs(one - two) / max(abs(two), 1e-12) for one, two in pairs)
        equal = "yes" if all(one == two for one, two in pairs) else "no"
        pinned = "on" if case["deterministic"] else "off"
        rows.append((f"`{name}`", pinned, str(len(pairs)), equal, f"{difference:.2g}"))
    header = ("case", "op determinism", "steps", "bit-equal", "max relative difference")
    return [table("### Losses against the uncapped run", header, rows)] if rows else []


def milliseconds(case: Mapping[str, Any]) -> str:
    """The median step, or what came of it."""
    status = case.get("status", "-")
    return f"{1e3 * case['median_seconds']:.0f}" if status == "ok" else status.replace("oom", "OOM")


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.2f}"


def table(heading: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading and a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return heading + "\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
