"""How long the largest graph of FusionStitching takes to be planned, and what a far longer search finds.

    python -m benchmarks.fusion.planning --output benchmarks/results/fusion_planning.json

The graph is one of 27,428 ops (`generated.py`). It is planned as `tfmem.optimize` plans, and with 16 times as many
patterns from each seed, ten times as many in all, beside runs of any size, and 300 s for the integer program without a
gap. By model alone, as with `tune="off"`. Seconds are of the process: those of the wall are in the results as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fusion.generated import OPS, dialogue
from benchmarks.records import machine
from graph_passes.analysis.cost import device_costs
from graph_passes.analysis.op_pattern import patterns_of
from graph_passes.graph.ir import Graph
from graph_passes.lower.lower_nodes import Lowering
from graph_passes.lower.shapes import Shapes
from graph_passes.passes.fuse.partition.explore import Exploration
from graph_passes.passes.fuse.partition.ilp import Limits
from graph_passes.passes.fuse.partition.partition import partition_graph
from graph_passes.passes.fuse.plan import refusal

LONG = Limits(gap=0.0, nodes=10**7, rounds=300, work=10**12, seconds=300.0)
FAR = Exploration(each=256, run=OPS, all=20_000)


def main(arguments: list[str] | None = None) -> int:
    """Plan, and write what was found. Returns 1 if the plan saves less than 98% of what the longer search finds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.planning", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--ops", type=int, default=OPS, help=f"how large the graph is ({OPS})")
    parser.add_argument("--without-long", action="store_true", help="do not search for longer")
    options = parser.parse_args(arguments)
    graph = dialogue(options.ops)
    results: dict[str, Any] = {"machine": machine(), "ops": len(graph), "usual": planned(graph)}
    if not options.without_long:
        results["long"] = planned(graph, LONG, FAR)
        results["share"] = results["usual"]["saves"] / results["long"]["saves"]
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 1 if results.get("share", 1.0) < 0.98 else 0


def planned(graph: Graph, limits: Limits | None = None, exploration: Exploration | None = None) -> dict[str, Any]:
    """How long a graph takes to be planned, and what comes out."""
    from tfmem.kernels.fusion_needs import HOME  # TensorFlow is imported here

    wall, began = time.monotonic(), time.process_time()
    plan = partition_graph(
        graph,
        patterns_of(graph),
        device_costs.kernel_device(device_costs.load("cpu"), "cpu"),
        default=HOME,
        refuse=refusal(graph, (), Lowering(graph, Shapes(graph))),
        limits=limits,
        exploration=exploration,
    )
    return {
        "seconds": time.process_time() - began,
        "wall": time.monotonic() - wall,
        "regions": len(plan.regions),
        "ops": sum(len(region.members) for region in plan.regions),
        "kernels": sum(len(region.kernels) for region in plan.regions),
        "saves": sum(region.choice.score for region in plan.regions),
        "greedy": sum(region.choice.greedy for region in plan.regions),
        "problems": sum(region.choice.problems for region in plan.regions),
        "complete": all(region.choice.complete for region in plan.regions),
    }


if __name__ == "__main__":
    sys.exit(main())
