"""Ops for which TensorFlow raises an error, keeps NaN or has an order of equals, and XLA does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from tfmem.capture.captured import op_name

# XLA compiles these for a CPU without regard to NaN: the largest of 1 and NaN is 1 (its fast minimum and maximum).
_WITHOUT_NAN = frozenset(
    [
        "Max",
        "Min",
        "Maximum",
        "Minimum",
        "UnsortedSegmentMax",
        "UnsortedSegmentMin",
        "SegmentMax",
        "SegmentMin",
        "SegmentMaxV2",
        "SegmentMinV2",
        "ResourceScatterMax",
        "ResourceScatterMin",
        "TensorScatterMax",
        "TensorScatterMin",
    ]
)
# XLA orders -0 before 0, and NaN last; TensorFlow's kernel on a CPU takes the first of equals.
_ORDERS = frozenset({"TopK", "TopKV2"})
_DIVIDES = frozenset({"Div", "FloorDiv", "FloorMod", "Mod", "RealDiv", "TruncateDiv", "TruncateMod"})
_PASSED = frozenset({"Identity", "Cast", "Reshape", "ExpandDims", "Squeeze"})
# what TensorFlow refuses
_REFUSES = {
    **dict.fromkeys(("MatrixInverse", "MatrixSolve"), "a matrix that has no inverse"),
    "ReverseSequence": "a length that no sequence has",
}


def left_out(graph_def: GraphDef, on_a_cpu: bool) -> str:
    """Why XLA would give a result where TensorFlow raises an error, or has NaN or another order; "" if it would not."""
    for nodes in _graphs(graph_def):
        makers = {node.name: node for node in nodes}
        for node in nodes:
            name = f"'{node.name}' ({node.op})"
            if on_a_cpu and node.op in _WITHOUT_NAN and not _is_whole(node, "dtype" if "dtype" in node.attr else "T"):
                return f"on a CPU {name} would lose NaN"
            if on_a_cpu and node.op in _ORDERS:
                return f"on a CPU {name} would order zeros and NaN in another way"
            if refused := _refused(node, makers):
                return f"{name} would not raise an error for {refused}"
    return ""


def _graphs(graph_def: GraphDef) -> Iterator[Iterable[NodeDef]]:
    """The nodes of the graph, and of each of its functions: names are unique within one of these."""
    yield graph_def.node
    yield from (function.node_def for function in graph_def.library.function)


def _refused(node: NodeDef, makers: Mapping[str, NodeDef]) -> str:
    """What TensorFlow's kernel of an op refuses, and the op may be given; "" if nothing."""
    if node.op in _REFUSES:
        return _REFUSES[node.op]
    if node.op in _DIVIDES and _is_whole(node, "T") and not _are(node.input[1], makers, lambda numbers: numbers != 0):
        return "an integer that is divided by zero"
    if node.op == "Pow" and _is_whole(node, "T") and not _are(node.input[1], makers, lambda numbers: numbers >= 0):
        return "an integer with a negative exponent"
    return ""


def _is_whole(node: NodeDef, attribute: str) -> bool:
    return bool(tf.as_dtype(node.attr[attribute].type).is_integer)


def _are(name: str, makers: Mapping[str, NodeDef], hold: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether `hold` is known of all numbers of a tensor: a constant, or a maximum with a positive one.

    TensorFlow divides by such a maximum in the gradients of sums and means.
    """
    maker = makers.get(op_name(name))
    while maker is not None and maker.op in _PASSED and ("SrcT" not in maker.attr or _is_whole(maker, "SrcT")):
        maker = makers.get(op_name(maker.input[0]))
    if maker is None:
        return False
    if maker.op == "Maximum":
        return any(_are(each, makers, lambda numbers: numbers > 0) for each in maker.input[:2])
    return maker.op == "Const" and bool(hold(tf.make_ndarray(maker.attr["value"].tensor)).all())
