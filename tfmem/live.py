"""A graph that its users hold on to, edited in place: `tf.Graph` before a session runs it, or a FuncGraph being built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_passes import pipeline, serde
from graph_passes.ir import TensorId, parse_input
from graph_passes.report import Report
from tfmem.capture.live_graph import LiveEditor
from tfmem.engine import Engine, plan_unobserved


def optimize_live(
    graph: Any, engine: Engine, loss: Any | None = None, fetches: Sequence[Any] = ()
) -> Report:
    """Insert MemOps into `graph`.

    Args:
        graph: a `tf.Graph`; TensorFlow's Grappler cannot run before the edit here, so sessions run it with
            `tfmem.session_config()`.
        engine: budget, device and options.
        loss: the loss tensor, where the caller knows it.
        fetches: tensors that the caller will read; they stay.

    Raises:
        GraphInUseError: a session ran the graph.
    """
    editor = LiveEditor(graph)
    ir = serde.from_tf_graph(graph)
    named = [parse_input(tensor.name)[0] for tensor in fetches]
    step = pipeline.Step.read(ir, (), named, _identity(loss), merging=not engine.target.is_gpu)
    timeline, plan = plan_unobserved(step, engine)
    if plan is None:
        found = engine.unlimited(str(graph))
    else:
        options = engine.options.offload
        if plan.moves:
            pipeline.edit_step(step, timeline, plan, options, editor=editor)
        found = pipeline.describe(
            step, timeline, plan, options.policy, graph=type(graph).__name__, device=engine.target.description
        )
    graph._tfmem_report = found  # a graph has no place for it, and its users ask the graph
    return found


def _identity(tensor: Any | None) -> TensorId | None:
    return None if tensor is None else parse_input(tensor.name)[0]
