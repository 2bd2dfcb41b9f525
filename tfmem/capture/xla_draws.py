"""Random ops as XLA has them: which draw TensorFlow's numbers there, and a graph in which more of them do.

XLA's Philox gives TensorFlow's bits, but XLA takes other bits of each for the fraction of a float, and reads only 32
bits of a seed. So a graph for XLA draws integers, and makes floats, keys and counters of them as TensorFlow does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import tensor_util

from tfmem.capture.captured import BODIES, HARMLESS, RANDOM, every_node, op_definition

UNIFORM, KEYS = "StatelessRandomUniformV2", "StatelessRandomGetKeyCounter"
_SCRAMBLING = 0x02461E293EC8F720  # the key under which TensorFlow makes a key and a counter of a seed
_PHILOX = 1  # TensorFlow's number of the algorithm
# These give TensorFlow's bits (tests/tf/test_xla_draws.py).
_EQUAL = frozenset({KEYS, "StatelessRandomGetAlg", "StatelessRandomUniformFullIntV2", "StatelessRandomUniformIntV2"})
_REFUSED = RANDOM | (HARMLESS - {"ReadVariableOp", "VarHandleOp"})
_CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})


@dataclass(frozen=True)
class _Float:
    """How TensorFlow makes a float of random bits: those of `mask` become the fraction of a number from 1 to 2.

    Attributes:
        bits: the integers that are drawn.
        mask: of the bits that are used.
        one: the bits of 1.
        narrow: the integers with as many bits as the float.
    """

    bits: tf.DType
    mask: int
    one: int
    narrow: tf.DType


_FLOATS = {
    tf.float32: _Float(tf.uint32, 0x7FFFFF, 0x3F800000, tf.uint32),
    tf.bfloat16: _Float(tf.uint32, 0x7F, 0x3F80, tf.uint16),
    tf.float16: _Float(tf.uint32, 0x3FF, 0x3C00, tf.uint16),
    tf.float64: _Float(tf.uint64, 0xFFFFFFFFFFFFF, 0x3FF0000000000000, tf.uint64),
}


def has_floats(graph_def: GraphDef) -> bool:
    """Whether there are random floats of which XLA by itself would draw others."""
    return any(_is_uniform(node) for node in every_node(graph_def))


def differs_in(graph_def: GraphDef) -> str:
    """Why XLA would draw other numbers than TensorFlow, or leave out a check; "" if it does not."""
    for node in every_node(graph_def):
        name = f"'{node.name}' ({node.op})"
        if node.op in _CHECKS:
            return f"XLA leaves out the check of {name}"
        if _is_random(node) and node.op not in _EQUAL and not _is_uniform(node):
            return f"{name} would draw other numbers"
    return ""


def _is_random(node: NodeDef) -> bool:
    if node.op in _REFUSED:
        return True
    if node.op.startswith(("Stateless", "Stateful", "Rng")):
        return node.op not in BODIES
    definition = op_definition(node.op)
    return definition is not None and any(attr.name == "seed" for attr in definition.attr)


def _is_uniform(node: NodeDef) -> bool:
    return node.op == UNIFORM and tf.as_dtype(node.attr["dtype"].type) in _FLOATS


def with_own_draws(graph_def: GraphDef) -> GraphDef:
    """`graph_def` whose random floats are TensorFlow's under XLA, too."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    _edit(result.node, in_function=False)
    for function in result.library.function:
        renamed = _edit(function.node_def, in_function=True)
        for node in function.node_def:
            node.input[:] = [renamed.get(name, name) for name in node.input]
        for name, value in function.ret.items():
            function.ret[name] = renamed.get(value, value)
    return result


def _edit(nodes: Any, in_function: bool) -> dict[str, str]:
    """Edit the nodes of a graph; the results of a function's that have other names now."""
    renamed: dict[str, str] = {}
    for node in list(nodes):
        if _is_uniform(node):
            nodes.extend(_floats(node, _Ops(node, in_function)))
        elif node.op == KEYS:
            nodes.extend(_keys(node, _Ops(node, in_function)))
            renamed |= {f"{node.name}:key:0": f"{node.name}:output:0"}
            renamed |= {f"{node.name}:counter:0": f"{node.name}:output:1"}
    return renamed


class _Ops:
    """Ops that stand for one node, named after it."""

    def __init__(self, node: NodeDef, in_function: bool) -> None:
        self.made: list[NodeDef] = []
        self._node, self._in_function = node, in_function

    def __call__(self, kind: str, inputs: Iterable[str], result: str, **attributes: Any) -> str:
        """The name of the first result of a new op; `result` is what a function calls it."""
        name = f"{self._node.name}/tfmem_{len(self.made)}"
        new = NodeDef(name=name, op=kind, input=inputs, device=self._node.device)
        for key, value in attributes.items():
            if isinstance(value, tf.DType):
                new.attr[key].type = value.as_datatype_enum
            elif isinstance(value, int):
                new.attr[key].i = value
            else:
                new.attr[key].CopyFrom(value)
        self.made.append(new)
        return f"{name}:{result}:0" if self._in_function else name

    def const(self, value: Any, dtype: tf.DType) -> str:
        """A constant."""
        proto = tensor_util.make_tensor_proto(value, dtype)
        return self("Const", (), "output", dtype=dtype, value=AttrValue(tensor=proto))

    def identity(self, inputs: Sequence[str], dtypes: Sequence[tf.DType]) -> list[NodeDef]:
        """All of them, for the graph; the node hands on these results from now on."""
        node = self._node
        del node.input[:]
        node.input.extend(inputs)
        node.ClearField("attr")
        if len(inputs) == 1:
            node.op = "Identity"
            node.attr["T"].type = dtypes[0].as_datatype_enum
        else:
            node.op = "IdentityN"
            node.attr["T"].list.type.extend(dtype.as_datatype_enum for dtype in dtypes)
        return self.made


def _floats(node: NodeDef, op: _Ops) -> list[NodeDef]:
    """`StatelessRandomUniformV2`: bits become the fraction of a number from 1 to 2, less 1."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    how = _FLOATS[dtype]
    bits = op("StatelessRandomUniformFullIntV2", node.input, "output", dtype=how.bits, Tshape=node.attr["Tshape"])
    if how.bits is tf.uint64:  # the first 32 bits that are drawn are the upper half
        half = op.const(32, tf.uint64)
        halves = [op(f"{to}Shift", (bits, half), "z", T=tf.uint64) for to in ("Left", "Right")]
        bits = op("BitwiseOr", halves, "z", T=tf.uint64)
    bits = op("BitwiseAnd", (bits, op.const(how.mask, how.bits)), "z", T=how.bits)
    bits = op("BitwiseOr", (bits, op.const(how.one, how.bits)), "z", T=how.bits)
    if how.narrow is not how.bits:
        bits = op("Cast", (bits,), "y", SrcT=how.bits, DstT=how.narrow)
    number = op("Bitcast", (bits,), "output", T=how.narrow, type=dtype)
    return op.identity([op("Sub", (number, op.const(1.0, dtype)), "z", T=dtype)], [dtype])


def _keys(node: NodeDef, op: _Ops) -> list[NodeDef]:
    """`StatelessRandomGetKeyCounter`: Philox of the seed under a fixed key. XLA's reads 32 bits of each seed alone."""
    seed, *waits = node.input
    if tf.as_dtype(node.attr["Tseed"].type) is not tf.int64:
        seed = op("Cast", (seed,), "y", SrcT=tf.as_dtype(node.attr["Tseed"].type), DstT=tf.int64)
    seed = op("Bitcast", (seed, *waits), "output", T=tf.int64, type=tf.uint64)
    inputs = (op.const([2], tf.int32), op.const([_SCRAMBLING], tf.uint64), seed, op.const(_PHILOX, tf.int32))
    mixed = op("StatelessRandomUniformFullIntV2", inputs, "output", dtype=tf.uint64, Tshape=tf.int32)

    def part(begin: int) -> str:
        ends = op.const([begin], tf.int32), op.const([begin + 1], tf.int32), op.const([1], tf.int32)
        masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
        return op("StridedSlice", (mixed, *ends), "output", T=tf.uint64, Index=tf.int32, **masks)

    parts = (op.const([0], tf.uint64), part(1), op.const(0, tf.int32))
    counter = op("ConcatV2", parts, "output", T=tf.uint64, Tidx=tf.int32, N=2)
    return op.identity([part(0), counter], [tf.uint64, tf.uint64])
