"""What the fusion pass is handed: the device as its model sees it, and how attributes are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graph_passes.fusion.lower.meaning import Kind
from graph_passes.fusion.plan import ON_CPU
from graph_passes.fusion.score import KernelDevice
from graph_passes.fusion.stitching import Needs, Stitching, fault
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph
from graph_passes.pipeline import Outcome
from tfmem.tf_internals.captured import op_name

HOME = "/job:localhost/replica:0/task:0/device:CPU:0"
# One pass over memory that the caches do not hold, and the time to the next op; orders of magnitude, which decide what
# is planned, not what is kept: that is timed.
CPU = KernelDevice(
    name="cpu",
    copies=((0.0, 0.0), (32e3, 1e-6), (1e6, 5e-5), (1e8, 2e-2)),
    launch=5e-7,
    barrier=1e-6,
    block=1 << 15,
    chip=1 << 20,
    dispatch=3e-6,
    region=6e-6,
)


def fusion_needs(feeds: Collection[str], roots: Collection[str] | None = None, in_place: bool = False) -> Needs:
    """Of a graph on a CPU.

    Args:
        feeds: tensors that a caller gives.
        roots: see `Needs`.
        in_place: the graph is edited under its users, who may run the ops that are there now, too: so variables are
            read and written by these alone.
    """
    kinds = ON_CPU - {Kind.READ, Kind.UPDATE} if in_place else ON_CPU
    return Needs(CPU, HOME, serde.attributes, kinds, tuple(map(op_name, feeds)), roots)


def sinks(graph: Graph) -> list[str]:
    """Nodes that no other reads or waits for: what users may run, whatever else they do not."""
    return [node.name for node in graph if not any(graph.successors(node))]


def stitching(done: Mapping[str, Outcome]) -> Stitching:
    """What the fusion pass did; nothing where it did not run."""
    outcome = done.get("fusion")
    if outcome is None:
        return Stitching()
    if outcome.failed is not None:
        return Stitching(kept=(fault("every region", (), outcome.failed),))
    found: Stitching = outcome.plan
    return found.without(outcome.errors)
