"""The recurrent pass over what was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes import pipeline
from graph_passes.passes.products import plan as matmul
from graph_passes.passes.recurrent import plan
from graph_passes.passes.recurrent.faults import attempt, fault, without
from graph_passes.passes.recurrent.find.repeated import FORMS, LEAST, MODES, PRODUCTS
from graph_passes.passes.recurrent.match import RecurrentPlan, Unmatched
from graph_passes.pipeline import RECURRENT, PassOutcome, PassPhase, run_passes
from graph_passes.report import REPLACED, Report
from tfmem.capture.build import FeedShapes, shaped_graph
from tfmem.capture.captured import Captured, every_node
from tfmem.capture.captured_source import CapturedSource
from tfmem.capture.gradient_check import step_gradient_fault
from tfmem.capture.inline import implementations
from tfmem.capture.inserted_gradients import gradients
from tfmem.capture.numeric_step_gradients import step_gradient_exits
from tfmem.capture.source_lines import source_lines
from tfmem.devices import Target
from tfmem.kernels.products import product_needs, with_products
from tfmem.kernels.recurrent import slower_on_cpu, with_kernels
from tfmem.options import Options

CARRIERS = frozenset({"While", "StatelessWhile", "Enter", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "Unpack"})


def replace_recurrent(
    captured: Captured,
    target: Target,
    options: Options,
    feed_shapes: FeedShapes | None = None,
    asked: Collection[str] = (),
    final: bool = False,
) -> tuple[Captured, RecurrentPlan]:
    """`captured` with its recurrent layers replaced, before Grappler sees it; itself where nothing matches.

    Calls are brought to the top level. One of several implementations (tf_keras: `api_implements`) is, if all of its
    loops are replaced: Grappler would not choose it on a GPU, where cuDNN's is preferred.

    Args:
        captured: what capture gave.
        target: the device that will run it; a GPU's kernels are made here.
        options: the user's.
        feed_shapes: shapes of feeds ("x:0"), where better known than in the graph.
        asked: names that the user asked for among the fetches; see `CapturedSource`.
        final: no caller takes a gradient of the result, so it may have ops without one.

    Raises:
        GraphError: TensorFlow cannot import the captured graph, or `feed_shapes` contradict it.
    """
    if not mentions_recurrence(captured.graph_def):
        return captured, RecurrentPlan()
    source = CapturedSource(captured, feed_shapes, asked)

    def recurrences(_: Mapping[str, PassOutcome[Any]]) -> plan.Needs:
        return plan.Needs(
            gradients,
            step_gradient_fault,
            lambda found: _with_kernels(found, target, options),
            implementations(captured.graph_def),
            fuse_biases=final and target.is_gpu,
            exits=step_gradient_exits,
            slow=None if target.is_gpu else slower_on_cpu,
            unrolls_draws=target.is_gpu,
        )

    def products(done: Mapping[str, PassOutcome[Any]]) -> matmul.Needs | None:
        return product_needs(recurrent_plan(done), target, options) if final else None

    needs = {RECURRENT.name: recurrences, pipeline.PRODUCTS.name: products}
    done = run_passes(PassPhase.BEFORE_GRAPPLER, (RECURRENT.option,), source, needs)
    if done[RECURRENT.name].failed:
        shaped_graph(captured, feed_shapes)  # raises the GraphError of a graph that was none before
    found = _with_lines(captured, recurrent_plan(done))
    return source.captured, with_products(found, done.get(pipeline.PRODUCTS.name))


def _with_lines(captured: Captured, plan: RecurrentPlan) -> RecurrentPlan:
    """`plan` with the line of the program for what stays."""
    lines = source_lines(captured, {loop.about for loop in plan.unmatched}) if plan.unmatched else {}
    unmatched = tuple(replace(loop, line=lines.get(loop.about, "")) for loop in plan.unmatched)
    return replace(plan, unmatched=unmatched)


def recurrent_plan(done: Mapping[str, PassOutcome[Any]]) -> RecurrentPlan:
    """What the recurrent pass did."""
    found: PassOutcome[RecurrentPlan] = done[RECURRENT.name]
    if found.plan is None:
        failed = found.failed or AssertionError("a pass that made no plan failed")
        return RecurrentPlan(unmatched=(fault("every recurrence", "all of the graph", failed),))
    return without(found.plan, found.errors)


def _with_kernels(plan: RecurrentPlan, target: Target, options: Options) -> RecurrentPlan:
    """The result of `with_kernels`; where that fails, its results for each recurrence alone."""
    whole: list[Unmatched] = []
    with attempt(whole, "", ""):
        return with_kernels(plan, target, options)
    done = replace(plan, matches=())
    unmatched = list(plan.unmatched)
    for match in plan.matches:
        with attempt(unmatched, match.name, match.carrier):
            alone = with_kernels(replace(plan, matches=(match,), unmatched=()), target, options)
            unmatched += alone.unmatched
            kernels = {**done.kernels, **alone.kernels}
            done = replace(done, matches=(*done.matches, *alone.matches), kernels=kernels, precision=alone.precision)
    return replace(done, unmatched=tuple(unmatched))


def mentions_recurrence(graph_def: GraphDef) -> bool:
    """Whether the graph may hold a recurrence, so that reading it is useful."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    if any(node.op in CARRIERS for node in every_node(graph_def)) or any(map(_multiplies_again, bodies)):
        return True
    multiplying = {f.signature.name for f in graph_def.library.function if any(n.op in PRODUCTS for n in f.node_def)}
    calls = Counter(attr.func.name for node in every_node(graph_def) for attr in node.attr.values())
    return any(calls[name] >= LEAST for name in multiplying)


def _multiplies_again(nodes: Sequence[NodeDef]) -> bool:
    """Whether a weight is multiplied twice in the same way, as in steps that are written out.

    What is no variable but an input of the graph counts on the right only: many layers have one input on the left.
    """
    by_name = {node.name: node for node in nodes}
    seen: set[tuple[object, ...]] = set()
    for node in nodes:
        for place, operand in enumerate(node.input[:2] if node.op in PRODUCTS else ()):
            name, forms = _weight(by_name, operand)
            if (name not in by_name or not by_name[name].input) and ("ReadVariableOp" in forms or place == 1):
                forms = [form for form in forms if form not in ("Identity", "ReadVariableOp")]
                use = (name, place, *forms, *(str(node.attr[mode]) for mode in MODES if mode in node.attr))
                if use in seen:
                    return True
                seen.add(use)
    return False


def _weight(nodes: Mapping[str, NodeDef], operand: str) -> tuple[str, list[str]]:
    """What `operand` is a form of, and how it became that."""
    forms: list[str] = []
    name, _, index = operand.partition(":")
    while name in nodes and nodes[name].op in FORMS and nodes[name].input:
        node = nodes[name]
        forms.append(f"{node.op}:{index}" if node.op in ("Split", "SplitV", "Unpack") else node.op)
        name, _, index = node.input[1 if node.op == "Split" else 0].partition(":")
    return name, forms


def with_replacements(report: Report, plan: RecurrentPlan) -> Report:
    """`report` with what the recurrent pass did."""
    if not plan.matches and not plan.unmatched:
        return report
    unchanged = report.decision.is_unchanged and plan.matches
    return replace(
        report,
        decision=REPLACED if unchanged else report.decision,
        passes=tuple(dict.fromkeys(("recurrent", *report.passes))),
        notes=(*report.notes, *plan.notes, *(loop.traceback for loop in plan.unmatched if loop.traceback)),
        replaced_layers=tuple(match.name for match in plan.matches),
        kept_layers=tuple((loop.name, loop.why) for loop in plan.unmatched),
        replaced=tuple(map(plan.summary, plan.matches)),
        not_replaced=tuple(f"{loop.name} ({loop.carrier}): {loop.why}" for loop in plan.unmatched),
    )
