"""What a function returns, as terms: ops of inputs, down to the function's arguments and to constants.

Two bodies that compute the same in the same way have equal terms, whatever their nodes are called. Terms leave out what
Grappler may write in several ways:

    Identity(x), and a cast between int32 and int64         x
    a constant of one number, Fill, ZerosLike               Full
    Shape(x)[0]                                             Count(x)
    ExpandDims(x, 1)                                        Column(x); of Flat(x), x
    Squeeze(x, 1), Squeeze(x, -1)                           Flat(x)
    Pack(x), ExpandDims(x, 0) of one number                 Vector(x)

Conditions in a body are `If(predicate, then, else)`. An op that is not listed has its attributes in its term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

Library = Mapping[str, FunctionDef]

_INDEX_TYPES = frozenset({tf.int32.as_datatype_enum, tf.int64.as_datatype_enum})
_COMMUTATIVE = frozenset({"AddV2", "Equal", "LogicalAnd", "LogicalOr", "Mul"})
# Attributes that say what inputs say, or which error a call raises that is none.
_NEITHER = frozenset({"N", "incompatible_shape_error"})
_AXIS = 2  # the input of GatherV2 that says the dimension


@dataclass(frozen=True)
class Number:
    """A tensor that is one number everywhere: "b", "i" or "f", its shape, and the number."""

    kind: str
    shape: tuple[int, ...]
    number: bool | int | float


@dataclass(frozen=True)
class BodyTerm:
    """A tensor of a function's body.

    Attributes:
        op: what makes it; "Argument", "Full" and the other words above among them.
        inputs: of the op, those that say shapes or dimensions in another way left out.
        detail: of an argument its position; of a constant its value, a `Number` for Full; else attributes.
    """

    op: str
    inputs: tuple[BodyTerm, ...] = ()
    detail: object = None

    @property
    def number(self) -> Number | None:
        """What it is everywhere; None if that is not one number that the body says."""
        return self.detail if isinstance(self.detail, Number) else None


def term(op: str, *inputs: BodyTerm, detail: object = None) -> BodyTerm:
    """A term in its normal form."""
    first = inputs[0] if inputs else None
    if op == "Column" and first is not None and first.op == "Flat":
        return first.inputs[0]
    if op == "Count" and first is not None and first.op in ("Column", "Flat"):
        return term("Count", *first.inputs)
    if op == "Vector" and first is not None and first.number is not None:
        return BodyTerm("Full", (), replace(first.number, shape=(1,)))
    if op in _COMMUTATIVE:
        inputs = tuple(sorted(inputs, key=repr))
    return BodyTerm(op, tuple(inputs), detail)


def full(number: bool | int | float, *shape: int) -> BodyTerm:
    """A tensor that is one number everywhere."""
    kind = {bool: "b", int: "i", float: "f"}[type(number)]
    return BodyTerm("Full", (), Number(kind, shape, number))


def returned(function: FunctionDef, arguments: Sequence[BodyTerm], library: Library) -> list[BodyTerm]:
    """The terms of a function's results, in order.

    Args:
        function: its body.
        arguments: the terms of its arguments.
        library: functions that it may call.

    Raises:
        KeyError: the body reads what is not there, or has an op without a term: one with several results, say.
    """
    body = _Body(function, arguments, library)
    return [body.tensor(function.ret[result.name]) for result in function.signature.output_arg]


class _Body:
    def __init__(self, function: FunctionDef, arguments: Sequence[BodyTerm], library: Library) -> None:
        self._nodes = {node.name: node for node in function.node_def}
        self._known = dict(zip((each.name for each in function.signature.input_arg), arguments, strict=True))
        self._library = library

    def tensor(self, name: str) -> BodyTerm:
        if name not in self._known:
            op_name, _, output = name.partition(":")
            node = self._nodes[op_name]
            inputs = [self.tensor(each) for each in node.input if not each.startswith("^")]
            self._known[name] = self._of(node, inputs, output)
        return self._known[name]

    def _of(self, node: NodeDef, inputs: list[BodyTerm], output: str) -> BodyTerm:
        place = int(output.rpartition(":")[2] or 0)
        if node.op in ("If", "StatelessIf"):
            predicate, *rest = inputs
            names = (node.attr[each].func.name for each in ("then_branch", "else_branch"))
            branches = [returned(self._library[name], rest, self._library)[place] for name in names]
            return branches[0] if branches[0] == branches[1] else term("If", predicate, *branches)
        if place:
            raise KeyError(f"result {place} of {node.op}")
        return _plain(node, inputs)


def _plain(node: NodeDef, inputs: list[BodyTerm]) -> BodyTerm:
    op, attr = node.op, node.attr
    if op == "Identity" or (op == "Cast" and {attr["SrcT"].type, attr["DstT"].type} <= _INDEX_TYPES):
        return inputs[0]
    if op == "Const":
        return _constant(node)
    if op == "Fill" and inputs[1].op == "Full":
        return term("Filled", *inputs)
    if op == "ExpandDims" and inputs[1] == full(1):
        return term("Column", inputs[0])
    if (op == "ExpandDims" and inputs[1] == full(0)) or (op == "Pack" and len(inputs) == 1):
        return term("Vector", inputs[0])
    if op == "Squeeze" and list(attr["squeeze_dims"].list.i) in ([1], [-1]):
        return term("Flat", inputs[0])
    if op == "StridedSlice" and tuple(inputs[1:]) == (full(0, 1), full(1, 1), full(1, 1)):
        masks = [attr[f"{name}_mask"].i for name in ("ellipsis", "new_axis", "shrink_axis")]
        if masks == [0, 0, 1] and inputs[0].op == "Shape":
            return term("Count", *inputs[0].inputs)
        if masks in ([0, 0, 1], [0, 0, 0]):
            return term("First" if masks[-1] else "FirstRow", inputs[0])
    if op == "GatherV2" and not attr["batch_dims"].i and inputs[_AXIS] == full(0):
        return term("Rows", *inputs[:_AXIS])
    if op == "Shape":
        return term("Shape", *inputs)
    attributes = tuple(sorted((name, attr[name].SerializeToString()) for name in attr if _says_more(name, attr[name])))
    return term(op, *inputs, detail=attributes or None)


def _says_more(name: str, value: tf.compat.v1.AttrValue) -> bool:
    """Whether an attribute says more than dtypes and counts, which the inputs say."""
    kind = value.WhichOneof("value")
    return (
        not name.startswith("_") and name not in _NEITHER and kind not in ("type", None) and bool(getattr(value, kind))
    )


def _constant(node: NodeDef) -> BodyTerm:
    value = tf.make_ndarray(node.attr["value"].tensor)
    numbers = value.reshape(-1)
    if value.size and value.dtype.kind in "bif" and value.tobytes() == numbers[:1].tobytes() * value.size:
        number = numbers[0].item()
        if number or not np.signbit(number):
            return BodyTerm("Full", (), Number(value.dtype.kind, value.shape, number))
    return BodyTerm("Const", (), (value.dtype.name, value.shape, value.tobytes()))
