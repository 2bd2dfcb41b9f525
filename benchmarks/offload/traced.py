"""The training step of a network as it is planned for a GPU, traced from shapes alone. Nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.offload.cases import NETWORKS
from benchmarks.offload.networks import model, specs
from examples import models
from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.session_step import waits_in_place, with_waits
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph, TensorId, parse_input
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler


@dataclass(frozen=True)
class Traced:
    """A training step after Grappler.

    Attributes:
        graph: with shapes.
        creation_order: names of its ops, as the program made them.
        fetches: what it returns.
    """

    graph: Graph
    creation_order: tuple[str, ...]
    fetches: tuple[TensorId, ...]

    def step(self) -> pipeline.Step:
        """The step, scheduled."""
        return pipeline.Step.read(self.graph, self.creation_order, self.fetches)


def costs(device: str) -> Roofline:
    """Estimates for a device, convolutions without workspace."""
    return Roofline(load(device), is_gpu=True)


def traced(net: str, batch: int = 0) -> Traced:
    """The training step of a network, with Adam.

    Args:
        net: a key of `NETWORKS`.
        batch: its batch size; 0 for that of `NETWORKS`.
    """
    size = NETWORKS[net]
    step = models.make_step(model(net, size.side))
    concrete = step.get_concrete_function(*specs(net, batch or size.batch, size.side))
    captured = run_grappler(capture_concrete(concrete), device="GPU")
    graph = serde.from_graph_def(captured.graph_def, inferred=shaped_graph(captured), functions=True)
    graph = with_waits(graph, waits_in_place(graph))
    return Traced(graph, tuple(captured.creation_order), tuple(parse_input(name)[0] for name in captured.fetches))
