"""What TensorFlow computes once, when it makes a graph ready to run: by hand, on graphs made by hand."""

from __future__ import annotations

import pytest

from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.folded import LARGEST, folded, not_run
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.liveness import build_timeline
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec

ROWS = TensorSpec("float32", 4, (1024, 64))  # 256 KiB
LARGE = TensorSpec("float32", 4, (LARGEST // 4 + 1,))
KIB = 1 << 10


def graph(spec: TensorSpec = ROWS, source: str = "Const", op: str = "RealDiv", *, stateful: bool = False) -> Graph:
    """one / many -> filled -> scaled, a constant of which the gradient of x * x is made."""
    nodes = [
        Node("x", "Placeholder", outputs=1),
        Node("many", source, outputs=1),
        Node("one", "Const", outputs=1),
        Node("filled", "Tile", [TensorId("one"), TensorId("many")], outputs=1),
        Node("scaled", op, [TensorId("filled"), TensorId("one")], control=["x"], outputs=1, stateful=stateful),
        Node("gradient", "Mul", [TensorId("scaled"), TensorId("x")], outputs=1),
    ]
    large, small = ("x", "filled", "scaled", "gradient"), TensorSpec("int32", 4, (2,))
    specs = {TensorId(name): spec for name in large} | {TensorId(name): small for name in ("many", "one")}
    return Graph(nodes, specs)


def test_what_others_read_of_constants_is_kept() -> None:
    """Once: what only constants read is gone; and an op that waits for others is a constant, too."""
    assert folded(graph()) == 256 * KIB
    assert not_run(graph()) == {"filled", "scaled"}


def test_what_is_kept_is_no_buffer_of_the_step() -> None:
    """Nothing is written over it either, so the gradient has a buffer."""
    found = graph()

    def buffers(kept: frozenset[str]) -> list[str]:
        timeline = build_timeline(found, list(found.nodes), Roofline(load("unit")), kept=kept)
        return [buffer.tensor.node for buffer in timeline.buffers]

    assert buffers(not_run(found)) == ["gradient"]
    assert buffers(frozenset()) == ["filled"]


@pytest.mark.parametrize(
    ("found", "nbytes"),
    [
        (graph(source="Placeholder"), 0),
        (graph(op="Switch"), 256 * KIB),  # what it reads is still a constant
        (graph(stateful=True), 256 * KIB),
        (graph(TensorSpec("float32", 4, (LARGEST // 4,))), LARGEST),
        (graph(LARGE), 0),
        (graph(TensorSpec("float32", 4, (None, 64))), 0),
    ],
)
def test_what_is_not(found: Graph, nbytes: int) -> None:
    assert folded(found) == nbytes


def test_what_is_too_large_is_computed_in_the_step() -> None:
    """The step also computes what that is made of."""
    assert not_run(graph(LARGE)) == frozenset()
    assert not_run(graph(source="Placeholder")) == frozenset()
