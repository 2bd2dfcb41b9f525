"""Plans for steps of several replicas whose collectives tfmem cannot follow: refused, but only where tensors move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_passes.errors import ReplicasError
from graph_passes.graph.ir import Graph
from graph_passes.pipeline import Step
from tests.spmd_graphs import Spmd, training_step
from tests.tf.memory_in_use import in_use
from tfmem.api import make_engine
from tfmem.options import Options
from tfmem.runtime.engine import Engine
from tfmem.steps.replicas import plan_replicas

NET = Spmd((2, 3, 1, 2, 4), (0, 0, 0, 1, 2), 2, 2)
AMPLE = 1 << 34


def on_cpus(graph: Graph) -> Graph:
    nodes = [replace(node, device=node.device.replace("GPU", "CPU")) for node in graph]
    return Graph(nodes, graph.specs, graph.constants)


@pytest.fixture(name="engine")
def fixture_engine() -> Engine:
    return make_engine(Options(memory_budget="1GiB", cache_directory=""))


def scarce(step: Step, engine: Engine) -> int:
    plans = plan_replicas(step, engine, AMPLE)
    assert not any(each.plan.moves for each in plans)
    return round(0.9 * (sum(each.timeline.peak for each in plans) - in_use())) + in_use()


def test_tensors_move_where_collectives_have_an_order(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    assert all(each.plan.moves for each in plan_replicas(step, engine, scarce(step, engine)))


def test_collectives_without_an_order_are_refused(engine: Engine) -> None:
    graph = on_cpus(training_step(NET))
    graph.remove_control("reduce1/1", "reduce0/1")
    step = Step.read(graph)
    budget = scarce(step, engine)  # where nothing moves, their order does not matter
    with pytest.raises(ReplicasError, match=r"has no order among those of .*; train with a smaller batch"):
        plan_replicas(step, engine, budget)


def test_collectives_of_other_processes_are_refused(engine: Engine) -> None:
    graph = on_cpus(training_step(NET))
    step = Step.read(graph)
    graph.constants["size0/1"][...] = 4
    with pytest.raises(ReplicasError, match="waits for devices of other processes"):
        plan_replicas(step, engine, scarce(step, engine))
