"""How long reading, scheduling, planning and editing take as graphs grow: 1k, 10k, 24k nodes.

    python -m benchmarks.offload.ir_scaling --output benchmarks/results/ir_scaling.json

The graphs are training steps of residual chains: each layer has a forward op whose output waits for
its gradient op, and an addition in each direction. The plan has to halve their memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from benchmarks.records import machine
from benchmarks.runs import command_line
from graph_passes import pipeline
from graph_passes.analysis.cost import device_costs as devices
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.graph import serde
from graph_passes.graph.ir import parse_input
from graph_passes.passes.offload.options import OffloadOptions

SIDE = 256  # tensors are SIDE x SIDE float32, 256 KiB
SHARE = 0.5  # of the memory needed: the plan's budget
NODES_PER_LAYER = 4
STAGES = ("load", "order", "liveness", "plan", "edit", "write")


def main(arguments: list[str] | None = None) -> int:
    """Time every stage at every size; print a table."""
    parser = command_line("offload.ir_scaling", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 24_000])
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many (3)")
    parser.add_argument("--output", type=Path, help="where to write the times as JSON")
    options = parser.parse_args(arguments)

    rows = []
    print(f"{'nodes':>8} {'edges':>8} {'moves':>6} ", *(f"{name:>9}" for name in STAGES), " us/node")
    for nodes in options.nodes:
        runs = [timed(graph_def(nodes)) for _ in range(options.repeat)]
        row = runs[0] | {stage: min(run[stage] for run in runs) for stage in STAGES}
        row["us_per_node"] = 1e6 * sum(row[stage] for stage in STAGES) / row["nodes"]
        rows.append(row)
        seconds = (f"{row[stage]:8.3f}s" for stage in STAGES)
        print(
            f"{row['nodes']:8} {row['edges']:8} {row['moves']:6} ",
            *seconds,
            f"{row['us_per_node']:8.1f}",
            flush=True,
        )
    if options.output:
        about = machine() | {"tensorflow": tf.__version__}
        options.output.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0


def graph_def(nodes: int) -> tf.compat.v1.GraphDef:
    """A training step of about `nodes` nodes.

    forward   t[i] = Tanh(a[i-1]);  a[i] = t[i] + a[i-1]
    backward  g[i] = TanhGrad(t[i], d[i]);  d[i-1] = g[i] + d[i]
    """
    result = tf.compat.v1.GraphDef()
    result.versions.producer = tf.version.GRAPH_DEF_VERSION
    float32 = tf.float32.as_datatype_enum

    def add(name: str, op: str, *inputs: str) -> str:
        node = result.node.add(name=name, op=op, input=inputs)
        node.attr["dtype" if op == "Placeholder" else "T"].type = float32
        if op == "Placeholder":
            node.attr["shape"].shape.CopyFrom(tf.TensorShape((SIDE, SIDE)).as_proto())
        return name

    layers = max(2, (nodes - 2) // NODES_PER_LAYER)
    activation = add("images", "Placeholder")
    for layer in range(layers):
        tanh = add(f"t{layer}", "Tanh", activation)
        activation = add(f"a{layer}", "AddV2", tanh, activation)
    gradient = add("seed", "OnesLike", activation)
    for layer in reversed(range(layers)):
        tanh_gradient = add(f"g{layer}", "TanhGrad", f"t{layer}", gradient)
        gradient = add(f"d{layer}", "AddV2", tanh_gradient, gradient)
    return result


def timed(source: tf.compat.v1.GraphDef) -> dict[str, float | int]:
    """Seconds of each stage on one graph, and the graph's size."""
    seconds: dict[str, float] = {}
    device = devices.load("cpu")
    options = OffloadOptions()
    last = [parse_input(source.node[-1].name)[0]]
    with stopwatch(seconds, "load"):
        graph = serde.from_graph_def(source)
    with stopwatch(seconds, "order"):
        step = pipeline.Step.read(graph, fetches=last)
    with stopwatch(seconds, "liveness"):
        timeline = step.timeline(Roofline(device))
    with stopwatch(seconds, "plan"):
        link = Link(device.offload, device.prefetch)
        plan = pipeline.plan_step(step, timeline, link, int(SHARE * timeline.peak), options)
    with stopwatch(seconds, "edit"):
        edited = pipeline.edit_step(step, timeline, plan, options)
    with stopwatch(seconds, "write"):
        serde.to_graph_def(edited, source)
    edges = sum(len(node.inputs) + len(node.control) for node in graph)
    return {"nodes": len(graph), "edges": edges, "moves": len(plan.moves), **seconds}


@contextmanager
def stopwatch(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's seconds to `seconds[stage]`."""
    began = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
