"""What ties a step to other replicas of it, and what becomes of its plans."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from graph_passes.analysis.memory.replica_step import shared_by
from graph_passes.graph import ops


class Placed(NamedTuple):
    name: str
    op: str = "MatMul"
    device: str = ""


CPU, OTHER = "/device:CPU:0", "/device:CPU:1"


@pytest.mark.parametrize("op", sorted(ops.COLLECTIVES))
def test_a_collective_waits_for_others(op: str) -> None:
    assert shared_by([Placed("a"), Placed("reduce", op)]) == f"'reduce' ({op}) waits for other replicas"


@pytest.mark.parametrize("name", ["replica_1/mul", "gradients/replica_12/mul", "while/replica_3/a/b"])
def test_ops_of_another_replica(name: str) -> None:
    assert shared_by([Placed("mul", device=CPU), Placed(name, device=OTHER)]) == f"'{name}' is of another replica"


@pytest.mark.parametrize(
    "nodes",
    [
        [Placed("a", device=CPU), Placed("b", device=OTHER)],  # a model on two devices
        [Placed("replica_1/a", device=CPU), Placed("b", device=CPU)],  # a name
        [Placed("replica_0/a", device=CPU), Placed("replica_1x/b", device=OTHER), Placed("my_replica_1/c")],
        [],
    ],
)
def test_a_step_by_itself(nodes: list[Placed]) -> None:
    assert not shared_by(nodes)
