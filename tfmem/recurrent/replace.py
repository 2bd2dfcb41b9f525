"""The recurrent pass over what was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.graph import serde
from graph_passes.graph.ir import Graph
from graph_passes.graph.verify import verify_graph
from graph_passes.recurrent.faults import attempt, carried_out, fault
from graph_passes.recurrent.find.loops import LOOPS
from graph_passes.recurrent.find.repeated import FORMS, LEAST, MODES, PRODUCTS
from graph_passes.recurrent.inference import Calls, Source, plan_source
from graph_passes.recurrent.match import RECURRENT_OP, RecurrentPlan, Unmatched
from graph_passes.report import REPLACED, Report
from tfmem.devices import Target
from tfmem.options import Options
from tfmem.recurrent.kernels import with_kernels
from tfmem.recurrent.products import with_tensor_cores
from tfmem.tf_internals.build import FeedShapes, shaped_graph
from tfmem.tf_internals.captured import Captured, every_node, op_name
from tfmem.tf_internals.gradient_check import step_gradient_fault
from tfmem.tf_internals.inline import implementations, inline_captured
from tfmem.tf_internals.inserted_gradients import gradients

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
        asked: names that the user asked for among the fetches. If there are any, copies of a loop's results that
            nothing reads need not stay; TensorFlow 1 makes one of each result.
        final: nobody will take a gradient of the result, so it may have ops without one.

    Raises:
        GraphError: TensorFlow cannot import the graph as it was captured, or `feed_shapes` contradict it.
    """
    if not mentions_recurrence(captured.graph_def):
        return captured, RecurrentPlan()
    try:
        return _replaced(captured, target, options, feed_shapes, asked, final)
    except Exception as error:  # the last resort: whatever it is, the user's function runs as it is
        shaped_graph(captured, feed_shapes)  # raises the GraphError of a graph that was none before
        return captured, without_any(error)


def without_any(error: Exception) -> RecurrentPlan:
    """The plan where `error`, a fault, is in the way of all recurrences."""
    return RecurrentPlan(unmatched=(fault("every recurrence", "all of the graph", error),))


def _replaced(
    captured: Captured,
    target: Target,
    options: Options,
    feed_shapes: FeedShapes | None,
    asked: Collection[str],
    final: bool,
) -> tuple[Captured, RecurrentPlan]:
    """As `replace_recurrent`."""
    reading = _Reading(captured, feed_shapes, frozenset(map(op_name, asked)))
    plan, graph = plan_source(
        Source(
            reading.read,
            reading.keep,
            gradients,
            step_gradient_fault,
            lambda plan: _with_kernels(plan, target, options),
            implementations(captured.graph_def),
            fuse_biases=final and target.is_gpu,
        )
    )
    inlined = reading.inlined

    def require_importable(edited: Graph) -> None:
        verify_graph(edited)
        shaped_graph(_captured(inlined, edited), feed_shapes=feed_shapes)

    plan, graph = carried_out(plan, graph, require_importable) if plan.matches else (plan, graph)
    if not plan.matches:
        return captured, plan
    replaced = _captured(inlined, graph)
    faults: list[Unmatched] = []
    if final:
        with attempt(faults, "products outside the loops", "MatMul"):
            replaced, plan = with_tensor_cores(replaced, plan, target, options, feed_shapes)
    return replaced, replace(plan, unmatched=(*plan.unmatched, *faults))


class _Reading:
    """What was captured, read as a graph.

    Attributes:
        inlined: what the latest graph was read from, with calls at the top level.
    """

    def __init__(self, captured: Captured, feed_shapes: FeedShapes | None, asked: frozenset[str]) -> None:
        self.inlined = self._captured = captured
        self._feed_shapes = feed_shapes
        self._asked = asked
        self._fetched = {op_name(name) for name in captured.fetches}

    def read(self, chosen: Calls) -> Graph:
        """See `Source.read`."""
        self.inlined = inline_captured(self._captured, dict(chosen))
        inferred = shaped_graph(self.inlined, feed_shapes=self._feed_shapes)
        return serde.from_graph_def(self.inlined.graph_def, inferred=inferred, functions=True)

    def keep(self, graph: Graph) -> set[str]:
        """See `Source.keep`."""
        keep = {name for name in self._fetched if _can_be_fetched(graph, name)}
        return {n for n in keep if not self._asked or n in self._asked or not _copies_a_result(graph, n)}


def _with_kernels(plan: RecurrentPlan, target: Target, options: Options) -> RecurrentPlan:
    """As `with_kernels`; where that fails, what it does for each recurrence alone."""
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


def _can_be_fetched(graph: Graph, name: str) -> bool:
    """Whether anybody outside can ask for the node: lists of tensors and resources stay in the graph."""
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(graph[name])] if name in graph.nodes else []
    return not specs or any(spec is None or spec.dtype not in ("variant", "resource") for spec in specs)


def _copies_a_result(graph: Graph, name: str) -> bool:
    node = graph.nodes.get(name)
    return node is not None and node.op == "Identity" and graph[node.inputs[0].node].op in LOOPS


def mentions_recurrence(graph_def: GraphDef) -> bool:
    """Whether there is any use in reading the graph."""
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


def with_replacements(report: Report, plan: RecurrentPlan) -> Report:
    """`report`, saying also what the recurrent pass did."""
    if not plan.matches and not plan.unmatched:
        return report
    unchanged = report.decision.startswith("unchanged") and plan.matches
    return replace(
        report,
        decision=REPLACED if unchanged else report.decision,
        passes=tuple(dict.fromkeys(("recurrent", *report.passes))),
        notes=(*report.notes, *plan.notes, *(loop.traceback for loop in plan.unmatched if loop.traceback)),
        replaced=tuple(map(plan.summary, plan.matches)),
        not_replaced=tuple(f"{loop.name} ({loop.carrier}): {loop.reason}" for loop in plan.unmatched),
    )
