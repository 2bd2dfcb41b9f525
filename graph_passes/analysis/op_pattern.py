"""What each op of a graph is to fusion: which kind of work it does, or why it stays outside."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.expr.program import DTYPES
from custom_ops.fusion.region_check import VALUE_DTYPES
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import (
    DRAWS,
    IDENTITIES,
    IN_KERNELS,
    PATTERN_OF_PRODUCT,
    REDUCTIONS,
    SHAPED_BY_SHAPES,
    OpPattern,
    is_update,
)
from graph_passes.lower.rule import Rule
from graph_passes.lower.rules import RULES
from graph_passes.lower.shapes import variable_spec
from graph_passes.refusals import Reason, Refusal

__all__ = ["IN_KERNELS", "REDUCTIONS", "NodePattern", "OpPattern", "called", "operands", "pattern_of", "patterns_of"]

_GIVEN = frozenset({"Placeholder", "_Arg"})
# They may draw where they pool, though they are not marked as stateful; and their kernels give one number more of it
# than their shape functions say.
_POOLS_AT_RANDOM = frozenset({"FractionalAvgPool", "FractionalMaxPool"})


@dataclass(frozen=True)
class NodePattern:
    """The pattern of one node, and the inputs that it uses.

    Attributes:
        pattern: what it does.
        reason: why it can be no member of a kernel, where its pattern is `CALL` or `OPAQUE`.
        operands: positions of the inputs whose numbers it reads. Others say only what it does (axes, shapes), are
            constants or known from shapes, and need not reach the region.
        reads, writes: positions of the inputs that are variables it reads and writes.
    """

    pattern: OpPattern
    reason: Refusal | None = None
    operands: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


def patterns_of(graph: Graph) -> dict[str, NodePattern]:
    """The pattern of every node of a graph as Grappler left it, whose `specs` are known."""
    return {node.name: pattern_of(graph, node) for node in graph}


def pattern_of(graph: Graph, node: Node) -> NodePattern:
    """The pattern of one node."""
    everything = tuple(range(len(node.inputs)))
    if node.op in PATTERN_OF_PRODUCT:
        problem = _problem(graph, [*node.inputs, *graph.tensors(node)])
        if problem:
            return NodePattern(OpPattern.OPAQUE, problem)
        return NodePattern(PATTERN_OF_PRODUCT[node.op], operands=everything)
    rule = RULES.get(node.op)
    if node.op in _GIVEN:
        return NodePattern(OpPattern.OPAQUE, Reason.ARGUMENT())
    if rule is None:
        return called(graph, node, Reason.NO_RULE(op=node.op))
    read = tuple(place for place in everything[slice(*rule.operands)] if place not in rule.unread)
    made = [tensor for tensor in graph.tensors(node) if tensor.index not in rule.reserved]
    given = [] if rule.states else [node.inputs[place] for place in read]
    problem = _problem(graph, given + made)
    problem = problem or rule.refusal(graph, node) or _view_problem(graph, node, rule)
    if problem:
        return called(graph, node, problem)
    kind = rule.pattern_of(graph, node)
    return _variable(graph, node, NodePattern(kind, None, read, rule.reads, rule.writes))


def operands(graph: Graph, node: Node) -> list[TensorId]:
    """The tensors whose numbers `node` reads."""
    return [node.inputs[place] for place in pattern_of(graph, node).operands]


def _variable(graph: Graph, node: Node, found: NodePattern) -> NodePattern:
    """`found`, unless a variable of it cannot be read."""
    for place in (*found.reads, *found.writes):
        problem = _spec_problem(variable_spec(graph, node.name, place), None)
        if problem:
            return NodePattern(OpPattern.OPAQUE, problem)
    return found


def _problem(graph: Graph, tensors: list[TensorId]) -> Refusal | None:
    """Why no program holds these tensors, if none does."""
    return next(filter(None, (_spec_problem(graph.specs.get(tensor), tensor) for tensor in tensors)), None)


def _spec_problem(spec: TensorSpec | None, tensor: TensorId | None) -> Refusal | None:
    """What is wrong with a tensor; None: with a variable."""
    if spec is None or spec.shape is None:
        return Reason.VARIABLE_RANK() if tensor is None else Reason.RANK(tensor=tensor)
    if spec.dtype not in DTYPES:
        dtype = spec.dtype
        return Reason.VARIABLE_DTYPE(dtype=dtype) if tensor is None else Reason.DTYPE(tensor=tensor, dtype=dtype)
    if 0 in spec.shape:
        return Reason.VARIABLE_EMPTY() if tensor is None else Reason.EMPTY(tensor=tensor)
    return None


def _view_problem(graph: Graph, node: Node, rule: Rule) -> Refusal | None:
    """Why a view cannot be a step by itself, which the one in a kernel's place might be."""
    if rule.pattern is not OpPattern.VIEW or node.op in IDENTITIES:
        return None
    unknown = (graph.specs[TensorId(node.name)].shape or ()).count(None)
    return None if unknown <= 1 else Reason.VIEW_SIZES(op=node.op, count=unknown)


def called(graph: Graph, node: Node, problem: Refusal) -> NodePattern:
    """The pattern of a node that TensorFlow's own kernel runs, for a reason: inside of a region if it has no state and
    its tensors are numbers."""
    if node.op in DRAWS:
        return NodePattern(OpPattern.OPAQUE, Reason.RANDOM())
    if node.op in _POOLS_AT_RANDOM:
        return NodePattern(OpPattern.OPAQUE, Reason.RANDOM_POOL(op=node.op))
    if is_update(node.op) and node.op not in RULES:
        return NodePattern(OpPattern.OPAQUE, Reason.UPDATE_WITHOUT_RULE(because=problem))
    if node.stateful:
        return NodePattern(OpPattern.OPAQUE, problem if node.op in RULES else Reason.STATEFUL(op=node.op))
    tensors = [*node.inputs, *graph.tensors(node)]
    specs = [graph.specs.get(tensor) for tensor in tensors]
    fixed = all(spec is not None and spec.dtype in VALUE_DTYPES and spec.shape is not None for spec in specs)
    if not fixed or not node.inputs or not node.outputs or _calls_functions(node):
        return NodePattern(OpPattern.OPAQUE, problem)
    if node.op not in SHAPED_BY_SHAPES and any(graph.specs[tensor].sizes is None for tensor in graph.tensors(node)):
        return NodePattern(OpPattern.OPAQUE, Reason.SIZED_BY_DATA(because=problem, op=node.op))
    return NodePattern(OpPattern.CALL, problem, tuple(range(len(node.inputs))))


def _calls_functions(node: Node) -> bool:
    """Whether an attribute names a function; attributes that a pass wrote name none."""
    read = (value for value in node.attrs.values() if hasattr(value, "WhichOneof"))
    return any(value.WhichOneof("value") == "func" or value.list.func for value in read)
