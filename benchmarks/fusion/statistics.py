r"""The fused kernels of each workload's step: the paper's Table 4 and Figure 6, planned for an H200 without one.

    python -m benchmarks.fusion.statistics --output benchmarks/results/fusion_statistics.json
    python -m benchmarks.fusion.statistics --table benchmarks/results/fusion_statistics.json \
        --document docs/benchmarks_fusion.md

All is by model, as with `tune="off"`: which ops are kernels, and the template of each. Nothing is compiled or run.
Only the fusion pass plans; Grappler's remapper is off, as in `benchmarks.fusion`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fusion.cases import OTHERS, TEN
from benchmarks.fusion.composition import SCOPES, composition, packed, statistics
from benchmarks.fusion.published import TABLE_4
from benchmarks.offload.tables import table as markdown
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, load, save
from custom_ops.errors import KernelError
from custom_ops.fusion import programs
from custom_ops.fusion.codegen.kernel import FusionKernel
from custom_ops.fusion.codegen.plan import shared
from custom_ops.fusion.search.kernel_model import h200, predict
from graph_passes.analysis.op_pattern import REDUCTIONS, OpPattern, patterns_of
from graph_passes.graph.ir import Graph
from graph_passes.passes.fuse.partition.partition import RegionStep
from graph_passes.passes.fuse.plan import FusionPlan, RegionPlan

MARKERS = ("<!-- fusion statistics: begin -->", "<!-- fusion statistics: end -->")
PRODUCTS = frozenset({OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT})
FOUND_BY = ("substitution", "exploration", "alone")
CATEGORIES = ("elementwise", "reduction", "product")  # the paper's, of which a pattern is one


class Planned(NamedTuple):
    """A kernel, the shapes of the tensors that it was chosen for, and the step of the plan."""

    kernel: FusionKernel
    shapes: programs.Shapes
    step: RegionStep


def main(arguments: list[str] | None = None) -> int:
    """Plan and write, or print the tables of what was written. Returns 1 if a workload has no kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.statistics", description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    parser.add_argument("--only", nargs="+", choices=(*TEN, *OTHERS), default=list(TEN), help="workloads (the ten)")
    parser.add_argument("--table", type=Path, help="results to make tables of, and plan nothing")
    parser.add_argument("--document", type=Path, help="a page to put the tables in, between two markers")
    options = parser.parse_args(arguments)
    results = load(options.table) or {"format": FORMAT, "device": "NVIDIA H200", "cases": {}}
    if not options.table:
        for name in options.only:
            results["cases"][name] = planned(name)
            print(f"{name}: {results['cases'][name]}", flush=True)
        if options.output:
            save(results, options.output)
    print(tables(results))
    if options.document:
        write(options.document, tables(results), MARKERS)
    return 0 if all(case["kernels"] for case in results["cases"].values()) else 1


def planned(name: str) -> dict[str, Any]:
    """The statistics of a workload."""
    stitching, graph = stitched(name)
    found: list[Planned] = []
    lost: list[str] = [region.reason for region in stitching.kept]
    for region in stitching.regions:
        try:
            found += kernels_of(region)
        except KernelError as error:  # on a GPU the region would run unfused
            lost.append(str(error))
    return {
        "regions": len(stitching.regions),
        "ops": sum(len(region.schedule.members) for region in stitching.regions),
        "kernels": len(found),
        "different": len({id(each.kernel) for each in found}),
        "calls": sum(region.record.count("call") for region in stitching.regions),
        "lost": lost,
        "shared": of_shared_memory(found),
        "composition": of_patterns(found, graph),
    }


def stitched(name: str) -> tuple[FusionPlan, Graph]:
    """What the fusion pass makes of a workload's step on an H200, and the step's graph after Grappler."""
    from benchmarks.fusion.workloads import make  # TensorFlow is imported here
    from graph_passes.analysis.cost.device_costs import kernel_device, load
    from graph_passes.analysis.device_support import CUDA
    from graph_passes.graph import serde
    from graph_passes.passes.fuse.partition.partition import ON_GPU
    from graph_passes.passes.fuse.plan import Needs, plan_fusion
    from tfmem.capture.captured_source import CapturedSource
    from tfmem.capture.concrete_function import capture_concrete
    from tfmem.capture.grappler import run_grappler
    from tfmem.kernels.fusion_needs import HOME

    device = kernel_device(load("h200"), "NVIDIA H200")
    workload = make(name)
    with without_remapper():
        traced = workload.step.get_concrete_function(*workload.inputs)
        optimized = run_grappler(capture_concrete(traced), device="GPU")
    # What was traced here says of variables that they lie on the CPU, and nothing of other nodes: all is one device.
    return plan_fusion(CapturedSource(optimized), Needs(device, HOME, serde.attributes, ON_GPU, capabilities=CUDA))


@contextmanager
def without_remapper() -> Iterator[None]:
    """Grappler's remapper is off in this context."""
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": before})


def kernels_of(region: RegionPlan) -> list[Planned]:
    """The kernels of a region."""
    step_of = {name: step for step in region.schedule.steps for name in step.members}
    values = region.lowered.region.values
    return [
        Planned(kernel, programs.typical([values[value].shape for value in found.inputs]), step_of[found.members[0]])
        for kernel, found in programs.kernels(region.lowered.region, programs.by_model(h200().processors))
    ]


def of_shared_memory(kernels: Sequence[Planned]) -> dict[str, float]:
    """A row of Table 4: the share of kernels that use shared memory, and of their time by the model; bytes."""
    row = statistics([each.kernel.plan for each in kernels])
    times = [predict(each.kernel, each.shapes, h200()) for each in kernels]
    using = [time for each, time in zip(kernels, times, strict=True) if shared.shared_bytes(each.kernel.plan)]
    return {
        "patterns": row.patterns,
        "time": sum(using) / sum(times) if times else 0.0,
        "average": row.average,
        "largest": row.largest,
        "unshared": row.unshared,
        "allocated": row.allocated,
    }


def of_patterns(kernels: Sequence[Planned], graph: Graph) -> dict[str, int]:
    """How many kernels are what, for Figure 6."""
    known = patterns_of(graph)
    counts = Counter[str](dict.fromkeys((*FOUND_BY, *CATEGORIES, "packed", *SCOPES), 0))
    for each in kernels:
        kinds = {known[name].pattern for name in each.step.members}
        counts["exploration" if each.step.explored else "substitution" if each.step.saves else "alone"] += 1
        counts["product" if kinds & PRODUCTS else "reduction" if kinds & REDUCTIONS else "elementwise"] += 1
        counts["packed"] += packed(each.kernel.plan.pattern) > 1
        counts[composition(each.kernel.plan)] += 1
    return dict(counts)


def tables(results: Mapping[str, Any]) -> str:
    """Both tables."""
    cases = results["cases"]
    return f"{shared_memory(cases)}\n\n{patterns(cases)}"


def shared_memory(cases: Mapping[str, Any]) -> str:
    """The paper's Table 4, and its numbers."""
    header = ("workload", "kernels", "that use it", "their share of the time", "average, KB", "largest, KB")
    header += (
        "largest without sharing, KB",
        "allocated / requested",
        "paper: that use it",
        "average, KB",
        "largest, KB",
    )
    header += ("allocated / requested",)
    rows = []
    for name, case in cases.items():
        found, paper = case["shared"], TABLE_4.get(name)
        theirs = ("-",) * 4
        if paper:
            theirs = (f"{paper.patterns:.0%}", f"{paper.average:g}", f"{paper.largest:g}", f"{paper.allocated:.2f}")
        sizes = (f"{found[key] / 1024:.1f}" for key in ("average", "largest", "unshared"))
        shares = (f"{found[key]:.0%}" for key in ("patterns", "time"))
        rows.append((name, str(case["kernels"]), *shares, *sizes, f"{found['allocated']:.2f}", *theirs))
    return markdown("### Table 4: shared memory of the kernels", header, rows)


def patterns(cases: Mapping[str, Any]) -> str:
    """The paper's Figure 6, and what else kernels are made of."""
    columns = (*CATEGORIES, *FOUND_BY, "packed", *SCOPES)
    header = ("workload", "regions", "ops in them", "kernels", "different ones", "product calls", *columns)
    rows = [
        (
            name,
            *(str(case[key]) for key in ("regions", "ops", "kernels", "different", "calls")),
            *(str(case["composition"][key]) for key in columns),
        )
        for name, case in cases.items()
    ]
    return markdown("### Figure 6: what patterns are made of", header, rows)


if __name__ == "__main__":
    sys.exit(main())
