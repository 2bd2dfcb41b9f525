"""What capture hands to the passes: a graph, and what of it has to be fed, fetched and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue, NameAttrList
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.errors import GraphError

# Stateful ops that only read or only name a resource. A graph may drop one whose result
# no op reads.
READERS = frozenset(
    {
        "AnonymousIterator",
        "AnonymousIteratorV2",
        "AnonymousIteratorV3",
        "HashTableV2",
        "IteratorV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "MutableHashTableV2",
        "Placeholder",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarHandleOp",
        "VarIsInitializedOp",
        "Variable",
        "VariableShape",
        "VariableV2",
    }
)

# Stateful ops that a second run does no harm to: it gives random ops separate kernels.
HARMLESS = frozenset(
    {
        "ReadVariableOp",
        "VarHandleOp",
        "DeepCopy",
        "Empty",
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "ParameterizedTruncatedNormal",
        "Multinomial",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "ThreadUnsafeUnigramCandidateSampler",
        "UniformCandidateSampler",
    }
)
# Only the op itself reads its state. TensorFlow, too, drops such an op if no op reads its numbers.
RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
)

# Attributes that name functions which an op runs where the op itself runs.
BODIES = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


@dataclass(frozen=True)
class Captured:
    """A graph on its way through the pipeline.

    Attributes:
        graph_def: the graph with its function library; nodes in creation order until Grappler has
            run.
        feeds: names ("x:0") of the placeholders: explicit inputs, then captures, in signature
            order.
        fetches: names ("loss:0") of the flat outputs, in order; a tensor may be fetched twice.
        control_fetches: names of the ops that have to run for their side effects.
        creation_order: op names in the order in which the user's program made them, before
            Grappler. Ops of inlined functions stand where the call stood, as "call/op".
        traced: the graphs that the program was traced into: under "" its own, and under their names
            those of the functions it calls. Their tensors have shapes that a GraphDef does not
            hold: those that a `set_shape` gave them.
        origins: for the ops of inlined functions, the function and their name in it.
    """

    graph_def: tf.compat.v1.GraphDef
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    control_fetches: tuple[str, ...]
    creation_order: tuple[str, ...]
    traced: Mapping[str, tf.Graph] = field(default_factory=dict)
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def require_feeds(captured: Captured, names: Iterable[str]) -> None:
    """
    Raises:
        GraphError: one of the names is no input of the graph.
    """
    inputs = [op_name(name) for name in captured.feeds]
    for name in names:
        if name not in inputs:
            raise GraphError(
                f"input_shapes names '{name}', which is no input of the graph; its inputs are: {', '.join(inputs)}"
            )


def op_name(tensor_name: str) -> str:
    """The op that makes the tensor "op:0"."""
    return tensor_name.removeprefix("^").partition(":")[0]


def side_effects(operations: Iterable[tf.Operation]) -> list[str]:
    """Names of the ops that do more than compute a result from their inputs."""
    return [op.name for op in operations if is_stateful(op.type) and op.type not in READERS | RANDOM]


def is_stateful(op_type: str) -> bool:
    """Whether TensorFlow registers this op type as stateful; False for types it does not know."""
    definition = op_definition(op_type)
    return definition is not None and definition.is_stateful


def op_definition(op_type: str):  # type: ignore[no-untyped-def]
    """The registered `OpDef`, or None. Relies on the private op registry: no public API tells an
    op's signature.
    """
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op_type)


def every_node(graph_def: GraphDef) -> Iterator[NodeDef]:
    """The nodes of a graph and of its function library."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def with_whole_names(captured: Captured) -> Captured:
    """`captured` with one name for each device: "/device:CPU:0" becomes that of other ops, with job and task."""
    names = {node.device for node in every_node(captured.graph_def)} - {""}
    whole = {short: [name for name in names if name != short and name.endswith(short)] for short in names}
    renamed = {short: found[0] for short, found in whole.items() if len(found) == 1}
    if not renamed:
        return captured
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    for node in every_node(graph_def):
        node.device = renamed.get(node.device, node.device)
    return replace(captured, graph_def=graph_def)


def functions_in(value: AttrValue) -> Sequence[NameAttrList]:
    """The functions that an attribute of a node names; they can be edited."""
    return [value.func] if value.HasField("func") else value.list.func


def called_by(nodes: Iterable[NodeDef]) -> list[str]:
    """Names of the functions that nodes call, each once, in the nodes' order."""
    attrs = (node.attr[name] for node in nodes for name in sorted(node.attr))
    return list(dict.fromkeys(function.name for value in attrs for function in functions_in(value)))


def is_compiled(marked: NodeDef | FunctionDef) -> bool:
    """Whether XLA has to compile a function, or a call of it (`jit_compile=True`)."""
    return "_XlaMustCompile" in marked.attr and marked.attr["_XlaMustCompile"].b


def free_name(wanted: str, taken: set[str]) -> str:
    """`wanted`, or that with a number; it is taken from now on."""
    name, suffix = wanted, 1
    while name in taken:
        name, suffix = f"{wanted}_{suffix}", suffix + 1
    taken.add(name)
    return name


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names in order, each once."""
    return tuple(dict.fromkeys(names))
