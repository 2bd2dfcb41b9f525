"""The recurrent pass over what was captured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import serde
from graph_passes.ir import Graph
from graph_passes.recurrent.apply import apply_recurrent
from graph_passes.recurrent.biases import with_fused_biases
from graph_passes.recurrent.loops import LOOPS
from graph_passes.recurrent.match import RECURRENT_OP, RecurrentPlan, Unmatched
from graph_passes.recurrent.rolling import roll_up
from graph_passes.recurrent.training import plan_whole
from graph_passes.report import SWAPPED, Report
from tfmem.capture.build import FeedShapes, shaped_graph
from tfmem.capture.captured import Captured, op_name
from tfmem.capture.differentiate import gradients
from tfmem.capture.inline import implementations, inline_captured
from tfmem.config import Options
from tfmem.devices import Target
from tfmem.products import with_tensor_cores
from tfmem.tuning import with_kernels

CARRIERS = frozenset({"While", "StatelessWhile", "Enter", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "Unpack"})


def swap_recurrent(
    captured: Captured,
    target: Target,
    options: Options,
    feed_shapes: FeedShapes | None = None,
    asked: Collection[str] = (),
    final: bool = False,
) -> tuple[Captured, RecurrentPlan]:
    """`captured` with its recurrent layers swapped, before Grappler sees it; itself where nothing matches.

    Calls are brought to the top level. One of several implementations (tf_keras: `api_implements`) is, if all of its
    loops are swapped: Grappler would not choose it on a GPU, where cuDNN's is preferred.

    Args:
        captured: what capture gave.
        target: the device that will run it; a GPU's kernels are made here.
        options: the user's.
        feed_shapes: shapes of feeds ("x:0"), where better known than in the graph.
        asked: names that the user asked for among the fetches. If there are any, copies of a loop's results that
            nothing reads need not stay; TensorFlow 1 makes one of each result.
        final: nobody will take a gradient of the result, so it may have ops without one.

    Raises:
        GraphError: TensorFlow cannot import the graph.
    """
    if not _mentions_recurrence(captured.graph_def):
        return captured, RecurrentPlan()
    fetched = {op_name(name) for name in captured.fetches}
    chosen = implementations(captured.graph_def)
    refused: list[Unmatched] = []
    unrolled: set[str] = set()  # what stays so
    while True:
        inlined = inline_captured(captured, chosen)
        inferred = shaped_graph(inlined, feed_shapes=feed_shapes)
        graph = serde.from_graph_def(inlined.graph_def, inferred=inferred, functions=True)
        keep = {name for name in fetched if _can_be_fetched(graph, name)}
        if asked:
            wanted = {op_name(name) for name in asked}
            keep = {name for name in keep if name in wanted or not _copies_a_result(graph, name)}
        graph, rolled = roll_up(graph, keep, unrolled)
        plan = with_kernels(plan_whole(graph, keep, gradients), target, options)
        stiff = [loop for loop in plan.unmatched if loop.name in rolled]
        if stiff:
            refused += stiff
            unrolled |= {loop.name for loop in stiff}
            continue
        kept = [f for f, calls in chosen.items() if any(_inside(loop.name, calls) for loop in plan.unmatched)]
        if not kept:
            break
        refused += [loop for loop in plan.unmatched if any(_inside(loop.name, chosen[name]) for name in kept)]
        chosen = {function: calls for function, calls in chosen.items() if function not in kept}
    # A call that was kept is reported once, with what is in the way inside.
    others = (loop for loop in plan.unmatched if not any(before.name.startswith(f"{loop.name}/") for before in refused))
    plan = replace(plan, unmatched=(*refused, *others))
    if not plan.matches:
        return captured, plan
    if final and target.is_gpu:
        plan = replace(plan, matches=tuple(map(with_fused_biases, plan.matches)))
    apply_recurrent(plan, graph)
    swapped = _captured(inlined, graph)
    return with_tensor_cores(swapped, plan, target, options, feed_shapes) if final else (swapped, plan)


def _can_be_fetched(graph: Graph, name: str) -> bool:
    """Whether anybody outside can ask for the node: lists of tensors and resources stay in the graph."""
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(graph[name])] if name in graph.nodes else []
    return not specs or any(spec is None or spec.dtype not in ("variant", "resource") for spec in specs)


def _copies_a_result(graph: Graph, name: str) -> bool:
    node = graph.nodes.get(name)
    return node is not None and node.op == "Identity" and graph[node.inputs[0].node].op in LOOPS


def _mentions_recurrence(graph_def: GraphDef) -> bool:
    """Whether there is any use in reading the graph."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    return any(node.op in CARRIERS for nodes in bodies for node in nodes)


def _captured(before: Captured, graph: Graph) -> Captured:
    present = graph.nodes
    launches = [node.name for node in graph if node.op == RECURRENT_OP]
    removed = any(name not in present for name in before.control_fetches)
    control = [name for name in before.control_fetches if name in present] + (launches if removed else [])
    graph_def = serde.to_graph_def(graph, before.graph_def)
    return replace(
        before,
        graph_def=graph_def,
        fetches=tuple(name for name in before.fetches if op_name(name) in present),
        control_fetches=tuple(control),
        creation_order=tuple(node.name for node in graph_def.node),
    )


def _inside(name: str, calls: list[str]) -> bool:
    return any(f"/{call}/" in f"/{name}" for call in calls)


def with_swaps(report: Report, plan: RecurrentPlan) -> Report:
    """`report`, saying also what the recurrent pass did."""
    if not plan.matches and not plan.unmatched:
        return report
    unchanged = report.decision.startswith("unchanged") and plan.matches
    return replace(
        report,
        decision=SWAPPED if unchanged else report.decision,
        passes=tuple(dict.fromkeys(("recurrent", *report.passes))),
        notes=(*report.notes, *plan.notes),
        swapped=tuple(map(plan.summary, plan.matches)),
        not_swapped=tuple(f"{loop.name} ({loop.carrier}): {loop.reason}" for loop in plan.unmatched),
    )
