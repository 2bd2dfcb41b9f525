"""What ties a step to other replicas of it, and what becomes of its plans."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from graph_passes.analysis.memory.replica_step import are_one_device, shared_by
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


TASK = "/job:localhost/replica:0/task:0"


@pytest.mark.parametrize(
    ("names", "one"),
    [
        ([], True),
        (["/device:CPU:0", TASK, f"{TASK}/device:CPU:0", "/cpu:0", "/device:CPU:*", "/device:CPU"], True),
        (["/device:CPU:0", "/device:CPU:1"], False),
        (["/device:CPU:0", "/device:GPU:0"], False),
        (["/task:0", "/task:1/device:CPU:0"], False),
        (["/job:worker", "/job:ps"], False),
    ],
)
def test_names_in_part_are_of_one_device_unless_they_differ(names: list[str], one: bool) -> None:
    assert are_one_device(names) is one
