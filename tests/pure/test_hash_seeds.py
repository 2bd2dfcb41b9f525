"""One graph gives the same plan in every process: nothing depends on the order in which sets are iterated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.session_step import waits_in_place
from graph_passes.analysis.memory.simulate import Link
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import schedule, topological
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.find.provenance import spread
from tests.chain_nets import LARGE, Net

OPTIMAL = OffloadOptions(reuse_distance=1)
ROOT = Path(__file__).parents[2]


def fan_out() -> Graph:
    """A variable, read by many ops of which none has to come before another, and an update of it."""
    names = [f"reader_{index}" for index in range(20)]
    nodes = [
        Node("variable", "VarHandleOp", outputs=1),
        Node("value", "ReadVariableOp", [TensorId("variable")], outputs=1),
        *(Node(name, "Squeeze", [TensorId("value")], outputs=1) for name in names),
        Node("sum", "AddN", [TensorId(name) for name in names], outputs=1),
        Node("update", "AssignAddVariableOp", [TensorId("variable"), TensorId("value")]),
    ]
    return Graph(nodes, {TensorId(node.name): TensorSpec("float32", 4, (8, 8)) for node in nodes if node.outputs})


def moves() -> list[str]:
    """What policy `optimal` moves of a net with chains and skips, at budgets that some tensors exceed."""
    net = Net()
    top = skip = net.add("x", "Conv2D", [], LARGE)
    for index, kind in enumerate(("product", "norm", "relu", "dropout", "add") * 4):
        top = net.layer(kind, index, top, skip, 1)
        skip = top if kind == "product" else skip
    step = pipeline.Step.read(net.graph(top))
    timeline = step.timeline(Roofline(load("unit")))
    budgets = [timeline.peak * share // 100 for share in (90, 80, 70)]
    plans = (pipeline.plan_step(step, timeline, Link(1.0, 1.0), each, OPTIMAL, timed=True) for each in budgets)
    return [str((plan.actions, plan.verdict)) for plan in plans]


def orders() -> dict[str, list[str]]:
    graph = fan_out()
    found = {
        "topological": topological(graph),
        "schedule": schedule(graph, ["variable", "sum"]),  # the program created no reader
        "spread": [str(tensor) for tensor in spread(graph, TensorId("value")) or {}],
    }
    return {**found, "waits": [" ".join(pair) for pair in waits_in_place(graph)], "moves": moves()}


@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_depends_on_the_hash_seed(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import orders; print(orders())"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert done.stdout.strip() == str(orders())
