"""Gradients of activations, with the arithmetic of TensorFlow's kernels (cwise_ops_gradients.h, relu_op_functor.h,
softplus_op.h, softsign_op.h): the order of the factors decides what overflows, and what zero times infinity is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from custom_ops.expr.activations import SELU_ABOVE, SELU_BELOW
from graph_passes.graph.ir import Node, floating
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.program_writer import ProgramWriter, Steps
from graph_passes.lower.rule import Rule, elements

# Arguments: a gradient and what the op made, or a gradient and what the op read, in the order of the inputs.
_Formula: TypeAlias = Callable[[ProgramWriter, Node, int, int], int]


def _rule(formula: _Formula) -> Rule:
    def write(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
        x, y = yield from elements(w, node, at, node.inputs)
        return formula(w, node, x, y)

    return Rule(write, OpPattern.ELEMENTWISE)


def _is_above(w: ProgramWriter, value: int, bound: float) -> int:
    return w.apply("greater", value, w.like(value, bound))


def _relu(w: ProgramWriter, node: Node, gradient: int, x: int) -> int:
    return w.apply("multiply", gradient, w.cast(w.dtype(x), _is_above(w, x, 0)))


def _relu6(w: ProgramWriter, node: Node, gradient: int, x: int) -> int:
    inside = w.apply("logical_and", _is_above(w, x, 0), w.apply("greater", w.like(x, 6), x))
    return w.apply("multiply", gradient, w.cast(w.dtype(x), inside))


def _leaky_relu(w: ProgramWriter, node: Node, gradient: int, x: int) -> int:
    slope = w.like(x, floating(node.attrs.get("alpha", 0.2)))
    return w.apply("select", _is_above(w, x, 0), gradient, w.apply("multiply", gradient, slope))


def _elu(w: ProgramWriter, node: Node, gradient: int, y: int) -> int:
    below = w.apply("multiply", w.apply("add", y, w.like(y, 1)), gradient)
    return w.apply("select", w.apply("greater", w.like(y, 0), y), below, gradient)


def _selu(w: ProgramWriter, node: Node, gradient: int, y: int) -> int:
    below = w.apply("multiply", gradient, w.apply("add", y, w.like(y, SELU_BELOW)))
    above = w.apply("multiply", gradient, w.like(y, SELU_ABOVE))
    return w.apply("select", w.apply("greater", w.like(y, 0), y), below, above)


def _softplus(w: ProgramWriter, node: Node, gradient: int, x: int) -> int:
    return w.apply("divide", gradient, w.apply("add", w.apply("exp", w.apply("negate", x)), w.like(x, 1)))


def _softsign(w: ProgramWriter, node: Node, gradient: int, x: int) -> int:
    return w.apply("divide", gradient, w.apply("square", w.apply("add", w.like(x, 1), w.apply("absolute", x))))


def _sigmoid(w: ProgramWriter, node: Node, y: int, gradient: int) -> int:
    return w.apply("multiply", gradient, w.apply("multiply", y, w.apply("subtract", w.like(y, 1), y)))


def _tanh(w: ProgramWriter, node: Node, y: int, gradient: int) -> int:
    return w.apply("multiply", gradient, w.apply("subtract", w.like(y, 1), w.apply("multiply", y, y)))


def _reciprocal(w: ProgramWriter, node: Node, y: int, gradient: int) -> int:
    return w.apply("multiply_no_nan", w.apply("negate", w.apply("multiply", y, y)), gradient)


def _sqrt(w: ProgramWriter, node: Node, y: int, gradient: int) -> int:
    return w.apply("multiply_no_nan", w.apply("divide", w.like(y, 0.5), y), gradient)


def _rsqrt(w: ProgramWriter, node: Node, y: int, gradient: int) -> int:
    square = w.apply("multiply", w.like(y, -0.5), w.apply("multiply", y, y))
    return w.apply("multiply_no_nan", square, w.apply("multiply_no_nan", y, gradient))


RULES = {
    "ReluGrad": _rule(_relu),
    "Relu6Grad": _rule(_relu6),
    "LeakyReluGrad": _rule(_leaky_relu),
    "EluGrad": _rule(_elu),
    "SeluGrad": _rule(_selu),
    "SoftplusGrad": _rule(_softplus),
    "SoftsignGrad": _rule(_softsign),
    "SigmoidGrad": _rule(_sigmoid),
    "TanhGrad": _rule(_tanh),
    "ReciprocalGrad": _rule(_reciprocal),
    "InvGrad": _rule(_reciprocal),
    "SqrtGrad": _rule(_sqrt),
    "RsqrtGrad": _rule(_rsqrt),
}
