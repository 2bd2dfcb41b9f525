"""What is estimated of a convolution before anything ran."""

import pytest

from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec

UNIT = load("unit")
X, W, Y = (TensorId(name) for name in "xwy")
SPECS = {X: TensorSpec("float32", 4, (100,)), W: TensorSpec("float32", 4, (5,)), Y: TensorSpec("float32", 4, (50,))}


def workspace(op: str, limits: tuple[int, int]) -> int:
    node = Node("y", op, [X, W], outputs=1)
    graph = Graph([Node("x", "Placeholder", [], outputs=1), Node("w", "Placeholder", [], outputs=1), node], SPECS)
    return Roofline(UNIT, limits, is_gpu=True).workspace(graph, node)


@pytest.mark.parametrize(
    ("op", "limits", "expected"),
    [
        ("Conv2D", (1000, 10), 620),  # 400 + 20 + 200 bytes: each operand once more
        ("Conv2D", (300, 10), 300),
        ("_FusedConv2D", (10, 1000), 620),
        ("_FusedConv2D", (1000, 300), 300),
        ("Conv2D", (0, 0), 0),
        ("Relu", (1000, 1000), 0),
    ],
)
def test_a_convolution_takes_its_operands_again_up_to_a_limit(op: str, limits: tuple[int, int], expected: int) -> None:
    assert workspace(op, limits) == expected
