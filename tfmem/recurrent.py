"""The recurrent pass over what was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from custom_ops.errors import warn
from graph_passes import serde
from graph_passes.ir import Graph
from graph_passes.recurrent.cleanup import with_fused_biases
from graph_passes.recurrent.faults import attempt, carried_out, fault
from graph_passes.recurrent.loops import LOOPS
from graph_passes.recurrent.match import RECURRENT_OP, Match, RecurrentPlan, Unmatched
from graph_passes.recurrent.repeated import FORMS, LEAST, MODES, PRODUCTS, Refused, repeated
from graph_passes.recurrent.rolling import roll_up
from graph_passes.recurrent.training import plan_whole
from graph_passes.report import SWAPPED, Report
from graph_passes.verify import verify_graph
from tfmem.capture.build import FeedShapes, shaped_graph
from tfmem.capture.captured import Captured, op_name
from tfmem.capture.differentiate import gradients
from tfmem.capture.inline import implementations, inline_captured
from tfmem.capture.step_gradient import step_gradient_fault
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
        GraphError: TensorFlow cannot import the graph as it was captured, or `feed_shapes` contradict it.
    """
    if not mentions_recurrence(captured.graph_def):
        return captured, RecurrentPlan()
    try:
        swapped, plan = _swapped(captured, target, options, feed_shapes, asked, final)
    except Exception as error:  # the last resort: whatever it is, the user's function runs as it is
        shaped_graph(captured, feed_shapes=feed_shapes)  # raises the GraphError of a graph that was none before
        swapped, plan = captured, RecurrentPlan(unmatched=(fault("every recurrence", "all of the graph", error),))
    warn_of_faults(plan)
    return swapped, plan


def warn_of_faults(plan: RecurrentPlan) -> None:
    """Tell the user of each recurrence that stays because tfmem failed."""
    for loop in plan.unmatched:
        if loop.traceback:
            warn(f"a recurrence stays as it is, {loop.name} ({loop.carrier}): {loop.reason}; see the report's notes")


def _swapped(
    captured: Captured,
    target: Target,
    options: Options,
    feed_shapes: FeedShapes | None,
    asked: Collection[str],
    final: bool,
) -> tuple[Captured, RecurrentPlan]:
    """As `swap_recurrent`."""
    fetched = {op_name(name) for name in captured.fetches}
    chosen = implementations(captured.graph_def)
    refused: list[Unmatched] = []
    unrolled: set[str] = set()  # what stays so
    known: set[str] = set()  # the nodes of that
    while True:
        inlined = inline_captured(captured, chosen)
        inferred = shaped_graph(inlined, feed_shapes=feed_shapes)
        graph = serde.from_graph_def(inlined.graph_def, inferred=inferred, functions=True)
        keep = {name for name in fetched if _can_be_fetched(graph, name)}
        if asked:
            wanted = {op_name(name) for name in asked}
            keep = {name for name in keep if name in wanted or not _copies_a_result(graph, name)}
        rolled = roll_up(graph, keep, unrolled)
        graph = rolled.graph
        plan = _with_kernels(plan_whole(graph, keep, gradients, step_gradient_fault), target, options)
        stiff = [loop for loop in plan.unmatched if loop.name in rolled.loops]
        if stiff:
            refused += stiff
            unrolled |= {loop.name for loop in stiff}
            known |= {name for loop in stiff for name in rolled.loops[loop.name]}
            continue
        kept = [f for f, calls in chosen.items() if any(_inside(loop.name, calls) for loop in plan.unmatched)]
        if not kept:
            break
        refused += [loop for loop in plan.unmatched if any(_inside(loop.name, chosen[name]) for name in kept)]
        chosen = {function: calls for function, calls in chosen.items() if function not in kept}
    # A call that was kept is reported once, with what is in the way inside.
    others = (loop for loop in plan.unmatched if not any(before.name.startswith(f"{loop.name}/") for before in refused))
    known |= {name for match in plan.matches for name in match.removed}
    plan = replace(
        plan, unmatched=(*refused, *others, *rolled.unmatched, *kept_steps(graph, keep, rolled.refused, known))
    )
    if final and target.is_gpu:
        plan = _with_fused_biases(plan)

    def require_importable(edited: Graph) -> None:
        verify_graph(edited)
        shaped_graph(_captured(inlined, edited), feed_shapes=feed_shapes)

    plan, graph = carried_out(plan, graph, require_importable) if plan.matches else (plan, graph)
    if not plan.matches:
        return captured, plan
    swapped = _captured(inlined, graph)
    faults: list[Unmatched] = []
    if final:
        with attempt(faults, "products outside the loops", "MatMul"):
            swapped, plan = with_tensor_cores(swapped, plan, target, options, feed_shapes)
    return swapped, replace(plan, unmatched=(*plan.unmatched, *faults))


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


def _with_fused_biases(plan: RecurrentPlan) -> RecurrentPlan:
    matches: list[Match] = []
    unmatched = list(plan.unmatched)
    for match in plan.matches:
        with attempt(unmatched, match.name, match.carrier):
            matches.append(with_fused_biases(match))
    return replace(plan, matches=tuple(matches), unmatched=tuple(unmatched))


def _can_be_fetched(graph: Graph, name: str) -> bool:
    """Whether anybody outside can ask for the node: lists of tensors and resources stay in the graph."""
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(graph[name])] if name in graph.nodes else []
    return not specs or any(spec is None or spec.dtype not in ("variant", "resource") for spec in specs)


def _copies_a_result(graph: Graph, name: str) -> bool:
    node = graph.nodes.get(name)
    return node is not None and node.op == "Identity" and graph[node.inputs[0].node].op in LOOPS


def kept_steps(
    graph: Graph,
    keep: Collection[str],
    refused: Sequence[Refused] = (),
    known: Collection[str] = (),
    in_place: bool = False,
) -> list[Unmatched]:
    """As `repeated`, which is for the report alone: what fails in it is a line of that."""
    found: list[Unmatched] = []
    with attempt(found, "steps that are written out", "unrolled"):
        found += repeated(graph, keep, refused, known, in_place)
    return found


def mentions_recurrence(graph_def: GraphDef) -> bool:
    """Whether there is any use in reading the graph."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    if any(node.op in CARRIERS for nodes in bodies for node in nodes) or any(map(_multiplies_again, bodies)):
        return True
    multiplying = {f.signature.name for f in graph_def.library.function if any(n.op in PRODUCTS for n in f.node_def)}
    calls = Counter(attr.func.name for nodes in bodies for node in nodes for attr in node.attr.values())
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
        notes=(*report.notes, *plan.notes, *(loop.traceback for loop in plan.unmatched if loop.traceback)),
        swapped=tuple(map(plan.summary, plan.matches)),
        not_swapped=tuple(f"{loop.name} ({loop.carrier}): {loop.reason}" for loop in plan.unmatched),
    )
